"""Where two trajectories of one task part: members of a group, or one task under two policies."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from agentrl.types import Message, Messages, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDiff:
    """One turn of both, side by side; "" where one has ended.

    `token` is the first id of the action that differs (None: the actions are the same),
    `same_observation` whether both were shown the same ids before it, `logprobs` what each
    sampler gave to that first different token.
    """

    turn: int
    same_observation: bool
    token: int | None
    left: str
    right: str
    left_reply: str
    right_reply: str
    logprobs: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Two trajectories, aligned by turn; `parts_at` is the first turn that differs, if one does."""

    left_id: str
    right_id: str
    endings: tuple[str, str]
    turns: Sequence[TurnDiff]

    @property
    def parts_at(self) -> int | None:
        """The first turn whose observation or action differs."""
        for turn in self.turns:
            if turn.token is not None or not turn.same_observation:
                return turn.turn
        return None


def diff(left: Trajectory, right: Trajectory) -> Diff:
    """Compare by turn: what was shown, what was written, what came back."""
    pairs = zip_longest(left.turns, right.turns)
    return Diff(
        left_id=left.id,
        right_id=right.id,
        endings=(left.ending.value, right.ending.value),
        turns=[_turn(number, a, b) for number, (a, b) in enumerate(pairs)],
    )


def _turn(number: int, a: Turn | None, b: Turn | None) -> TurnDiff:
    token = _first(_ids(a), _ids(b))
    return TurnDiff(
        turn=number,
        same_observation=_observed(a) == _observed(b),
        token=token,
        left="" if a is None else _said(a.message),
        right="" if b is None else _said(b.message),
        left_reply=_text(() if a is None else a.reply),
        right_reply=_text(() if b is None else b.reply),
        logprobs=(_logprob(a, token), _logprob(b, token)),
    )


def _first(a: Sequence[int], b: Sequence[int]) -> int | None:
    for place, (x, y) in enumerate(zip_longest(a, b)):
        if x != y:
            return place
    return None


def _ids(turn: Turn | None) -> Sequence[int]:
    return () if turn is None else turn.action.token_ids


def _observed(turn: Turn | None) -> Sequence[int] | None:
    return None if turn is None else turn.observation.token_ids


def _logprob(turn: Turn | None, token: int | None) -> float | None:
    scores = None if turn is None else turn.action.logprobs
    return scores[token] if scores and token is not None and token < len(scores) else None


def _said(message: Message) -> str:
    calls = [f"{call.name or '?'}({call.arguments})" for call in message.tool_calls]
    return "\n".join(part for part in (message.reasoning, message.content, *calls) if part)


def _text(reply: Messages) -> str:
    return "\n".join(message.content for message in reply)
