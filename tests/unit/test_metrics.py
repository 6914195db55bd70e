import importlib.util
import json
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.metrics import open_metrics, read_metrics


def row(step: int, kind: str = "step") -> dict:
    return {"kind": kind, "step": step, "reward_mean": 0.5, "endings": {"answered": 3}}


def test_rows_go_to_the_file_and_to_tensorboard(tmp_path: Path) -> None:
    with open_metrics(tmp_path, from_step=0, tracker="none") as write:
        write(row(0))
        write(row(1))
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("step/reward_mean")] == [0, 1]
    assert events.Scalars("step/endings/answered")[0].value == 3


def test_a_resumed_run_takes_back_the_lines_of_the_steps_it_repeats(tmp_path: Path) -> None:
    rows = [row(0, "eval"), row(0), row(1), row(2, "eval"), row(2), row(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with open_metrics(tmp_path, from_step=2, tracker="none") as write:
        write(row(2))
    kept = [(r["kind"], r["step"]) for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert kept == [("eval", 0), ("step", 0), ("step", 1), ("eval", 2), ("step", 2)]


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row(0)) + "\n" + json.dumps(row(1))[:17])
    assert [r["step"] for r in read_metrics(path)] == [0]
    with open_metrics(tmp_path, from_step=1, tracker="none") as write:
        write(row(1))
    assert [r["step"] for r in read_metrics(path)] == [0, 1]


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_tracker_takes_the_rows(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs where the package is installed; neither is needed for anything else."""
    pytest.importorskip(tracker)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    with open_metrics(tmp_path, from_step=0, tracker=tracker) as write:
        write(row(0))
        write(row(1))
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"agentrl\[wandb\]"),
        open_metrics(tmp_path, from_step=0, tracker="wandb"),
    ):
        raise AssertionError("must not open")
