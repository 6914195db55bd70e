"""Third rung: does the environment still answer so? Recorded actions, everything else fresh.

The episode runs as in training: a fresh environment, reset with the recorded task and seed, and a
fresh sandbox with the recorded image, files and limits. Every reply is compared with the record.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.errors import Fault
from agentrl.protocols import EnvironmentClass, SandboxProvider
from agentrl.replay.difference import Difference, first_difference, likely_cause
from agentrl.replay.records import Recorded
from agentrl.replay.tape import NoEngine, Tape, TapeRenderer
from agentrl.rollout import Limits, Stage, run_actor
from agentrl.types import Ending, Episode, Task, ToolEvent, Trajectory

_CUT_SHORT = (Ending.TIMED_OUT, Ending.SANDBOX_LOST)
"""Endings that may come in the middle of a step: its reply was never recorded."""
_FOLLOW_FROM_LIMITS = (Ending.TIMED_OUT, Ending.OUT_OF_TOKENS, Ending.OUT_OF_TURNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a recorded episode is run in again. `ignore`: what replies may differ in."""

    environment: EnvironmentClass
    sandboxes: SandboxProvider | None = None
    limits: Limits = field(default_factory=Limits)
    ignore: Sequence[re.Pattern[str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first thing that came out differently, after the action of `turn` (None: at the reset).

    `what` is prompt, reply, reward, status, ending, artifact or fault; `tool` the call that it
    answers ("" if none does); `begin` and `end` are the bytes of the recorded text that differ.
    """

    turn: int | None
    what: str
    recorded: str
    seen: str
    tool: str = ""
    begin: int = 0
    end: int = 0
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reexecution:
    """What came of it: how many turns were played, and where it departed, if it did."""

    trajectory_id: str
    turns: int
    of: int
    divergence: Divergence | None


async def reexecute(recorded: Recorded, task: Task, world: World) -> Reexecution:
    """Run a recorded episode again, a second time where it departs, to tell chance from change."""
    first = await _once(recorded, task, world)
    if first.divergence is None or first.divergence.what == "fault":
        return first
    again = await _once(recorded, task, world)
    return replace(first, divergence=_explained(recorded.trajectory, first, again))


async def _once(recorded: Recorded, task: Task, world: World) -> Reexecution:
    trajectory = recorded.trajectory
    tape = Tape(trajectory, world.ignore)
    stage = Stage(
        engine=NoEngine(),
        renderer=TapeRenderer(tape),
        environment=world.environment,
        sandboxes=world.sandboxes,
        limits=world.limits,
    )
    try:
        seen = await run_actor(stage, task, tape, member=trajectory.member, seed=trajectory.seed)
    except Fault as fault:
        found = Divergence(
            turn=tape.turn - 1 if tape.turn else None,
            what="fault",
            recorded=f"ended as {trajectory.ending.value}",
            seen=f"{type(fault).__name__}: {fault}",
            cause="infrastructure: this run could not be finished",
        )
    else:
        found = _departure(recorded, seen, tape)
    return Reexecution(
        trajectory_id=trajectory.id, turns=tape.turn, of=len(trajectory.turns), divergence=found
    )


def _departure(recorded: Recorded, seen: Episode, tape: Tape) -> Divergence | None:
    trajectory, now = recorded.trajectory, seen.trajectory
    for number in range(min(tape.turn, len(now.turns))):
        found = _in_turn(trajectory, now, number, tape)
        if found is not None:
            return found
    if tape.difference is not None and tape.turn == 0:
        return _of_text(trajectory, None, tape.difference)
    if not _same_ending(trajectory.ending, now.ending):
        return Divergence(
            turn=len(now.turns) - 1,
            what="ending",
            recorded=trajectory.ending.value,
            seen=now.ending.value,
        )
    return _in_artifacts(recorded, seen.artifacts)


def _in_turn(trajectory: Trajectory, now: Trajectory, number: int, tape: Tape) -> Divergence | None:
    then, again = trajectory.turns[number], now.turns[number]
    if number == len(trajectory.turns) - 1 and trajectory.ending in _CUT_SHORT:
        return None
    difference = first_difference(then.reply, again.reply, tape.ignore)
    if difference is not None:
        return _of_text(trajectory, number, difference)
    if then.reward != again.reward:
        return Divergence(
            turn=number, what="reward", recorded=str(then.reward), seen=str(again.reward)
        )
    before, after = (_statuses(t.events, number) for t in (trajectory, now))
    if before != after:
        return Divergence(turn=number, what="status", recorded=before, seen=after)
    return None


def _of_text(trajectory: Trajectory, turn: int | None, difference: Difference) -> Divergence:
    return Divergence(
        turn=turn,
        what="prompt" if turn is None else "reply",
        tool="" if turn is None else _tool(trajectory, turn, difference.message),
        begin=difference.begin,
        end=difference.end,
        recorded=difference.recorded,
        seen=difference.seen,
    )


def _tool(trajectory: Trajectory, turn: int, message: int) -> str:
    """The name of the call that a reply's message answers."""
    said = trajectory.turns[turn]
    call_id = said.reply[message].tool_call_id if message < len(said.reply) else None
    names = [call.name for call in said.message.tool_calls if call.id == call_id]
    return names[0] if names else ""


def _statuses(events: Sequence[ToolEvent], turn: int) -> str:
    said = [e for e in events if e.turn == turn]
    return ", ".join(
        f"{e.name} {e.status}" + ("" if e.exit_code is None else f" (exit {e.exit_code})")
        for e in said
    )


def _same_ending(then: Ending, now: Ending) -> bool:
    """A tape that has run out ends as out of turns, where the recorded episode met a limit."""
    return then is now or (then in _FOLLOW_FROM_LIMITS and now is Ending.OUT_OF_TURNS)


def _in_artifacts(recorded: Recorded, seen: Mapping[str, bytes]) -> Divergence | None:
    then = recorded.artifacts
    if then is None or recorded.trajectory.ending in _CUT_SHORT:
        return None
    for name in sorted({*then, *seen}):
        if then.get(name) != seen.get(name):
            return Divergence(
                turn=len(recorded.trajectory.turns) - 1,
                what=f"artifact {name}",
                recorded=_size(then.get(name)),
                seen=_size(seen.get(name)),
            )
    return None


def _size(data: bytes | None) -> str:
    return "not there" if data is None else f"{len(data)} bytes: {data[:60]!r}"


def _explained(trajectory: Trajectory, first: Reexecution, again: Reexecution) -> Divergence:
    found = first.divergence
    assert found is not None, "only a departure is explained"
    calls = trajectory.turns[found.turn].message.tool_calls if found.turn is not None else ()
    difference = Difference(
        message=0, begin=found.begin, end=found.end, recorded=found.recorded, seen=found.seen
    )
    cause = likely_cause(
        difference,
        "\n".join(call.arguments for call in calls),
        repeats=again.divergence == found,
    )
    return replace(found, cause=cause)
