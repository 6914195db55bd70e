"""`kill -9` of a training run: its sandboxes end with it, at once."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agentrl_sandboxes.docker import RUN

from agentrl.errors import ConfigError
from agentrl.plugins import open_sandboxes

LIVE, WITHIN_S = 32, 2.0
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
NAP = f"98{os.getpid()}"
"""How long each sandbox sleeps: told apart from all other sleepers by it."""
ENVIRONMENT = f"""
from agentrl_environments.calculator import Calculator


class Naps(Calculator):
    async def reset(self, task, *, seed):
        await self.sandbox.exec(["sleep", "{NAP}"], timeout_s=9999)
        return await super().reset(task, seed=seed)
"""


def sleepers() -> int:
    seen = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return seen.split("\n").count(f"sleep {NAP}")


def children_of(process: int) -> set[int]:
    seen = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    rows = [(int(pid), int(parent)) for pid, parent in map(str.split, seen.splitlines())]
    found = {process}
    while more := {pid for pid, parent in rows if parent in found} - found:
        found |= more
    return found - {process}


def containers(run: Path) -> int:
    made = ["docker", "ps", "-aq", "--filter", f"label={RUN}={run}"]
    return len(subprocess.run(made, capture_output=True, text=True, check=True).stdout.split())


def seconds_until(there: Callable[[], bool], limit_s: float) -> float:
    began = time.monotonic()
    while not there() and time.monotonic() < began + limit_s:
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.parametrize("backend", ["bwrap", "docker", "landlock"])
def test_a_killed_training_run_leaves_no_sandbox(backend: str, tmp_path: Path) -> None:
    """On a machine that does more than it has processors for, the engine takes its share longer."""
    try:
        provider = open_sandboxes(backend)
    except ConfigError as error:
        pytest.skip(str(error))
    (tmp_path / "naps.py").write_text(ENVIRONMENT)
    run = tmp_path / "run"
    given = (
        "model.tiny_layers=1", "model.tiny_hidden=32", "warm_start.steps=0", "rollout.groups=4",
        "rollout.group_size=8", f"rollout.concurrency={LIVE}", "run.eval_every=0",
        f"run.dir={run}", f"environment.name={tmp_path}/naps.py", f"sandbox.name={backend}",
        "environment.options={digits: 1, count: 50}", "rollout.timeout_s=600",
    )  # fmt: skip
    trainer = subprocess.Popen(
        [sys.executable, "-m", "agentrl", "train", str(QUICKSTART)]
        + [word for option in given for word in ("--set", option)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    seconds_until(lambda: sleepers() == LIVE or trainer.poll() is not None, 120)
    assert trainer.poll() is None and sleepers() == LIVE
    assert backend != "docker" or containers(run) == LIVE
    family = children_of(trainer.pid)
    trainer.kill()
    began = time.monotonic()
    trainer.wait()
    assert seconds_until(lambda: not sleepers(), WITHIN_S) < WITHIN_S
    if backend == "docker":
        seconds_until(lambda: not containers(run), 30)
    took, load = time.monotonic() - began, os.getloadavg()[0] / (os.cpu_count() or 1)
    print(f"{backend}: {took:.2f} s, load {load:.1f}")
    assert took < WITHIN_S * max(1, load)
    assert not [pid for pid in family if Path(f"/proc/{pid}/exe").exists()]
    if backend == "landlock":  # whose folders wait for the next run
        assert asyncio.run(provider.prune(str(run))) == LIVE
