"""Who writes the actions of an episode: the engine, or a script that is read out."""

from collections.abc import Generator, Sequence
from typing import Protocol

from agentrl.errors import EngineFault, EnvironmentFault
from agentrl.guard import blaming
from agentrl.protocols import InferenceEngine, Writer
from agentrl.types import ActionTokens, Message, Messages, Sampling

SCRIPT_VERSION = -1
"""The policy version of tokens that a script wrote: no policy did."""


class Actor(Protocol):
    """Writes the actions of one episode."""

    async def act(
        self, prompt_ids: Sequence[int], sampling: Sampling, reply: Messages
    ) -> ActionTokens | None:
        """The next action after `reply` (whose ids end the prompt); None: it has none left."""
        ...


class PolicyActor:
    """The engine, bound to one episode."""

    def __init__(self, engine: InferenceEngine, *, session: str) -> None:
        self._engine, self._session = engine, session

    async def act(
        self, prompt_ids: Sequence[int], sampling: Sampling, reply: Messages
    ) -> ActionTokens:
        """Sample the next action. Raises EngineFault, also for a reply that breaks the limit."""
        with blaming(EngineFault, "sampling"):
            action = await self._engine.sample(prompt_ids, sampling, session=self._session)
        if action.finish == "abort":
            raise EngineFault("the engine aborted the request")
        if len(action.token_ids) > sampling.max_tokens:
            got, allowed = len(action.token_ids), sampling.max_tokens
            raise EngineFault(f"the engine gave {got} tokens where {allowed} were allowed")
        return action


class ScriptActor:
    """A script, read out line by line."""

    def __init__(self, lines: Generator[Message, Messages, None], writer: Writer) -> None:
        self._lines, self._writer = lines, writer
        self._begun = False

    async def act(
        self, prompt_ids: Sequence[int], sampling: Sampling, reply: Messages
    ) -> ActionTokens | None:
        """Write the script's next line. Raises EnvironmentFault if the script raises."""
        with blaming(EnvironmentFault, "the script"):
            message = self._next(reply)
            if message is None:
                return None
            ids = self._writer.write(message)
        kept = ids[: sampling.max_tokens]
        return ActionTokens(
            token_ids=kept,
            logprobs=None,
            versions=(SCRIPT_VERSION,) * len(kept),
            finish="stop" if len(kept) == len(ids) else "length",
        )

    def _next(self, reply: Messages) -> Message | None:
        try:
            if not self._begun or _is_deaf(self._lines):
                self._begun = True
                return next(self._lines)
            return self._lines.send(reply)
        except StopIteration:
            return None


def _is_deaf(lines: Generator[Message, Messages, None]) -> bool:
    """Whether the script is inside `yield from` something that can't be sent a reply (a list)."""
    inner: object = lines
    while (deeper := getattr(inner, "gi_yieldfrom", None)) is not None:
        inner = deeper
    return not hasattr(inner, "send")
