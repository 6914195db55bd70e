"""The main job in small: real engine, real learner, real sandboxes, resumed and looked at."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from small_run import QUICKSTART, SMALL, masks_are_the_sampled_tokens

from agentrl import build
from agentrl.cli.display import QuietReporter
from agentrl.config import RunConfig, load_config
from agentrl.learning.checkpoint import latest_checkpoint
from agentrl.metrics import read_metrics
from agentrl.rebuild import Replay
from agentrl.replay.records import Records
from agentrl.store import ParquetStore


def config(folder: Path, *more: str) -> RunConfig:
    return load_config(QUICKSTART, [*SMALL, f"run.dir={folder}", *more])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_a_run_leaves_a_whole_record_and_goes_on(tmp_path: Path) -> None:
    build.train(config(tmp_path), reporter=QuietReporter())
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["kind"], r["step"]) for r in rows] == [
        ("eval", 0), ("step", 0), ("step", 1), ("eval", 2),
    ]  # fmt: skip
    for row in rows:
        if row["kind"] == "step":
            assert row["faults"] == 0
            assert row["ratio_mean"] == 1.0, "on policy, recomputed: the ratio is exactly 1"
            assert row["mismatch_max"] < 1e-3, "engine and learner agree in fp32"
            assert sum(row["endings"].values()) == 8
    groups = list(ParquetStore(tmp_path / "trajectories").read())
    assert len(groups) == 4
    masks_are_the_sampled_tokens(groups)
    assert (tmp_path / "config.yaml").exists()
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["sandbox"]["isolation"] == "process"

    build.train(config(tmp_path, "run.steps=3"), reporter=QuietReporter())
    steps = [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert steps == [0, 1, 2]
    found = build.evaluate(
        config(tmp_path), reporter=QuietReporter(), problems=3, samples=2, greedy=True
    )
    assert found.problems == 3 and set(found.pass_at_k) == {1, 2}


def test_learning_rate_zero_changes_nothing(tmp_path: Path) -> None:
    build.train(config(tmp_path, "learner.lr=0"), reporter=QuietReporter())
    last = latest_checkpoint(tmp_path / "checkpoints")
    assert last is not None
    before, after = weights(tmp_path / "warm_start"), weights(last)
    assert all(torch.equal(before[name], after[name]) for name in before)
    rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert all(r["clip_share"] == 0 and r["ratio_mean"] == 1 for r in rows)


def test_a_constant_verifier_teaches_nothing(tmp_path: Path) -> None:
    own = tmp_path / "constant_env.py"
    own.write_text(
        "from agentrl_environments.calculator import Calculator\n"
        "from agentrl.types import Verdict\n"
        "class Always:\n"
        "    async def grade(self, problem, episodes, sandboxes):\n"
        "        return [Verdict(reward=1.0, passed=True)] * len(episodes)\n"
        "class Constant(Calculator):\n"
        "    verifier = Always()\n"
    )
    build.train(config(tmp_path, f"environment.name={own}"), reporter=QuietReporter())
    last = latest_checkpoint(tmp_path / "checkpoints")
    assert last is not None
    before, after = weights(tmp_path / "warm_start"), weights(last)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_with_adapters_resumes_as_if_unbroken_and_is_learned_again(tmp_path: Path) -> None:
    own = tmp_path / "varied_env.py"
    own.write_text(
        "from agentrl_environments.calculator import Calculator\n"
        "from agentrl.types import Verdict\n"
        "class ByMember:\n"
        "    async def grade(self, problem, episodes, sandboxes):\n"
        "        members = [float(e.trajectory.member % 2) for e in episodes]\n"
        "        return [Verdict(reward=m, passed=m == 1) for m in members]\n"
        "class Varied(Calculator):\n"
        "    verifier = ByMember()\n"
    )
    # Without the engine's logprobs: their last bits depend on which episodes were sampled together.
    lora = (
        f"environment.name={own}", "learner.lora_rank=4", "learner.lr=1.0e-2",
        "algorithm.kl_coef=0.01", "learner.schedule=constant", "algorithm.mismatch=none",
    )  # fmt: skip
    build.train(config(tmp_path / "whole", *lora), reporter=QuietReporter())
    for steps in (1, 2):
        broken = config(tmp_path / "broken", *lora, f"run.steps={steps}")
        build.train(broken, reporter=QuietReporter())
    ends = [latest_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "broken")]
    assert None not in ends
    whole, resumed = (weights(end) for end in ends if end is not None)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    started = weights(tmp_path / "whole" / "warm_start")
    assert whole.keys() == started.keys(), "a plain model folder"
    assert any(not torch.equal(whole[name], started[name]) for name in whole)
    for again in Replay(Records(tmp_path / "whole")).relearn(1):
        assert again.differences() == {}


def test_help_loads_no_torch() -> None:
    code = "import sys, agentrl.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
