"""The dialect of Anthropic's Messages API, with and without streaming."""

import json
from collections.abc import Iterator
from typing import Any

from agentrl.agents.wire import Ask, Body, Dialect, Event, Json, function_tool, parsed, text_of
from agentrl.errors import RequestError
from agentrl.types import Completion, Message, ToolCall, system, user


class _Tool(Body):
    name: str
    description: str | None = None
    input_schema: Json | None = None


class _Message(Body):
    role: str
    content: str | list[Json]


class _Request(Body):
    messages: list[_Message]
    model: str = "policy"
    system: str | list[Json] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Json | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def read(body: Json, reply_id: str) -> Ask:
    """A request body. Raises RequestError for what the policy can't do."""
    request = parsed(_Request, body)
    opening = text_of(request.system, "system")
    messages = [system(opening)] if opening else []
    for number, given in enumerate(request.messages):
        messages += _messages(given, f"messages.{number}")
    none = (request.tool_choice or {}).get("type") == "none"
    tools = [] if none else request.tools or []
    return Ask(
        reply_id=f"msg_{reply_id}",
        model=request.model,
        messages=tuple(messages),
        tools=tuple(function_tool(t.name, t.description, t.input_schema) for t in tools),
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
        stream=bool(request.stream),
    )


def write(ask: Ask, answer: Completion) -> Json:
    """The whole answer."""
    return {
        **_head(ask),
        "content": _blocks(answer),
        "stop_reason": _reason(answer),
        "usage": _usage(answer, answer.action_tokens),
    }


def events(ask: Ask, answer: Completion) -> Iterator[Event]:
    """The answer as it would have come: each block begun, filled and ended."""
    yield _event("message_start", message={**_head(ask), "usage": _usage(answer, 0)})
    for index, block in enumerate(_blocks(answer)):
        if block["type"] == "text":
            empty: Json = {"type": "text", "text": ""}
            delta: Json = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": _reason(answer), "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage={"output_tokens": answer.action_tokens})
    yield _event("message_stop")


def refuse(kind: str, message: str) -> Json:
    """An error body."""
    known = "authentication_error" if kind == "invalid_api_key" else "invalid_request_error"
    return {"type": "error", "error": {"type": known, "message": message}}


ANTHROPIC = Dialect(path="/v1/messages", read=read, write=write, events=events, refuse=refuse)


def _messages(given: _Message, where: str) -> Iterator[Message]:
    """One message as the renderer's: the results of tools stand before a user's text."""
    if given.role not in ("user", "assistant"):
        raise RequestError(f"{where}.role: {given.role!r} is neither user nor assistant")
    if isinstance(given.content, str):
        yield Message(role="user" if given.role == "user" else "assistant", content=given.content)
        return
    texts, calls, results = list[str](), list[ToolCall](), 0
    for block in given.content:
        match block.get("type"):
            case "text":
                texts.append(text_of([block], where))
            case "tool_use":
                calls.append(_call(block))
            case "tool_result":
                results += 1
                content = text_of(block.get("content"), where)
                call_id = str(block.get("tool_use_id", ""))
                yield Message(role="tool", content=content, tool_call_id=call_id)
            case "thinking" | "redacted_thinking":
                pass
            case kind:
                raise RequestError(f"{where}: the policy reads text, not a part of type {kind}")
    if given.role == "assistant":
        yield Message(role="assistant", content="".join(texts), tool_calls=tuple(calls))
    elif texts or not results:
        yield user("".join(texts))


def _call(block: Json) -> ToolCall:
    arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
    return ToolCall(
        id=str(block.get("id", "")), name=str(block.get("name", "")), arguments=arguments
    )


def _blocks(answer: Completion) -> list[Json]:
    said = answer.message
    blocks: list[Json] = []
    if said.content or not said.tool_calls:
        blocks.append({"type": "text", "text": said.content, "citations": None})
    for call in said.tool_calls:
        values: Any = json.loads(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": values})
    return blocks


def _reason(answer: Completion) -> str:
    if answer.cut_off:
        return "max_tokens"
    return "tool_use" if answer.message.tool_calls else "end_turn"


def _usage(answer: Completion, written: int) -> Json:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": written}


def _head(ask: Ask) -> Json:
    return {
        "id": ask.reply_id,
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _event(kind: str, **data: Any) -> Event:
    return Event(name=kind, data=json.dumps({"type": kind, **data}))
