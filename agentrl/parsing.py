"""Tool calls as model families write them: text to calls and back.

A parser never raises. What can't be read becomes a ToolCall whose `error` tells the model what to
mend. Thinking is taken away before a parser sees the text, so a draft in it never runs.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from agentrl.types import Message, ToolCall

SHOWN = 200
"""Characters of a bad call that are repeated in its error."""

Found = tuple[str, str, str | None]
"""Name, raw arguments, error of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing calls. `find` gives the text around the calls, and the calls in order;
    `write` is its inverse; `advice` tells a model without a tools template how to call.
    """

    name: str
    find: Callable[[str], tuple[str, list[Found]]]
    write: Callable[[str, str], str]
    advice: str

    def parse(self, text: str) -> Message:
        """An assistant message: content around the calls, and the calls."""
        try:
            content, found = self.find(text)
        except (ValueError, RecursionError) as error:
            content, found = text, [("", text[:SHOWN], f"the call can't be read: {error}")]
        calls = tuple(
            ToolCall(id=f"call_{i}", name=name, arguments=arguments, error=error)
            for i, (name, arguments, error) in enumerate(found)
        )
        return Message(role="assistant", content=content.strip(), tool_calls=calls)

    def format(self, message: Message) -> str:
        """Content and calls as this family writes them."""
        calls = [self.write(call.name, call.arguments) for call in message.tool_calls]
        return "\n".join(part for part in (message.content, *calls) if part)


def tool_format(name: str, tool_names: Sequence[str] = ()) -> ToolFormat:
    """The format of this name; `tags` needs to know the tools' names. Raises KeyError."""
    return _tags(tool_names) if name == "tags" else FORMATS[name]


def _split(
    pattern: re.Pattern[str], text: str, read: Callable[[re.Match[str]], list[Found]]
) -> tuple[str, list[Found]]:
    content: list[str] = []
    calls: list[Found] = []
    end = 0
    for match in pattern.finditer(text):
        content.append(text[end : match.start()])
        calls += read(match)
        end = match.end()
    return "".join((*content, text[end:])), calls


def _object(text: str) -> Found:
    """A JSON object with name and arguments (or parameters)."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return "", text, f"the call is not JSON ({error}): {_short(text)}"
    return _checked(value, text)


def _checked(value: Any, text: str) -> Found:
    if not isinstance(value, dict):
        return "", text, f"a call is an object with name and arguments: {_short(text)}"
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return "", text, f"the call has no name: {_short(text)}"
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return name, json.dumps(arguments), f"arguments must be an object: {_short(text)}"
    return name, json.dumps(arguments, ensure_ascii=False), None


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BETWEEN = re.compile(r"[\s,;]*")
_DECODER = json.JSONDecoder()


def _hermes(text: str) -> tuple[str, list[Found]]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`; several objects in a tag are as many
    calls, and a closing tag inside a JSON string is text.
    """
    content: list[str] = []
    calls: list[Found] = []
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        content.append(text[at:start])
        found, end = _objects(text, start + len(_OPEN), until=_CLOSE)
        closed = text.find(_CLOSE, end)
        at = closed + len(_CLOSE) if closed >= 0 else len(text)
        if closed < 0:
            cut = text[start + len(_OPEN) :]
            found = [("", cut, f"the call has no closing tag: {_short(cut)}")]
        elif not found and end < closed:
            found = [_object(text[end:closed])]
        elif end < closed:
            found.append(_object(text[end:closed].strip()))
        calls += found or [("", "", "the call is empty")]
    return "".join((*content, text[at:])), calls


def _objects(text: str, at: int, *, until: str) -> tuple[list[Found], int]:
    """The JSON values from `at`, and where they end: before `until`, or what is no JSON."""
    found: list[Found] = []
    at = _skip(text, at)
    while at < len(text) and not (until and text.startswith(until, at)):
        try:
            value, end = _DECODER.raw_decode(text, at)
        except ValueError:
            break
        found.append(_checked(value, text[at:end]))
        at = _skip(text, end)
    return found, at


def _skip(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    return match.end() if match else at


def _json_call(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'


_CODER = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = "<function="
_PARAMETER = "<parameter="


def _qwen_coder(text: str) -> tuple[str, list[Found]]:
    """`<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`."""

    def read(match: re.Match[str]) -> list[Found]:
        before, *functions = match[1].split(_FUNCTION)
        if not match[2] or before.strip() or not functions:
            return [("", match[1], f"the call must be <function=name>…</function>: "
                     f"{_short(match[1])}")]  # fmt: skip
        return [_coder_function(function) for function in functions]

    return _split(_CODER, text, read)


def _coder_function(text: str) -> Found:
    name, _, rest = text.partition(">")
    body, closed, after = rest.rpartition("</function>")
    name = name.strip()
    if not closed or after.strip() or not name:
        return name, text, f"the call has no closing </function>: {_short(text)}"
    before, *parameters = body.split(_PARAMETER)
    values: dict[str, str] = {}
    for parameter in parameters:
        key, _, value = parameter.partition(">")
        value, closed, after = value.rpartition("</parameter>")
        if not closed or after.strip():
            return name, text, f"parameter {_short(key)} has no closing </parameter>"
        values[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    if before.strip():
        return name, text, f"arguments are written <parameter=name>: {_short(before)}"
    return name, json.dumps(values), None


def _write_coder(name: str, arguments: str) -> str:
    values: Mapping[str, Any] = json.loads(arguments)
    body = "".join(
        f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
        for k, v in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


_NAMED = re.compile(r'\{\s*"(name|type)"')


def _llama_json(text: str) -> tuple[str, list[Found]]:
    """The whole message is a call: `{"name": …, "parameters": {…}}`, several divided by `;`."""
    stripped = text.strip()
    body = stripped.removeprefix("<|python_tag|>").strip()
    if body == stripped and not _NAMED.match(body):
        return text, []  # an answer may be JSON, too
    found, end = _objects(body, 0, until="")
    if end < len(body) or not found:
        found.append(_object(body[end:]))
    return "", found


def _llama_pythonic(text: str) -> tuple[str, list[Found]]:
    """The whole message is a list of calls: `[name(argument=value), …]`, literals only."""
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not re.match(r"\[\s*\w+\(", body):
        return text, []
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, MemoryError) as error:
        return "", [("", body, f"the calls are not a Python list ({error}): {_short(body)}")]
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    return "", [_python_call(node) for node in nodes]


def _python_call(node: ast.expr) -> Found:
    text = ast.unparse(node)
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name):
        return "", text, f"a call is name(argument=value): {_short(text)}"
    try:
        values = {k.arg or "": ast.literal_eval(k.value) for k in node.keywords}
        if "" in values:
            raise ValueError("** has no name")
        return node.func.id, json.dumps(values, ensure_ascii=False, allow_nan=False), None
    except (ValueError, TypeError):
        return node.func.id, text, f"arguments must be plain values: {_short(text)}"


def _write_pythonic(name: str, arguments: str) -> str:
    values: Mapping[str, Any] = json.loads(arguments)
    return f"[{name}({', '.join(f'{k}={v!r}' for k, v in values.items())})]"


def _mistral(text: str) -> tuple[str, list[Found]]:
    """`[TOOL_CALLS]` and a JSON list, or `name[ARGS]{…}`."""
    content, mark, calls = text.partition("[TOOL_CALLS]")
    if not mark:
        return text, []
    if "[ARGS]" in calls:
        found: list[Found] = []
        for part in calls.split("[TOOL_CALLS]"):
            name, _, arguments = part.partition("[ARGS]")
            found.append(_object(_json_call(name.strip(), arguments.strip() or "{}")))
        return content, found
    try:
        values = json.loads(calls)
    except ValueError as error:
        return content, [("", calls, f"the calls are not JSON ({error}): {_short(calls)}")]
    items = values if isinstance(values, list) else [values]
    return content, [_checked(value, json.dumps(value)) for value in items]


_FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(```|\Z)", re.DOTALL)


def _code_block(text: str) -> tuple[str, list[Found]]:
    """The first fenced block is a call of `python`; what is written after it is left alone."""
    match = _FENCE.search(text)
    if match is None:
        return text, []
    error = None if match[2] else "the code block has no closing fence"
    call: Found = ("python", json.dumps({"code": match[1]}), error)
    return text[: match.start()] + text[match.end() :], [call]


def _write_block(name: str, arguments: str) -> str:
    code = json.loads(arguments)["code"]
    return f"```python\n{code if code.endswith(chr(10)) else code + chr(10)}```"


def _tags(names: Sequence[str]) -> ToolFormat:
    """`<search>text</search>`: a call of that tool with its one text argument."""
    either = "|".join(re.escape(name) for name in names) or r"(?!)"
    pattern = re.compile(rf"<({either})>(.*?)(</\1>|\Z)", re.DOTALL)

    def read(match: re.Match[str]) -> list[Found]:
        error = None if match[3] else f"<{match[1]}> has no closing tag"
        return [(match[1], json.dumps(match[2], ensure_ascii=False), error)]

    def write(name: str, arguments: str) -> str:
        value: Any = json.loads(arguments)
        text = next(iter(value.values())) if isinstance(value, dict) else value
        return f"<{name}>{text}</{name}>"

    return ToolFormat(
        name="tags",
        find=lambda text: _split(pattern, text, read),
        write=write,
        advice="To call a tool, write its argument between tags of its name: <name>argument</name>",
    )


_AS_JSON = '{"name": "<tool>", "arguments": {<arguments>}}'

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            ToolFormat(
                name="hermes",
                find=_hermes,
                write=lambda n, a: f"<tool_call>\n{_json_call(n, a)}\n</tool_call>",
                advice=f"To call a tool, write <tool_call>\n{_AS_JSON}\n</tool_call>",
            ),
            ToolFormat(
                name="qwen-coder",
                find=_qwen_coder,
                write=_write_coder,
                advice="To call a tool, write <tool_call>\n<function=tool>\n<parameter=name>\n"
                "value\n</parameter>\n</function>\n</tool_call>",
            ),
            ToolFormat(
                name="llama3-json",
                find=_llama_json,
                write=lambda n, a: f'{{"name": {json.dumps(n)}, "parameters": {a}}}',
                advice='To call a tool, write only {"name": "<tool>", "parameters": {<arguments>}}',
            ),
            ToolFormat(
                name="llama3-pythonic",
                find=_llama_pythonic,
                write=_write_pythonic,
                advice="To call tools, write only [tool(argument=value)]",
            ),
            ToolFormat(
                name="mistral",
                find=_mistral,
                write=lambda n, a: f"[TOOL_CALLS][{_json_call(n, a)}]",
                advice=f"To call tools, write [TOOL_CALLS][{_AS_JSON}]",
            ),
            ToolFormat(
                name="code-block",
                find=_code_block,
                write=_write_block,
                advice="To run Python, write one block: ```python\ncode\n```",
            ),
        )
    }
)


def format_of_template(template: str) -> str:
    """The tool format that a chat template shows; hermes where it shows none."""
    marks = {
        "<function=": "qwen-coder",
        "[TOOL_CALLS]": "mistral",
        "<|python_start|>": "llama3-pythonic",
        "<|python_tag|>": "llama3-json",
    }
    return next((name for mark, name in marks.items() if mark in template), "hermes")
