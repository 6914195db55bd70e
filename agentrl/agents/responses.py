"""The dialect of the Responses API, with and without streaming; nothing is kept between calls."""

import json
import time
from collections.abc import Iterator
from typing import Any

from agentrl.agents.wire import Ask, Body, Dialect, Event, Json, function_tool, parsed, text_of
from agentrl.errors import RequestError
from agentrl.types import Completion, Message, Role, ToolCall, system

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


class _Tool(Body):
    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: Json | None = None


class _Item(Body):
    type: str = "message"
    role: str = ""
    content: Any = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: Any = None


class _Request(Body):
    input: str | list[_Item]
    model: str = "policy"
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    stream: bool | None = None


def read(body: Json, reply_id: str) -> Ask:
    """A request body. Raises RequestError for what the policy can't do."""
    request = parsed(_Request, body)
    if request.previous_response_id is not None:
        raise RequestError("previous_response_id: nothing is kept here; send the whole input")
    tools = request.tools or [] if request.tool_choice != "none" else []
    odd = [tool.type for tool in tools if tool.type != "function"]
    if odd:
        raise RequestError(f"tools: the policy calls functions, not {odd[0]}")
    items = request.input
    if isinstance(items, str):
        items = [_Item(role="user", content=items)]
    opening = (system(request.instructions),) if request.instructions else ()
    return Ask(
        reply_id=f"resp_{reply_id}",
        model=request.model,
        messages=(*opening, *_messages(items)),
        tools=tuple(function_tool(t.name, t.description, t.parameters) for t in tools),
        max_tokens=request.max_output_tokens,
        stream=bool(request.stream),
    )


def write(ask: Ask, answer: Completion) -> Json:
    """The whole answer."""
    status = "incomplete" if answer.cut_off else "completed"
    reason = {"reason": "max_output_tokens"} if answer.cut_off else None
    return {
        **_head(ask, status),
        "incomplete_details": reason,
        "output": list(_output(ask, answer)),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.action_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.action_tokens,
        },
    }


def events(ask: Ask, answer: Completion) -> Iterator[Event]:
    """The answer as it would have come: each item begun, filled and ended."""
    for number, data in enumerate(_events(ask, answer)):
        text = json.dumps({**data, "sequence_number": number})
        yield Event(name=data["type"], data=text)


def refuse(kind: str, message: str) -> Json:
    """An error body."""
    return {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": kind}
    }


RESPONSES = Dialect(path="/v1/responses", read=read, write=write, events=events, refuse=refuse)


def _messages(items: list[_Item]) -> Iterator[Message]:
    """The items as messages: a text and the calls after it are one."""
    content, calls, told = "", list[ToolCall](), False
    for number, item in enumerate(items):
        where = f"input.{number}"
        if item.type == "function_call":
            calls.append(ToolCall(id=item.call_id, name=item.name, arguments=item.arguments))
            continue
        if item.type == "reasoning":
            continue
        if item.type == "message" and item.role == "assistant" and not (calls or told):
            content, told = text_of(item.content, where), True
            continue
        if calls or told:
            yield Message(role="assistant", content=content, tool_calls=tuple(calls))
            content, calls, told = "", [], False
        if item.type == "function_call_output":
            output = text_of(item.output, where)
            yield Message(role="tool", content=output, tool_call_id=item.call_id)
        elif item.type != "message" or item.role not in _ROLES:
            raise RequestError(f"{where}: an item of type {item.type!r}, role {item.role!r}")
        elif item.role == "assistant":
            content, told = text_of(item.content, where), True
        else:
            yield Message(role=_ROLES[item.role], content=text_of(item.content, where))
    if calls or told:
        yield Message(role="assistant", content=content, tool_calls=tuple(calls))


def _output(ask: Ask, answer: Completion) -> Iterator[Json]:
    said = answer.message
    if said.content or not said.tool_calls:
        yield {
            "id": f"msg_{ask.reply_id}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [_text(said.content)],
        }
    for call in said.tool_calls:
        yield {
            "id": f"fc_{call.id}_{ask.reply_id}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }


def _text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _events(ask: Ask, answer: Completion) -> Iterator[Json]:
    begun = {**_head(ask, "in_progress"), "output": [], "incomplete_details": None, "usage": None}
    yield {"type": "response.created", "response": begun}
    for index, item in enumerate(_output(ask, answer)):
        yield from _item_events(index, item)
    kind = "response.incomplete" if answer.cut_off else "response.completed"
    yield {"type": kind, "response": write(ask, answer)}


def _item_events(index: int, item: Json) -> Iterator[Json]:
    at = {"output_index": index, "item_id": item["id"]}
    empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
    added = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": added}
    if item["type"] == "message":
        (part,) = item["content"]
        here, text = {**at, "content_index": 0}, {"text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.added", **here, "part": _text("")}
        delta = {"delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.delta", **here, **delta}
        yield {"type": "response.output_text.done", **here, **text}
        yield {"type": "response.content_part.done", **here, "part": part}
    else:
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **at, "delta": item["arguments"]}
        whole = {"arguments": item["arguments"], "name": item["name"]}
        yield {"type": f"{kind}.done", **at, **whole}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _head(ask: Ask, status: str) -> Json:
    return {
        "id": ask.reply_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": ask.model,
        "status": status,
        "error": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
