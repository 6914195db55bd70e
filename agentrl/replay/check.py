"""First rung: is the record in order? Nothing is run.

What the types hold is held when a file is read: lengths, order, finite logprobs, every page's and
the footer's checksum. Here the parts are compared with each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.protocols import Renderer, Tool
from agentrl.rollout import CAPTURED
from agentrl.store.redaction import REDACTED, REDACTED_TOKENS
from agentrl.types import Ending, Group, Message, Trajectory, digest_of_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong with a trajectory, or worth knowing; `turn` is None for all of it."""

    trajectory_id: str
    turn: int | None
    what: str
    level: Literal["problem", "note"] = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How a policy's messages are written: what the ids are compared with."""

    renderer: Renderer
    tools: Sequence[Tool] = ()


def check_group(group: Group, language: Language | None = None) -> Iterator[Finding]:
    """Everything that is not in order in a group; with a language, its ids and words as well."""
    seeds = {trajectory.seed for trajectory in group.trajectories}
    for trajectory, verdict in zip(group.trajectories, group.verdicts, strict=True):
        yield from check_trajectory(trajectory, language)
        steps = len(verdict.step_rewards)
        if steps not in (0, len(trajectory.turns)):
            yield _of(trajectory, None, f"{steps} step rewards for {len(trajectory.turns)} turns")
        if len(seeds) > 1:
            yield _of(trajectory, None, "the members of its group started from different seeds")


def check_trajectory(trajectory: Trajectory, language: Language | None = None) -> Iterator[Finding]:
    """Everything that is not in order in a trajectory."""
    redacted = trajectory.metrics.get(REDACTED_TOKENS)
    if redacted:
        what = f"{redacted:g} ids spelled a secret and were replaced: what they said is lost"
        yield _of(trajectory, None, what, level="note")
    else:
        yield from _what_the_engine_saw(trajectory)
    yield from _endings(trajectory)
    yield from _events(trajectory)
    if CAPTURED in trajectory.metrics:
        return  # its program chose the tools, and its forks begin with another's ids
    if language is not None and not redacted and not _says(trajectory, REDACTED):
        yield from _words(trajectory, language)
        yield from _masks(trajectory, language)


def mask_by_rendering(trajectory: Trajectory, language: Language) -> tuple[bool, ...]:
    """Who wrote each id, told without the record's spans: from its words and stop tokens alone.

    An observation is as long as its rendering; what follows is an action up to its stop token (or
    to the end, for the last). Raises ValueError where the ids run out before the words do.
    """
    ids, renderer = trajectory.token_ids, language.renderer
    mask: list[bool] = []
    observation = renderer.open(trajectory.prompt, language.tools)
    for number, turn in enumerate(trajectory.turns):
        mask += [False] * len(observation)
        end = len(mask)
        while end < len(ids) and ids[end] not in renderer.stop_ids:
            end += 1
        if end >= len(ids) and number + 1 < len(trajectory.turns):
            raise ValueError(f"turn {number}: no stop token ends the action")
        mask += [True] * (min(end + 1, len(ids)) - len(mask))
        observation = renderer.extend(turn.reply, ids[len(mask) - 1])
    return tuple(mask)


def _what_the_engine_saw(trajectory: Trajectory) -> Iterator[Finding]:
    """The digest was taken from the ids that went to the engine, before there was a record."""
    before: list[int] = []
    for number, turn in enumerate(trajectory.turns):
        before += turn.observation.token_ids
        if turn.seen and digest_of_ids(before) != turn.seen:
            yield _of(trajectory, number, "the ids before its action are not what the engine saw")
        before += turn.action.token_ids


def _endings(trajectory: Trajectory) -> Iterator[Finding]:
    if not trajectory.turns:
        yield _of(trajectory, None, "there is no action")
        return
    last = len(trajectory.turns) - 1
    for number, turn in enumerate(trajectory.turns):
        if turn.action.finish == "length" and number < last and CAPTURED not in trajectory.metrics:
            yield _of(trajectory, number, "it was cut off, but another turn follows")
        if turn.action.logprobs is None:
            yield _of(trajectory, number, "it has no logprobs", level="note")
    if trajectory.ending is Ending.CUT_OFF and trajectory.turns[-1].action.finish == "stop":
        yield _of(
            trajectory, last, "the episode was cut off here, but the action stopped by itself"
        )


def _events(trajectory: Trajectory) -> Iterator[Finding]:
    for event in trajectory.events:
        if event.turn >= len(trajectory.turns):
            yield _of(trajectory, event.turn, f"an event of {event.name} for no turn")
        elif event.call_id not in {c.id for c in trajectory.turns[event.turn].message.tool_calls}:
            yield _of(trajectory, event.turn, f"an event of {event.name} without its call")


def _words(trajectory: Trajectory, language: Language) -> Iterator[Finding]:
    """Whether ids and messages say the same."""
    renderer = language.renderer
    expected = renderer.open(trajectory.prompt, language.tools)
    for number, turn in enumerate(trajectory.turns):
        if turn.observation.token_ids != expected:
            what = "the observation's ids are not its messages as the template writes them"
            yield _of(trajectory, number, what)
        if _plain(renderer.parse(turn.action.token_ids)) != _plain(turn.message):
            yield _of(trajectory, number, "the action's ids don't parse to its message")
        expected = renderer.extend(turn.reply, turn.action.token_ids[-1])


def _masks(trajectory: Trajectory, language: Language) -> Iterator[Finding]:
    try:
        rendered = mask_by_rendering(trajectory, language)
    except ValueError as error:
        yield _of(trajectory, None, f"the mask can't be found again: {error}")
        return
    if rendered != trajectory.action_mask:
        pairs = zip(rendered, trajectory.action_mask, strict=False)
        first = next((n for n, (a, b) in enumerate(pairs) if a != b), len(rendered))
        what = f"mask by author and mask by rendering differ from token {first} on"
        yield _of(trajectory, None, what)


def _plain(message: Message) -> Message:
    """As the store can hold it: half a surrogate pair became U+FFFD."""

    def storable(text: str) -> str:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    return Message(
        role=message.role,
        content=storable(message.content),
        reasoning=storable(message.reasoning),
        tool_calls=tuple(
            type(call)(
                id=call.id, name=storable(call.name), arguments=storable(call.arguments), error=None
            )
            for call in message.tool_calls
        ),
    )


def _says(trajectory: Trajectory, text: str) -> bool:
    return any(text in message.content for message in trajectory.messages)


def _of(
    trajectory: Trajectory,
    turn: int | None,
    what: str,
    *,
    level: Literal["problem", "note"] = "problem",
) -> Finding:
    return Finding(trajectory_id=trajectory.id, turn=turn, what=what, level=level)
