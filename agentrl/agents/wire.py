"""What the dialects of chat servers have in common: a request, a tool, an event, a refusal."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.errors import RequestError
from agentrl.types import Completion, Messages

Json = dict[str, Any]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTool:
    """A tool that a request describes."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, in any dialect. `reply_id` names the answer."""

    reply_id: str
    model: str
    messages: Messages
    tools: tuple[GivenTool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = field(default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One server-sent event; `data` is JSON text, or what a dialect ends with."""

    data: str
    name: str = ""

    def encoded(self) -> bytes:
        """As it goes over the wire."""
        head = f"event: {self.name}\n" if self.name else ""
        return f"{head}data: {self.data}\n\n".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one kind of server talks: where, what it reads, and what it answers."""

    path: str
    read: Callable[[Json, str], Ask]
    write: Callable[[Ask, Completion], Json]
    events: Callable[[Ask, Completion], Iterator[Event]]
    refuse: Callable[[str, str], Json]
    """The body of an error, from its kind and its message."""


class Body(BaseModel):
    """A part of a request. Fields that the policy has no use for are passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def parsed(kind: type[M], body: Any) -> M:
    """The request body as `kind`. Raises RequestError naming the field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise RequestError(f"{where}: {first['msg']}") from None


def function_tool(name: str, description: str | None, parameters: Json | None) -> GivenTool:
    """A tool in the OpenAI form."""
    function = {
        "name": name,
        "description": description or "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return GivenTool(name=name, schema={"type": "function", "function": function})


def text_of(content: Any, where: str) -> str:
    """The text of a content: a text, nothing, or parts that are all text. Raises RequestError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}: a content is a text or a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(f"{where}: the policy reads text, not a part of type {kind}")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "".join(texts)
