"""Learning from the record of one small run, with nothing that samples."""

from pathlib import Path

import pytest
import torch
from small_run import COIN
from transformers import AutoModelForCausalLM

from agentrl import build
from agentrl.cli.display import QuietReporter
from agentrl.cli.entry import run as cli
from agentrl.config import load_config
from agentrl.learning.checkpoint import latest_checkpoint
from agentrl.metrics import read_metrics

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of an untrained policy. Nobody may change it."""
    folder = tmp_path_factory.mktemp("offline")
    (folder / "offline_coin.py").write_text(COIN)
    build.train(load_config(QUICKSTART, settings(folder / "run")), reporter=QuietReporter())
    return folder / "run"


def settings(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        "model.tiny_layers=1", "model.tiny_hidden=32", "warm_start.steps=0", "rollout.groups=2",
        "rollout.group_size=4", "run.eval_every=0", "run.steps=2", "run.checkpoint_every=2",
        "environment.options={digits: 1, count: 50}", f"run.dir={folder}",
        f"environment.name={folder.parent}/offline_coin.py", *more,
    )  # fmt: skip


def offline(
    record: Path, folder: Path, *more: str, code: int = 0, resume: bool = True
) -> torch.Tensor | None:
    overrides = [part for o in settings(folder, *more) for part in ("--set", o)]
    command = ["train", str(QUICKSTART), "--quiet", "--offline", str(record), *overrides]
    assert cli([*command, *([] if resume else ["--no-resume"])]) == code
    if code:
        return None
    model = AutoModelForCausalLM.from_pretrained(latest_checkpoint(folder / "checkpoints"))
    return torch.cat([p.flatten() for p in model.parameters()])


@pytest.mark.parametrize("preset", ["grpo-offline", "rft", "dpo"])
def test_a_policy_learns_from_the_record_alone(record: Path, tmp_path: Path, preset: str) -> None:
    weights = offline(record, tmp_path / "run", f"algorithm.preset={preset}", "run.steps=4")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert sorted(row["recorded"] for row in rows[:2]) == [0, 1], "an epoch is every step once"
    assert all(row["grad_norm"] > 0 for row in rows)
    start = build.load(load_config(QUICKSTART, settings(tmp_path / "run")), "tiny").model
    assert not torch.equal(torch.cat([p.flatten() for p in start.parameters()]), weights)
    assert not (tmp_path / "run" / "trajectories").exists(), "nothing was sampled"


def test_offline_learning_goes_on_bit_for_bit(record: Path, tmp_path: Path) -> None:
    plan = ("algorithm.preset=grpo-offline", "learner.schedule=constant")
    unbroken = offline(record, tmp_path / "a", *plan, "run.steps=3")
    for steps in (1, 3):
        broken = offline(record, tmp_path / "b", *plan, f"run.steps={steps}")
    assert torch.equal(broken, unbroken)


def test_the_first_ratio_of_grpo_offline_is_to_the_policy_that_sampled(
    record: Path, tmp_path: Path
) -> None:
    offline(record, tmp_path / "run", "algorithm.preset=grpo-offline", "run.steps=1")
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["ratio_max"] == pytest.approx(1, abs=1e-2) and row["ratio_max"] != 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("nothing", "has no trajectories"),
        ("itself", "set another one"),
        ("empty", "no recorded steps"),
        ("again", "already holds a run"),
    ],
)
def test_what_cannot_be_learned_from_is_one_line(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    more = ("algorithm.preset=rft", "run.steps=1")
    if change == "again":
        offline(record, tmp_path / "run", *more)
        capsys.readouterr()
    if change == "empty":
        (tmp_path / "trajectories").mkdir()
    source = record if change in ("itself", "again") else tmp_path
    folder = record if change == "itself" else tmp_path / "run"
    offline(source, folder, *more, code=2, resume=change != "again")
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]
