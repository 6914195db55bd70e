"""The dialect of chat completions, with and without streaming."""

import json
import time
from collections.abc import Iterator
from typing import Any

from agentrl.agents.wire import Ask, Body, Dialect, Event, Json, function_tool, parsed, text_of
from agentrl.errors import RequestError
from agentrl.types import Completion, Message, Role, ToolCall

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class _Function(Body):
    name: str
    description: str | None = None
    parameters: Json | None = None


class _Tool(Body):
    function: _Function


class _Called(Body):
    name: str
    arguments: str = "{}"


class _Call(Body):
    id: str = ""
    function: _Called


class _Message(Body):
    role: str
    content: Any = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _StreamOptions(Body):
    include_usage: bool = False


class _Request(Body):
    messages: list[_Message]
    model: str = "policy"
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    response_format: Json | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


def read(body: Json, reply_id: str) -> Ask:
    """A request body. Raises RequestError for what the policy can't do."""
    request = parsed(_Request, body)
    if request.n not in (None, 1):
        raise RequestError("n: ask several times for several answers")
    if (request.response_format or {}).get("type", "text") != "text":
        raise RequestError("response_format: what the policy writes is not constrained, only text")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    tools = request.tools or [] if request.tool_choice != "none" else []
    functions = [tool.function for tool in tools]
    return Ask(
        reply_id=f"chatcmpl-{reply_id}",
        model=request.model,
        messages=tuple(_message(m, n) for n, m in enumerate(request.messages)),
        tools=tuple(function_tool(f.name, f.description, f.parameters) for f in functions),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=tuple(stop),
        stream=bool(request.stream),
        stream_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def write(ask: Ask, answer: Completion) -> Json:
    """The whole answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", **_content(answer), "refusal": None, **_calls(answer)},
        "finish_reason": _finish(answer),
        "logprobs": None,
    }
    return {**_head(ask, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(ask: Ask, answer: Completion) -> Iterator[Event]:
    """The answer in chunks: its text, each call, the finish reason."""
    calls = answer.message.tool_calls
    deltas: list[Json] = [{"role": "assistant", **_content(answer)}]
    deltas += [{"tool_calls": [{"index": i, **_call(call)}]} for i, call in enumerate(calls)]
    for delta in deltas:
        yield _chunk(ask, [{"index": 0, "delta": delta, "finish_reason": None}])
    yield _chunk(ask, [{"index": 0, "delta": {}, "finish_reason": _finish(answer)}])
    if ask.stream_usage:
        yield _chunk(ask, [], usage=_usage(answer))
    yield Event(data="[DONE]")


def refuse(kind: str, message: str) -> Json:
    """An error body."""
    return {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": kind}
    }


CHAT = Dialect(path="/v1/chat/completions", read=read, write=write, events=events, refuse=refuse)


def _message(given: _Message, number: int) -> Message:
    where = f"messages.{number}"
    if given.role not in _ROLES:
        raise RequestError(f"{where}.role: {given.role!r} is none of {', '.join(_ROLES)}")
    calls = [
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in given.tool_calls or []
    ]
    return Message(
        role=_ROLES[given.role],
        content=text_of(given.content, where),
        tool_calls=tuple(calls),
        tool_call_id=given.tool_call_id,
    )


def _content(answer: Completion) -> Json:
    said = answer.message
    thought = {"reasoning_content": said.reasoning} if said.reasoning else {}
    return {"content": said.content or (None if said.tool_calls else ""), **thought}


def _calls(answer: Completion) -> Json:
    calls = [_call(call) for call in answer.message.tool_calls]
    return {"tool_calls": calls} if calls else {}


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _finish(answer: Completion) -> str:
    if answer.cut_off:
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def _usage(answer: Completion) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.action_tokens,
        "total_tokens": answer.prompt_tokens + answer.action_tokens,
    }


def _head(ask: Ask, kind: str) -> Json:
    return {"id": ask.reply_id, "object": kind, "created": int(time.time()), "model": ask.model}


def _chunk(ask: Ask, choices: list[Json], **more: Any) -> Event:
    return Event(
        data=json.dumps({**_head(ask, "chat.completion.chunk"), "choices": choices, **more})
    )
