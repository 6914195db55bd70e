"""A run that is killed again and again ends where the unbroken one does, bit for bit.

AGENTRL_KILLS sets how often (8; 50 take some minutes).
"""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from small_run import COIN
from transformers import AutoModelForCausalLM

from agentrl import build
from agentrl.cli.display import QuietReporter
from agentrl.config import load_config
from agentrl.learning.checkpoint import latest_checkpoint
from agentrl.metrics import read_metrics
from agentrl.store import ParquetStore

# Forks of a process that has imported everything and started no thread.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["agentrl.build", "agentrl_environments.calculator", "torch.utils.tensorboard"]
)
KILLS = int(os.environ.get("AGENTRL_KILLS", "8"))
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
CLOCKS = ("sample_s", "update_s", "publish_s", "tools_s", "tokens_per_s")


def run(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    given = (
        "model.tiny_layers=1", "model.tiny_hidden=32", "warm_start.steps=0", "rollout.groups=2",
        "rollout.group_size=3", "sampling.max_action_tokens=6", "rollout.max_turns=2",
        "run.eval_every=0", "run.checkpoint_every=1", "engine.max_concurrent=1",
        "learner.schedule=constant",
        "environment.options={digits: 1, count: 50}", f"run.steps={steps}", f"run.dir={folder}",
        f"environment.name={folder.parent}/killed_coin.py",
    )  # fmt: skip
    build.train(load_config(QUICKSTART, given), reporter=QuietReporter())


def in_a_process(folder: Path, steps: int) -> multiprocessing.process.BaseProcess:
    child = PROCESSES.Process(target=run, args=(folder, steps))
    child.start()
    return child


def finished(folder: Path, steps: int) -> None:
    child = in_a_process(folder, steps)
    child.join(60)
    assert child.exitcode == 0


def weights_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(latest_checkpoint(folder / "checkpoints"))
    return torch.cat([p.flatten() for p in model.parameters()])


def version_of(folder: Path) -> int:
    found = latest_checkpoint(folder / "checkpoints", note=lambda _: None)
    return int(found.name.removeprefix("step-")) if found else 0


@pytest.mark.timeout(120 + 5 * KILLS)
def test_a_run_killed_at_random_moments_equals_the_unbroken_one(tmp_path: Path) -> None:
    (tmp_path / "killed_coin.py").write_text(COIN)
    broken, whole, draw = tmp_path / "broken", tmp_path / "whole", random.Random(KILLS)
    for name in ("first", "pace"):
        began = time.monotonic()
        finished(tmp_path / name, 1)
        start_s = time.monotonic() - began  # so that kills fall before and after the first step
    before = 0
    for _ in range(KILLS):
        child = in_a_process(broken, 10_000)
        time.sleep(draw.uniform(0.2, 1.2) * start_s)
        assert child.is_alive(), "a killed run goes on without an error"
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert version_of(broken) >= before, "what was whole stays whole"
        before = version_of(broken)
    steps = before + 1
    assert steps > 2, "some kills fell after a step"
    finished(broken, steps)
    finished(whole, steps)
    assert torch.equal(weights_of(broken), weights_of(whole))
    rows = [
        [{k: v for k, v in row.items() if k not in CLOCKS} for row in read_metrics(path)]
        for path in (broken / "metrics.jsonl", whole / "metrics.jsonl")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == steps
    assert any(row["grad_norm"] > 0 for row in rows[0])
    tokens = [
        [t.token_ids for g in ParquetStore(f / "trajectories").read() for t in g.trajectories]
        for f in (broken, whole)
    ]
    assert tokens[0] == tokens[1]
