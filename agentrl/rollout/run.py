"""From a task to an episode, from a problem to a graded group.

One wall-clock limit covers all phases of an episode: sandbox, reset, turns and artifacts. What the
agent can cause ends the episode and is graded; what infrastructure causes is a Fault.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from agentrl.errors import (
    ConfigError,
    EngineFault,
    EnvironmentFault,
    Fault,
    SandboxFault,
    SandboxLost,
)
from agentrl.grading import Outcome, grade_group
from agentrl.guard import blaming, until
from agentrl.protocols import Environment, Harness, Script, Writer
from agentrl.rollout.actor import Actor, PolicyActor, ScriptActor
from agentrl.rollout.capture import CapturedEpisode
from agentrl.rollout.episode import LiveEpisode
from agentrl.rollout.frame import PLAY_SHARE, Frame, episode_id
from agentrl.rollout.stage import Stage
from agentrl.types import Ending, Episode, Group, Messages, Problem, Task, Trajectory


async def run_group(stage: Stage, problem: Problem, *, size: int, seed: int) -> Group:
    """Run `size` episodes of one problem side by side, then grade them together.

    All members start from the same reset (`seed`); their sampling seeds differ. Members lost to
    faults are named in the group. Raises ConfigError if the problem needs sandboxes and there are
    none.
    """
    _check_sandboxes(stage, problem.task, needed=problem.needs_sandboxes)

    async def outcome(member: int) -> Outcome:
        try:
            return await run_episode(stage, problem.task, member=member, seed=seed)
        except Fault as fault:
            return fault

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(outcome(member)) for member in range(size)]
    return await grade_group(
        problem,
        [task.result() for task in running],
        stage.environment.verifier,
        sandboxes=stage.sandboxes,
        timeout_s=stage.limits.grade_timeout_s,
    )


async def run_episode(stage: Stage, task: Task, *, member: int, seed: int) -> Episode:
    """Run one episode with the stage's engine; its sandbox is closed when this returns.

    Raises a Fault when infrastructure failed (or was too slow for a first action), ConfigError if
    the task needs a sandbox and there is none.
    """
    policy = PolicyActor(stage.engine, session=episode_id(task, seed, member))
    return await run_actor(stage, task, policy, member=member, seed=seed)


async def run_actor(stage: Stage, task: Task, actor: Actor, *, member: int, seed: int) -> Episode:
    """Run one episode whose actions `actor` writes. Raises what `run_episode` does."""
    return await _live(Frame(stage, task, actor, member=member, seed=seed))


async def run_script(
    stage: Stage, problem: Problem, script: Script, *, member: int = 0, seed: int = 0
) -> Episode:
    """Run one episode whose actions a script writes: same path, same limits, no logprobs.

    A script that ends before its episode has no more turns. Raises a Fault as `run_episode` does,
    ConfigError if the renderer can't write messages.
    """
    if not isinstance(stage.renderer, Writer):
        kind = type(stage.renderer).__name__
        raise ConfigError(f"renderer {kind} has no write(message), which scripted policies need")
    lines = script(problem)
    try:
        reader = ScriptActor(lines, stage.renderer)
        return await _live(Frame(stage, problem.task, reader, member=member, seed=seed))
    finally:
        lines.close()


class Playing(Protocol):
    """An episode while it runs, whoever leads it."""

    frame: Frame
    prompt: Messages

    @property
    def begun(self) -> bool:
        """Whether there is a first action."""
        ...

    async def play(self) -> Ending:
        """Run until the end. Raises a Fault, or SandboxLost."""
        ...

    def trajectories(self, ending: Ending) -> tuple[Trajectory, ...]:
        """What has happened so far, as records: the graded one first, then its segments."""
        ...


async def _live(frame: Frame) -> Episode:
    """Play, take the artifacts, close the sandbox: in this order, whatever happens."""
    _check_sandboxes(frame.stage, frame.task, needed=frame.task.sandbox is not None)
    try:
        with blaming(EnvironmentFault, "making the environment"):
            environment = frame.stage.environment(sandbox=frame.sandbox)
        episode: Playing
        if isinstance(environment, Harness):
            episode = CapturedEpisode(frame, environment)
        else:
            episode = LiveEpisode(frame, environment)
        ending = await _ending(episode)
        return await _with_artifacts(frame, environment, episode.trajectories(ending))
    finally:
        if frame.sandbox is not None:
            await frame.sandbox.close()


async def _ending(episode: Playing) -> Ending:
    """Play until the end or the deadline. Without a first action there is nothing to grade."""
    frame = episode.frame
    try:
        return await until(frame.deadline(PLAY_SHARE), episode.play())
    except SandboxLost as lost:
        if not episode.begun:
            raise SandboxFault(f"the sandbox was lost before the first action: {lost}") from lost
        return Ending.SANDBOX_LOST
    except TimeoutError:
        _blame_an_unopened_sandbox(frame)
        if episode.begun:
            return Ending.TIMED_OUT
        fault, phase = (EngineFault, "sampling") if episode.prompt else (EnvironmentFault, "reset")
        raise fault(
            f"{phase} took too long: no action within {frame.stage.limits.timeout_s:g} s"
        ) from None


async def _with_artifacts(
    frame: Frame, environment: Environment, played: tuple[Trajectory, ...]
) -> Episode:
    """What the verifier may see. An agent that makes it unreadable or slow gets none of it."""

    async def take() -> Mapping[str, bytes]:
        with blaming(EnvironmentFault, "artifacts", but=(SandboxLost,)):
            return await environment.artifacts()

    first, *segments = played
    ending, artifacts = first.ending, dict[str, bytes]()
    if ending is not Ending.SANDBOX_LOST:
        try:
            artifacts = dict(await until(frame.deadline(), take()))
        except SandboxLost:
            ending = Ending.SANDBOX_LOST
        except TimeoutError:
            _blame_an_unopened_sandbox(frame)
            ending = Ending.TIMED_OUT
    metrics = {**first.metrics, "total_s": time.monotonic() - frame.started}
    return Episode(
        trajectory=replace(first, ending=ending, metrics=metrics),
        segments=tuple(
            segment if ending is first.ending else replace(segment, ending=ending)
            for segment in segments
        ),
        artifacts=artifacts,
    )


def _blame_an_unopened_sandbox(frame: Frame) -> None:
    if frame.sandbox is not None and frame.sandbox.opening:
        limit_s = frame.stage.limits.timeout_s
        raise SandboxFault(f"the sandbox did not open within {limit_s:g} s") from None


def _check_sandboxes(stage: Stage, task: Task, *, needed: bool) -> None:
    if needed and stage.sandboxes is None:
        raise ConfigError(f"task {task.id} needs a sandbox: set sandbox.name to a backend")
