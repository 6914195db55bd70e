"""Records of other programs or of `rollout`, and options that a rung has no use for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.entry import run as cli
from agentrl.replay.records import Records
from agentrl.store import ParquetStore, read_facts

Say = Callable[..., str]
ROW = {
    "messages": [
        {"role": "user", "content": "What is 1+2?"},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ],
    "metadata": {"reward": 1.0},
}


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs a command line; returns its stdout (and stderr, where a code is wanted)."""

    def say(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        found = cli([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert found == code, (out, err)
        assert "Traceback" not in out + err
        return out + err if code else out

    return say


def imported(said: Say, folder: Path, rows: list[dict[str, Any]], *options: str) -> Path:
    """A folder of step files made from rows."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said("import", file, folder / "out", *options)
    return folder / "out"


def test_an_import_without_configuration_says_what_to_name(said: Say, tmp_path: Path) -> None:
    out = imported(said, tmp_path, [ROW, ROW])
    assert "What is 1+2?" in said("show", out)
    checked = said("replay", out)
    assert checked.count("note: 4 turns of 1 episodes: it has no logprobs") == 1
    assert "1 steps checked: as recorded" in checked
    for depth in ("regrade", "reforward", "reexecute"):
        assert "agentrl replay --config FILE" in said("replay", out, "--depth", depth, code=2)
    assert "they are the same" in said(
        "replay", out, "--depth", "diff", "--episode", "0.0", "--other", "0.1"
    )


def test_what_is_named_makes_an_import_replayable(said: Say, tmp_path: Path) -> None:
    out = imported(said, tmp_path, [ROW])
    told = said("replay", out, "--depth", "reforward", "--model", "tiny", code=2)
    assert "has no logprobs" in told
    assert read_facts(ParquetStore(out).path(0)).keys() >= {"tokenizer_sha256"}
    told = said("replay", out, "--depth", "regrade", "--environment", "calculator", code=2)
    assert "calculator has no problem imported" in told
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    told = said("replay", out, "--depth", "regrade", "--config", config, code=2)
    assert "has no problem imported" in told
    fork = ("replay", out, "--depth", "fork", "--episode", "0.0")
    assert "--config FILE" in said(*fork, "--environment", "calculator", code=2)


def test_secrets_spelled_by_ids_leave_an_import(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2hunter2")
    row = {"messages": [ROW["messages"][0], {"role": "assistant", "content": "hunter2hunter2"}]}
    out = imported(said, tmp_path, [row])
    (one,) = Records(out).episodes()
    assert one.trajectory.metrics["redacted_tokens"] > 0
    assert "hunter2" not in said("show", out, "--json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt_ids": [2**31]}, "token id '2147483648'"),
        ({"prompt_ids": [1.5]}, "token id '1.5'"),
        ({"extra_fields": {"agentrl": {"seed": 2**63}}}, "seed '9223372036854775808'"),
        ({"extra_fields": {"agentrl": {"member": 2**40}}}, "member"),
        ({"extra_fields": {"agentrl": {"versions": [[2**33]]}}}, "version"),
    ],
)
def test_numbers_that_no_record_can_hold_are_one_line(
    said: Say, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    row = {"prompt_ids": [1], "completion_ids": [2], "env_mask": [1], "reward": 1.0} | change
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    told = said("import", file, tmp_path / "out", "--format", "trl", code=2)
    assert "line 1 is no trl trajectory" in told and named in told


def test_check_of_one_episode_is_of_that_one(said: Say, tmp_path: Path) -> None:
    out = imported(said, tmp_path, [ROW, ROW])
    told = said("replay", out, "--episode", "0.1")
    assert "note: 2 turns of 1 episodes" in told and "1 episode checked: as recorded" in told


@pytest.mark.parametrize(
    "options",
    [
        ("--turn", "0"),
        ("--samples", "1"),
        ("--other", "0.1"),
        ("--ignore", "x"),
        ("--set", "algorithm.preset=grpo"),
        ("--depth", "relearn", "--episode", "0.0"),
        ("--depth", "reforward", "--environment", "calculator"),
        ("--depth", "regrade", "--model", "tiny"),
        ("--depth", "regrade", "--pytest", "test_x.py"),
    ],
)
def test_an_option_of_another_rung_is_refused(
    said: Say, tmp_path: Path, options: tuple[str, ...]
) -> None:
    told = said("replay", imported(said, tmp_path, [ROW]), *options, code=2)
    assert "means nothing to --depth" in told and len(told.splitlines()) == 1


@pytest.mark.parametrize("options", [("--step", "0"), ("--groups", "3"), ("--depth", "check")])
def test_what_chooses_for_an_export_needs_one(
    said: Say, tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = imported(said, tmp_path, [ROW])
    assert "--export" in said("view", out, *options, code=2)


def test_an_export_with_an_unknown_rung_is_refused(said: Say, tmp_path: Path) -> None:
    out = imported(said, tmp_path, [ROW])
    page = tmp_path / "run.html"
    assert "known here are check" in said(
        "view", out, "--export", page, "--depth", "nonsense", code=2
    )
    assert not page.exists()


def test_a_rollout_is_replayed_from_its_folder_alone(said: Say, tmp_path: Path) -> None:
    out = tmp_path / "rolled"
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    said(
        "rollout", config, "--quiet", "--out", out, "--model", "tiny",
        "--set", "rollout.group_size=2", "--set", "rollout.max_turns=1",
        "--set", "sampling.max_action_tokens=4", "--set", f"run.dir={tmp_path / 'none'}",
    )  # fmt: skip
    facts = read_facts(ParquetStore(out).path(0))
    assert {"config", "tokenizer_sha256", "template_sha256", "versions"} <= facts.keys()
    assert said("replay", out) == "1 steps checked: as recorded\n"
    assert said("replay", out, "--depth", "regrade") == "2 verdicts given again: as recorded\n"
    drift = said("replay", out, "--depth", "reforward", "--episode", "0.0")
    assert drift.startswith("weights: tiny\n") and "|drift| mean" in drift
    # A damaged later step hides nothing of the good one.
    (out / "step-00000001.parquet").write_bytes(b"PAR1 cut")
    told = said("replay", out, code=1)
    assert "step-00000001.parquet is cut" in told and "no configuration" not in told
    shown = said("show", out, "--step", "0", "--plain")
    assert "sandbox memory_mb: " in shown
