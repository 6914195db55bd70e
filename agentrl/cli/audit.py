"""Reads everything that a run left and says what can't be right."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config import RunConfig, load_config
from agentrl.errors import ConfigError, RecordError
from agentrl.metrics import read_lines
from agentrl.store import ParquetStore
from agentrl.types import Ending, Group, Trajectory


@dataclass(slots=True)
class Audit:
    """What was read, what is wrong (`problems`), and what is only unusual (`notes`)."""

    steps: int = 0
    groups: int = 0
    trajectories: int = 0
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


def audit_run(run: Path) -> Audit:
    """Read the configuration, metrics, checkpoints and every trajectory of a run."""
    audit = Audit()
    config = _config(run / "config.yaml", audit)
    _provenance(run / "provenance.json", audit)
    measured = _metrics(run / "metrics.jsonl", audit)
    stored = _trajectories(run / "trajectories", config, audit)
    if stored:
        for step in sorted(measured - stored):
            audit.problems.append(f"step {step} has metrics but no readable trajectories")
    _checkpoints(run / "checkpoints", audit)
    return audit


def _config(path: Path, audit: Audit) -> RunConfig | None:
    try:
        return load_config(path)
    except ConfigError as error:
        audit.problems.append(str(error))
        return None


def _provenance(path: Path, audit: Audit) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        audit.problems.append(f"{path}: {error}")


def _metrics(path: Path, audit: Audit) -> set[int]:
    """The steps that have a line of metrics. Only the last line may be cut."""
    try:
        rows = read_lines(path)
    except OSError as error:
        audit.problems.append(f"{path}: {error.strerror}")
        return set()
    for number, row in enumerate(rows, start=1):
        if row is None and number == len(rows):
            audit.notes.append(f"{path}: the last line is cut")
        elif row is None:
            audit.problems.append(f"{path}: line {number} is no line of metrics")
    steps = [row["step"] for row in rows if row is not None and row["kind"] == "step"]
    if steps != sorted(set(steps)):
        audit.problems.append(f"{path}: steps are repeated or out of order")
    return set(steps)


def _trajectories(folder: Path, config: RunConfig | None, audit: Audit) -> set[int]:
    """The steps whose groups could be read."""
    store, stored = ParquetStore(folder), set[int]()
    with warnings.catch_warnings(record=True) as skipped:
        warnings.simplefilter("always")
        versions = store.versions()
    audit.notes += [str(warning.message) for warning in skipped]
    tokenizers, seen = set[str](), set[str]()
    for step in versions:
        try:
            tokenizers.add(store.metadata(step).get("tokenizer_sha256", ""))
            for group in store.read(version=step):
                audit.groups += 1
                audit.trajectories += len(group.trajectories)
                audit.problems += [
                    f"step {step}, task {group.task_id}: {what}"
                    for what in _broken(group, step, config, seen)
                ]
            if store.lessons_path(step).exists():
                store.lessons(step)
        except RecordError as error:
            audit.problems.append(str(error))
        else:
            stored.add(step)
    audit.steps = len(stored)
    if len(tokenizers) > 1:
        audit.problems.append(f"{folder}: steps were recorded with different tokenizers")
    return stored


def _broken(group: Group, step: int, config: RunConfig | None, seen: set[str]) -> Iterator[str]:
    """What a group's members can't be like; `seen` gathers the ids of the run."""
    if len({t.seed for t in group.trajectories}) > 1:
        yield "members started from different seeds"
    if config and len(group.members) + len(group.faults) > config.rollout.group_size:
        yield f"more members than rollout.group_size {config.rollout.group_size}"
    for trajectory in group.trajectories:
        where = f"member {trajectory.member}"
        if f"{step}/{trajectory.id}" in seen:
            yield f"{where}: trajectory {trajectory.id} is there twice"
        seen.add(f"{step}/{trajectory.id}")
        for what in _broken_trajectory(trajectory, step, config):
            yield f"{where}: {what}"


def _broken_trajectory(
    trajectory: Trajectory, step: int, config: RunConfig | None
) -> Iterator[str]:
    """What the types can't rule out (they hold lengths, order and finiteness when read)."""
    actions = [turn.action for turn in trajectory.turns]
    if not actions:
        yield "there is no action"
        return
    versions = {version for action in actions for version in action.versions}
    lag = config.rollout.max_lag if config else step
    if max(versions) > step or min(versions) < max(0, step - lag):
        yield f"sampled by versions {min(versions)} to {max(versions)} for step {step}"
    for number, action in enumerate(actions):
        if action.logprobs is None:
            yield f"turn {number} has no logprobs"
    if trajectory.ending is Ending.CUT_OFF and actions[-1].finish == "stop":
        yield "it ended as cut_off, but its last action stopped by itself"
    if config and len(actions) > config.rollout.max_turns:
        yield f"{len(actions)} turns, more than rollout.max_turns {config.rollout.max_turns}"
    if config and len(trajectory.token_ids) > config.engine.context_tokens:
        yield f"{len(trajectory.token_ids)} tokens, more than engine.context_tokens"


def _checkpoints(root: Path, audit: Audit) -> None:
    from agentrl.learning.checkpoint import latest_checkpoint

    damaged: list[str] = []
    latest = latest_checkpoint(root, note=damaged.append)
    audit.notes += damaged
    if latest is None and any(root.glob("step-*")):
        audit.problems.append(f"{root} holds no whole checkpoint")
