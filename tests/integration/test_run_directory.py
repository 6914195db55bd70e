"""What a run leaves: every number of its metrics, held against its trajectories."""

import json
from collections import Counter
from math import log, sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest
from small_run import COIN
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentrl import build
from agentrl.cli.display import QuietReporter
from agentrl.config import load_config
from agentrl.learning.checkpoint import latest_checkpoint
from agentrl.metrics import read_metrics
from agentrl.models import tiny_tokenizer
from agentrl.store import ParquetStore

STEP_FIELDS = {
    "kind", "step", "version", "reward_mean", "reward_stderr", "success_rate",
    "groups_with_signal", "endings", "faults", "action_tokens", "observation_tokens", "entropy",
    "kl_ref", "mismatch_k3", "mismatch_max", "clip_share", "grad_norm", "lag", "sample_s",
    "update_s", "publish_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "coin_env.py").write_text(COIN)
    return folder


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A finished run of an untrained policy. Nobody may change it."""
    return train(place, "once")


def train(folder: Path, name: str, *more: str) -> Path:
    small = (
        "model.tiny_layers=1", "model.tiny_hidden=32", "warm_start.steps=0", "rollout.groups=3",
        "rollout.group_size=4", "run.eval_problems=4", "run.eval_every=2", "run.steps=3",
        "environment.options={digits: 1, count: 50}", f"environment.name={folder}/coin_env.py",
        f"run.dir={folder / name}", *more,
    )  # fmt: skip
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    build.train(load_config(quickstart, small), reporter=QuietReporter())
    return folder / name


def test_a_run_directory_is_whole(trained: Path) -> None:
    for name in ("config.yaml", "provenance.json", "metrics.jsonl", "trajectories", "tensorboard"):
        assert (trained / name).exists(), name
    facts = json.loads((trained / "provenance.json").read_text())
    assert len(facts["tokenizer_sha256"]) == len(facts["template_sha256"]) == 64
    assert latest_checkpoint(trained / "checkpoints") is not None


def test_each_line_of_metrics_says_what_the_trajectories_of_its_step_say(trained: Path) -> None:
    rows = [row for row in read_metrics(trained / "metrics.jsonl") if row["kind"] == "step"]
    store = ParquetStore(trained / "trajectories")
    assert [row["step"] for row in rows] == store.versions() == [0, 1, 2]
    assert sum(row["groups_with_signal"] for row in rows) > 5, "there is something to measure"
    for row in rows:
        assert set(row) >= STEP_FIELDS
        assert row["version"] == row["step"] + 1
        groups = list(store.read(version=row["step"]))
        assert len(groups) == 3 and all(len(group.trajectories) == 4 for group in groups)
        trajectories = [t for group in groups for t in group.trajectories]
        actions = [turn.action for t in trajectories for turn in t.turns]
        rewards = [[v.reward for v in group.verdicts] for group in groups]
        means = [fmean(group) for group in rewards]
        assert row["reward_mean"] == pytest.approx(fmean(means))
        assert row["reward_stderr"] == pytest.approx(stdev(means) / sqrt(3))
        passed = [verdict.passed for group in groups for verdict in group.verdicts]
        assert row["success_rate"] == pytest.approx(fmean(passed))
        assert row["groups_with_signal"] == sum(len(set(group)) > 1 for group in rewards)
        assert row["endings"] == Counter(t.ending.value for t in trajectories)
        assert row["faults"] == sum(len(group.faults) for group in groups) == 0
        assert row["action_tokens"] == sum(len(action.token_ids) for action in actions)
        every = sum(len(t.token_ids) for t in trajectories)
        assert row["observation_tokens"] == every - row["action_tokens"]
        assert row["lag"] == 0 == max(row["step"] - v for a in actions for v in a.versions)


def test_what_the_learner_measures_has_the_sizes_it_must(trained: Path) -> None:
    """One update of a batch by the policy that sampled it, on a CPU in float32, without a KL."""
    rows = [row for row in read_metrics(trained / "metrics.jsonl") if row["kind"] == "step"]
    for row in rows:
        assert 0 < row["entropy"] < log(len(tiny_tokenizer())), "nats, over the whole vocabulary"
        assert 0 <= row["mismatch_k3"] < 1e-6 and 0 < row["mismatch_max"] < 1e-3
        assert row["kl_ref"] == 0 and row["clip_share"] == 0 and row["grad_norm"] > 0
        assert min(row[name] for name in ("sample_s", "update_s", "publish_s")) > 0
    assert rows[0]["entropy"] > 1, "an untrained policy is undecided"


def test_an_evaluation_is_a_line_of_its_own(trained: Path) -> None:
    rows = [row for row in read_metrics(trained / "metrics.jsonl") if row["kind"] == "eval"]
    assert [row["step"] for row in rows] == [0, 2], "before the first step, and every two steps"
    for row in rows:
        assert set(row) >= {"kind", "step", "split", "success", "stderr"}
        assert row["split"] == "test" and row["problems"] == 4
        share = row["success"] * 4
        assert share == round(share)
        assert row["stderr"] == pytest.approx(sqrt(row["success"] * (1 - row["success"]) / 3))


def test_tensorboard_holds_the_same_numbers(trained: Path) -> None:
    events = EventAccumulator(str(trained / "tensorboard")).Reload()
    rows = read_metrics(trained / "metrics.jsonl")
    for kind, name in (("step", "reward_mean"), ("step", "mismatch_max"), ("eval", "success")):
        written = [(r["step"], pytest.approx(r[name])) for r in rows if r["kind"] == kind]
        assert [(e.step, e.value) for e in events.Scalars(f"{kind}/{name}")] == written


def test_reference_clipping_and_lag_are_measured_where_there_are_some(place: Path) -> None:
    far = ("learner.lr=0.02", "learner.warmup_steps=0", "learner.epochs=3", "rollout.max_lag=1")
    run = train(place, "far", "algorithm.kl_coef=0.1", "run.eval_every=0", *far)
    rows = read_metrics(run / "metrics.jsonl")
    store = ParquetStore(run / "trajectories")
    for row in rows:
        groups = store.read(version=row["step"])
        turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
        ages = [row["step"] - version for turn in turns for version in turn.action.versions]
        assert row["lag"] == pytest.approx(fmean(ages))
        assert row["kl_ref"] > 0 and 0 < row["clip_share"] <= 1
    assert rows[0]["lag"] == 0 and rows[-1]["lag"] > 0
    assert rows[-1]["mismatch_max"] > 0.01, "stale tokens differ from the policy that learns"


def test_the_page_on_runs_explains_every_field(trained: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    rows = read_metrics(trained / "metrics.jsonl")
    fields = {f"`{name}`" for row in rows for name in row}
    assert [name for name in sorted(fields) if name not in page] == []
