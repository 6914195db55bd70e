import json
import math
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.metrics import as_line, open_metrics, read_lines, read_metrics


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


TRACKED = """
import sys
from pathlib import Path
from agentrl.metrics import open_metrics
with open_metrics(Path(sys.argv[1]), from_step=0, tracker=sys.argv[2]) as write:
    for step in (0, 1):
        write({"kind": "step", "step": step, "reward_mean": 0.5 + step, "endings": {"answered": 3}})
"""


def tracked(tracker: str, folder: Path) -> None:
    """Write two rows in a process of its own: the packages read their settings at import.

    Skips where the package is not installed; neither is needed for anything else.
    """
    pytest.importorskip(tracker)
    own = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "TRACKIO_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", TRACKED, str(folder), tracker],
        capture_output=True, text=True, timeout=120, env={**os.environ, **own},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "stdout is for results"


def test_wandb_takes_the_rows(tmp_path: Path) -> None:
    tracked("wandb", tmp_path)
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    for name in (b"step/reward_mean", b"step/endings/answered"):
        assert log.read_bytes().count(name) >= 2, "a record for each of two rows"


def test_trackio_takes_the_rows(tmp_path: Path) -> None:
    tracked("trackio", tmp_path)
    with closing(sqlite3.connect(tmp_path / "agentrl.db")) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    found = [(step, json.loads(metrics)["step/reward_mean"]) for step, metrics in rows]
    assert found == [(0, 0.5), (1, 1.5)]


def test_a_number_that_is_not_finite_is_no_json_and_written_as_null(tmp_path: Path) -> None:
    with open_metrics(tmp_path, from_step=0, tracker="none") as write:
        write({**row(0), "loss": math.nan, "parts": {"a": math.inf, "b": 1.0}})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=refuse)
    assert found["loss"] is None and found["parts"] == {"a": None, "b": 1.0}
    assert as_line({"ids": [math.nan, (1, -math.inf)]}) == '{"ids": [null, [1, null]]}'


@pytest.mark.parametrize(
    "line",
    ["", "[1]", "null", '{"kind": "step"}', '{"kind": "step", "step": 1.5}', '{"step": 1}',
     '{"kind": "step", "step": true}', '{"kind": "step", "step": -1}', '{"kind": "x", "step": 1}',
     '{"kind": "step", "step": 1e400}', "[" * 100_000, '{"kind": "step", "step": ' + "9" * 5000],
)  # fmt: skip
def test_a_line_that_makes_no_sense_is_one_for_every_reader(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps(row(0))}\n{line}\n{json.dumps(row(1))}\n")
    assert [r["step"] for r in read_metrics(path)] == [0, 1]
    assert [r is None for r in read_lines(path)] == [False, True, False]


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"pip install 'agentrl\[nobodys_tracker\]'"),
        open_metrics(tmp_path, from_step=0, tracker="nobodys_tracker"),
    ):
        raise AssertionError("must not open")
