"""From a task to an episode, from a problem to a graded group.

One wall-clock limit covers all phases of an episode: sandbox, reset, turns and artifacts. What the
agent can cause ends the episode and is graded; what infrastructure causes is a Fault.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

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
from agentrl.protocols import Environment, Script, Writer
from agentrl.rollout.actor import Actor, PolicyActor, ScriptActor
from agentrl.rollout.episode import PLAY_SHARE, LiveEpisode, episode_id
from agentrl.rollout.stage import Stage
from agentrl.types import Ending, Episode, Group, Problem, Task, Trajectory


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
    return await _live(LiveEpisode(stage, task, actor, member=member, seed=seed))


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
        return await _live(LiveEpisode(stage, problem.task, reader, member=member, seed=seed))
    finally:
        lines.close()


async def _live(episode: LiveEpisode) -> Episode:
    """Play, take the artifacts, close the sandbox: in this order, whatever happens."""
    _check_sandboxes(episode.stage, episode.task, needed=episode.task.sandbox is not None)
    try:
        with blaming(EnvironmentFault, "making the environment"):
            environment = episode.stage.environment(sandbox=episode.sandbox)
        trajectory = episode.trajectory(await _ending(episode, environment))
        return await _with_artifacts(episode, environment, trajectory)
    finally:
        if episode.sandbox is not None:
            await episode.sandbox.close()


async def _ending(episode: LiveEpisode, environment: Environment) -> Ending:
    """Play until the end or the deadline. Without a first action there is nothing to grade."""
    try:
        return await until(episode.deadline(PLAY_SHARE), episode.play(environment))
    except SandboxLost as lost:
        if not episode.turns:
            raise SandboxFault(f"the sandbox was lost before the first action: {lost}") from lost
        return Ending.SANDBOX_LOST
    except TimeoutError:
        _blame_an_unopened_sandbox(episode)
        if episode.turns:
            return Ending.TIMED_OUT
        fault, phase = (EngineFault, "sampling") if episode.prompt else (EnvironmentFault, "reset")
        raise fault(
            f"{phase} took too long: no action within {episode.stage.limits.timeout_s:g} s"
        ) from None


async def _with_artifacts(
    episode: LiveEpisode, environment: Environment, trajectory: Trajectory
) -> Episode:
    """What the verifier may see. An agent that makes it unreadable or slow gets none of it."""

    async def take() -> Mapping[str, bytes]:
        with blaming(EnvironmentFault, "artifacts", but=(SandboxLost,)):
            return await environment.artifacts()

    ending, artifacts = trajectory.ending, dict[str, bytes]()
    if ending is not Ending.SANDBOX_LOST:
        try:
            artifacts = dict(await until(episode.deadline(), take()))
        except SandboxLost:
            ending = Ending.SANDBOX_LOST
        except TimeoutError:
            _blame_an_unopened_sandbox(episode)
            ending = Ending.TIMED_OUT
    metrics = {**trajectory.metrics, "total_s": time.monotonic() - episode.started}
    return Episode(
        trajectory=replace(trajectory, ending=ending, metrics=metrics), artifacts=artifacts
    )


def _blame_an_unopened_sandbox(episode: LiveEpisode) -> None:
    if episode.sandbox is not None and episode.sandbox.opening:
        limit_s = episode.stage.limits.timeout_s
        raise SandboxFault(f"the sandbox did not open within {limit_s:g} s") from None


def _check_sandboxes(stage: Stage, task: Task, *, needed: bool) -> None:
    if needed and stage.sandboxes is None:
        raise ConfigError(f"task {task.id} needs a sandbox: set sandbox.name to a backend")
