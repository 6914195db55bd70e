"""Fourth rung: what if turn k had been different? Recorded up to there, live from there.

The environment and its sandbox are brought to turn k by the recorded actions; then one thing is
changed (or nothing), and the stage's engine goes on. An unchanged fork with the same weights and
temperature samples the recorded tokens again: the seeds are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import ConfigError, Fault, RecordError
from agentrl.grading import Outcome, grade_group
from agentrl.protocols import Environment, EnvironmentClass, Sandbox, Writer
from agentrl.replay.records import Recorded
from agentrl.replay.tape import Tape
from agentrl.rollout import SCRIPT_VERSION, PolicyActor, Stage, episode_id, run_actor
from agentrl.types import (
    ActionTokens,
    Group,
    Message,
    Messages,
    Problem,
    Sampling,
    Step,
    Task,
    Trajectory,
    assistant,
)

_FIRST_EXTRA_MEMBER = 1000
"""Further samples of a fork draw from seeds that no member of the group has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Where a fork leaves the record, and how.

    `action` takes the place of turn `turn`'s action, `observation` that of the last message shown
    before it (at 0: of the prompt). Another policy or temperature is the stage's.
    """

    turn: int
    action: str | None = None
    observation: str | None = None


async def fork(
    stage: Stage, recorded: Recorded, problem: Problem, edit: Edit, *, samples: int = 1
) -> Group:
    """`samples` episodes that leave the record at the edit, graded together.

    Raises RecordError when the record has no such turn or no longer leads there, ConfigError when
    the renderer can't write an action; faults are named in the group.
    """
    turns = len(recorded.trajectory.turns)
    if not 0 <= edit.turn < turns:
        raise RecordError(
            f"episode {recorded.trajectory.id} has turns 0 to {turns - 1}, no turn {edit.turn}"
        )
    first = _FIRST_EXTRA_MEMBER
    members = [recorded.trajectory.member, *range(first, first + samples - 1)]
    outcomes: list[Outcome] = []
    for member in members:
        try:
            outcomes.append(await _one(stage, recorded, problem.task, edit, member))
        except Fault as fault:
            outcomes.append(fault)
    return await grade_group(
        problem,
        outcomes,
        stage.environment.verifier,
        sandboxes=stage.sandboxes,
        timeout_s=stage.limits.grade_timeout_s,
    )


async def _one(stage: Stage, recorded: Recorded, task: Task, edit: Edit, member: int) -> Outcome:
    seed = recorded.trajectory.seed
    environment: EnvironmentClass = stage.environment
    if edit.observation is not None:
        environment = EditedEnvironment(environment, edit.turn, edit.observation)
    actor = ForkActor(
        tape=Tape(_until(recorded, edit)),
        policy=PolicyActor(stage.engine, session=episode_id(task, seed, member)),
        forced=_forced(stage, edit),
        edited=edit.observation is not None,
    )
    there = replace(stage, environment=environment)
    episode = await run_actor(there, task, actor, member=member, seed=seed)
    if actor.tape.difference is not None:
        raise RecordError(
            f"episode {recorded.trajectory.id}: turn {edit.turn} is not reached any more, since "
            f"the environment departs from the record before turn {actor.tape.turn}: see "
            "--depth reexecute"
        )
    return episode


class ForkActor:
    """Reads the tape to its end, then writes the forced action if there is one, then samples."""

    def __init__(
        self, *, tape: Tape, policy: PolicyActor, forced: Sequence[int], edited: bool
    ) -> None:
        self.tape = tape
        self._policy, self._forced, self._edited = policy, forced, edited
        self._live = False

    async def act(
        self, prompt_ids: Sequence[int], sampling: Sampling, reply: Messages
    ) -> ActionTokens | None:
        """The next action. Raises EngineFault."""
        if not self._live:
            at_the_edit = self.tape.turn == len(self.tape.trajectory.turns)
            if at_the_edit and self._edited:
                self._live = True
            else:
                action = await self.tape.act(prompt_ids, sampling, reply)
                if action is not None or self.tape.difference is not None:
                    return action
                self._live = True
            if self._forced:
                return _written(self._forced, sampling.max_tokens)
        return await self._policy.act(prompt_ids, sampling, reply)


class EditedEnvironment:
    """An EnvironmentClass whose episodes show another text before turn `turn`."""

    def __init__(self, inner: EnvironmentClass, turn: int, text: str) -> None:
        self._inner, self._turn, self._text = inner, turn, text
        self.verifier, self.scripts = inner.verifier, inner.scripts
        self.problems = inner.problems

    def __call__(self, *, sandbox: Sandbox | None) -> "EditedEpisode":
        """One episode."""
        return EditedEpisode(self._inner(sandbox=sandbox), self._turn, self._text)


class EditedEpisode:
    """An Environment around another: the same, but for one message."""

    def __init__(self, inner: Environment, turn: int, text: str) -> None:
        self._inner, self._left, self._text = inner, turn, text
        self.tools = inner.tools

    async def reset(self, task: Task, *, seed: int) -> tuple[Messages, Mapping[str, Any]]:
        """As the inner one; edited for turn 0."""
        messages, info = await self._inner.reset(task, seed=seed)
        return (self._edited(messages) if self._left == 0 else messages), info

    async def step(self, action: Message) -> Step:
        """As the inner one; edited where the text belongs."""
        step = await self._inner.step(action)
        self._left -= 1
        if self._left:
            return step
        return replace(step, observation=self._edited(step.observation))

    async def artifacts(self) -> Mapping[str, bytes]:
        """As the inner one."""
        return await self._inner.artifacts()

    def _edited(self, messages: Messages) -> Messages:
        return (*messages[:-1], replace(messages[-1], content=self._text)) if messages else messages


def _until(recorded: Recorded, edit: Edit) -> Trajectory:
    """The recorded turns before the edit."""
    return replace(recorded.trajectory, turns=recorded.trajectory.turns[: edit.turn])


def _forced(stage: Stage, edit: Edit) -> Sequence[int]:
    """The ids of the edited action, if there is one."""
    if edit.action is None:
        return ()
    if not isinstance(stage.renderer, Writer):
        raise ConfigError(f"renderer {type(stage.renderer).__name__} can't write an edited action")
    return stage.renderer.write(assistant(edit.action))


def _written(ids: Sequence[int], max_tokens: int) -> ActionTokens:
    """An action that no policy sampled, cut as a sampled one would be."""
    kept = tuple(ids[:max_tokens])
    return ActionTokens(
        token_ids=kept,
        logprobs=None,
        versions=(SCRIPT_VERSION,) * len(kept),
        finish="stop" if len(kept) == len(ids) else "length",
    )
