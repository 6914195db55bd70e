"""A record that plays itself: an actor and a renderer that say again what was said."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.errors import EngineFault
from agentrl.protocols import Tool
from agentrl.replay.difference import Difference, first_difference
from agentrl.types import ActionTokens, Message, Messages, Sampling, Trajectory

_NOTHING = (0,)
"""Ids for what the record does not go on to: nobody reads them."""


@dataclass(slots=True)
class Tape:
    """Plays the actions of `trajectory` while the environment answers as it did.

    It is an Actor. `turn` counts the actions played; `difference` is where a reply (to the action
    before `turn`; the prompt at 0) departed from the record, if one did: it stops there.
    """

    trajectory: Trajectory
    ignore: Sequence[re.Pattern[str]] = ()
    turn: int = 0
    difference: Difference | None = field(default=None, init=False)

    async def act(
        self, prompt_ids: Sequence[int], sampling: Sampling, reply: Messages
    ) -> ActionTokens | None:
        """The recorded action, if `reply` is the recorded one."""
        self.difference = first_difference(self.expected, reply, self.ignore)
        if self.difference is not None or self.turn == len(self.trajectory.turns):
            return None
        self.turn += 1
        return self.trajectory.turns[self.turn - 1].action

    @property
    def expected(self) -> Messages:
        """What the record says that the environment says next."""
        turns = self.trajectory.turns
        return turns[self.turn - 1].reply if self.turn else self.trajectory.prompt


class TapeRenderer:
    """A Renderer that knows one trajectory's ids and words by heart: no tokenizer is needed.

    Only for an episode that its tape plays. Whether the words fit the ids is `check`'s business.
    """

    def __init__(self, tape: Tape, *, stop_ids: frozenset[int] = frozenset()) -> None:
        self.stop_ids = stop_ids
        self._tape = tape
        self._messages = {turn.action.token_ids: turn.message for turn in tape.trajectory.turns}

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """The recorded ids of the prompt."""
        return self._observation()

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The recorded message of a recorded action."""
        return self._messages[tuple(token_ids)]

    def extend(self, reply: Sequence[Message], last_id: int | None) -> tuple[int, ...]:
        """The recorded ids of the observation that follows."""
        return self._observation()

    def _observation(self) -> tuple[int, ...]:
        turns = self._tape.trajectory.turns
        if self._tape.turn < len(turns):
            return turns[self._tape.turn].observation.token_ids
        return _NOTHING


class NoEngine:
    """Stands where an engine is needed and nothing will be sampled."""

    version = -1

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> ActionTokens:
        """Raises EngineFault."""
        raise EngineFault("a replay samples nothing")

    def released(self) -> "NoEngine":
        """A context that gives up nothing."""
        return self

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        return None
