"""Chat messages as the renderer reads them; `agentrl.types` has them too."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the model wrote it.

    `arguments` is the raw JSON text as sampled. A call that could not be parsed is data too:
    `error` then says what is wrong with it, `name` is "" if none could be read, and `arguments`
    holds the raw text.
    """

    id: str
    name: str
    arguments: str
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message. `reasoning` is the thinking block, kept apart from `content`."""

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the policy answers an agent program: a message, and the sizes of both sides in tokens.

    A call that can't be read is text in `message`, as a server would give it. `cut_off` says that
    the answer met its length limit.
    """

    message: Message
    cut_off: bool
    prompt_tokens: int
    action_tokens: int


def user(content: str) -> Message:
    """A user message."""
    return Message(role="user", content=content)


def system(content: str) -> Message:
    """A system message."""
    return Message(role="system", content=content)


def assistant(content: str, *, tool_calls: Iterable[ToolCall] = ()) -> Message:
    """An assistant message."""
    return Message(role="assistant", content=content, tool_calls=tuple(tool_calls))
