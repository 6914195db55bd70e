"""One episode as a conversation in texts."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import EnvironmentFault, SandboxLost, VerifierFault
from agentrl.grading import grade_group
from agentrl.guard import blaming
from agentrl.protocols import EnvironmentClass, Sandbox, SandboxProvider
from agentrl.types import (
    ActionTokens,
    Ending,
    Episode,
    Message,
    Messages,
    ObservationTokens,
    Problem,
    Step,
    Trajectory,
    Turn,
    Verdict,
)

GRADE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What an episode is made of."""

    environment: EnvironmentClass
    sandboxes: SandboxProvider | None
    problem: Problem
    seed: int
    max_turns: int
    parse: Callable[[str], Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the environment says, in Gymnasium's terms."""

    text: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def over(self) -> bool:
        """Whether this is the last reply."""
        return self.terminated or self.truncated


async def play(script: Script) -> AsyncGenerator[Reply, str]:
    """Yields replies and is sent actions; the last reply is graded, its sandbox closed before.

    Raises the Faults of environment, sandbox and verifier.
    """
    turns: list[Turn] = []
    task, step, ending = script.problem.task, Step(), None
    async with _sandbox(script) as sandbox:
        with blaming(EnvironmentFault, "reset"):
            environment = script.environment(sandbox=sandbox)
            messages, _ = await environment.reset(task, seed=script.seed)
        prompt, shown = tuple(messages), text_of(messages)
        while ending is None:
            text = yield Reply(text=shown, info=_info(step) if turns else {})
            message = script.parse(text)
            try:
                with blaming(EnvironmentFault, "step", but=(SandboxLost,)):
                    step = await environment.step(message)
            except SandboxLost:
                step, ending = Step(), Ending.SANDBOX_LOST
            turns.append(_turn(shown, text, message, step))
            ending = ending or _ending(step, len(turns) >= script.max_turns)
            shown = text_of(step.observation)
        with blaming(EnvironmentFault, "artifacts"):
            lost = ending is Ending.SANDBOX_LOST
            artifacts = {} if lost else dict(await environment.artifacts())
    trajectory = Trajectory(
        id=f"{task.id}/gym",
        task_id=task.id,
        member=0,
        seed=script.seed,
        prompt=prompt,
        turns=tuple(turns),
        ending=ending,
    )
    verdict = await _verdict(script, Episode(trajectory=trajectory, artifacts=artifacts))
    yield Reply(
        text=shown,
        reward=verdict.reward or 0.0,
        terminated=ending is Ending.ANSWERED,
        truncated=ending is not Ending.ANSWERED,
        info={
            **_info(step),
            "ending": ending.value,
            "passed": verdict.passed,
            "components": dict(verdict.components),
            "note": verdict.note,
        },
    )


def text_of(messages: Sequence[Message]) -> str:
    """The contents, one below the other."""
    return "\n".join(message.content for message in messages)


def _sandbox(script: Script) -> AbstractAsyncContextManager[Sandbox | None]:
    spec = script.problem.task.sandbox
    if spec is None or script.sandboxes is None:
        return nullcontext()
    return script.sandboxes.session(spec)


def _ending(step: Step, last: bool) -> Ending | None:
    """Success on the last allowed turn is an answer, not a truncation."""
    if step.terminated:
        return Ending.ANSWERED
    if step.truncated:
        return Ending.TRUNCATED
    return Ending.OUT_OF_TURNS if last else None


def _info(step: Step) -> dict[str, Any]:
    return {"step_reward": step.reward, "calls": [event.status for event in step.events]}


def _turn(shown: str, text: str, message: Message, step: Step) -> Turn:
    """A turn without a tokenizer: its ids are the bytes of the texts."""
    written = _ids(text)
    return Turn(
        observation=ObservationTokens(token_ids=_ids(shown)),
        action=ActionTokens(
            token_ids=written, logprobs=None, versions=(0,) * len(written), finish="stop"
        ),
        message=message,
        reply=_as_tuple(step.observation),
        reward=step.reward,
    )


def _ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode(errors="replace")) or (0,)


def _as_tuple(messages: Sequence[Message]) -> Messages:
    return tuple(messages)


async def _verdict(script: Script, episode: Episode) -> Verdict:
    group = await grade_group(
        script.problem,
        [episode],
        script.environment.verifier,
        sandboxes=script.sandboxes,
        timeout_s=GRADE_TIMEOUT_S,
    )
    (verdict,) = group.verdicts
    if verdict.invalid is not None:
        raise VerifierFault(f"task {script.problem.task.id} has no verdict: {verdict.invalid}")
    return verdict
