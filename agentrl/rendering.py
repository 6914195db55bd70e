"""Messages to ids and sampled ids to messages, by appending only.

A template is rendered with placeholders where the contents go. The text between them is scaffold
and may hold control tokens; contents are encoded apart, as plain text: a tool output can't write
the end of a turn. What follows an action is what the template puts after an assistant's content,
so sampled ids are never decoded and encoded again, whatever the template would do to the past.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jinja2 import TemplateError

from agentrl.errors import ConfigError
from agentrl.parsing import FORMATS, ToolFormat, format_of_template, tool_format
from agentrl.protocols import Tool
from agentrl.types import Message, system, user

_MARK = re.compile("\ue000(\\d+)\ue001")
"""Placeholders of private-use characters: no template touches them, and none is in a scaffold."""

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""What a model without a chat template reads: `Role: content` lines."""


class ChatTemplateRenderer:
    """A `Renderer` and `Writer` for a Hugging Face tokenizer and its chat template.

    `tokenizer` is a PreTrainedTokenizerBase. Tools go to templates that take them; others get a
    preamble in the system message. A template that refuses the system or tool role gets that text
    in a user message, one that wants the roles to alternate gets neighbours as one message.
    """

    def __init__(self, tokenizer: Any, *, format: ToolFormat, stop_ids: frozenset[int]) -> None:
        self.stop_ids = stop_ids
        self.template: str = tokenizer.chat_template or PLAIN_TEMPLATE
        self.format = format
        self._tokenizer = tokenizer
        self._end: int = tokenizer.eos_token_id
        self.takes_tools = "tools" in self.template
        self.takes_system = self._accepts("system", "user")
        self.takes_tool_role = self._accepts("user", "assistant", "tool")
        self.takes_neighbours = self._accepts("user", "assistant", "user", "user") and (
            not self.takes_tool_role or self._accepts("user", "assistant", "tool", "tool")
        )
        self._half_open = self._text([_dict("user", "u")]).rstrip().endswith("<think>")
        self._quotes_tools = self.takes_tool_role and self._quotes("user", "assistant", "tool")
        self._end = self._end_of_turn()

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """The ids of the whole prompt, up to where the policy starts to write."""
        schemas = [dict(tool.schema) for tool in tools]
        if schemas and not self.takes_tools:
            messages = _with_preamble(messages, schemas, self.format)
        if not self.takes_system:
            messages = _without_system(messages)
        parts = self._render(messages, schemas if self.takes_tools else [])
        return self._encode(parts)

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The sampled ids as an assistant message: thinking apart, calls found. Never raises."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        reasoning, text = _thinking(text, open=self._half_open)
        return replace(self.format.parse(text), reasoning=reasoning)

    def extend(self, reply: Sequence[Message], last_id: int | None) -> tuple[int, ...]:
        """What the template puts after an action, the reply, and the mark to write again."""
        past = [user("u"), Message(role="assistant", content="a")]
        parts = self._render([*past, *reply], [])
        tail = parts[parts.index((1, "a")) + 1 :]
        ids = self._encode(tail)
        first_is_end = bool(ids) and ids[0] in self.stop_ids
        if last_id in self.stop_ids:
            return ids[1:] if first_is_end else ids
        return ids if first_is_end else (self._end, *ids)

    def write(self, message: Message) -> tuple[int, ...]:
        """The ids of an assistant message, its end token included."""
        text = self.format.format(message)
        if message.reasoning or self._half_open:
            opening = "" if self._half_open else "<think>"
            text = f"{opening}{message.reasoning}</think>{text}"
        return (*self._plain(text, special=True), self._end)

    def is_append_only(self) -> bool:
        """Whether the template leaves an earlier text alone when the talk goes on."""
        past = [_dict("user", "u"), _dict("assistant", "<think>why</think>a")]
        if self.takes_system:
            past.insert(0, _dict("system", "s"))
        ends = self._tokenizer.apply_chat_template(
            past, chat_template=self.template, tokenize=False
        )
        return self._text([*past, _dict("user", "more")]).startswith(ends.rstrip())

    def _render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]]
    ) -> list[tuple[int | None, str]]:
        """The rendered conversation in parts: scaffold (None) and contents (their number)."""
        if not self.takes_tool_role:
            messages = [replace(m, role="user") if m.role == "tool" else m for m in messages]
        if not self.takes_neighbours:
            messages = _merged(messages)
        contents = [self._content(message) for message in messages]
        dicts = [_dict(m.role, _mark(n)) for n, m in enumerate(messages)]
        text = self._text(dicts, tools)
        parts: list[tuple[int | None, str]] = []
        end = 0
        for match in _MARK.finditer(text):
            parts.append((None, text[end : match.start()]))
            parts.append((int(match[1]), contents[int(match[1])]))
            end = match.end()
        parts.append((None, text[end:]))
        shown = {number for number, _ in parts if number is not None}
        if shown != set(range(len(contents))):
            missing = sorted(set(range(len(contents))) - shown)
            raise ConfigError(
                f"the chat template leaves out message {missing[0]} ({messages[missing[0]].role}) "
                "of a conversation: use another template"
            )
        return parts

    def _content(self, message: Message) -> str:
        text = self.format.format(message)
        if message.role == "tool" and self._quotes_tools:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        return text

    def _end_of_turn(self) -> int:
        """What the template ends an action with; the tokenizer's end token if that is no stop."""
        try:
            tail = self.extend([user("u")], None)
        except (TemplateError, ValueError, TypeError, KeyError):
            return self._end  # the self-check says what is wrong
        return tail[0]

    def _encode(self, parts: Sequence[tuple[int | None, str]]) -> tuple[int, ...]:
        return tuple(i for number, text in parts for i in self._plain(text, special=number is None))

    def _plain(self, text: str, *, special: bool) -> list[int]:
        if not text:
            return []
        return self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=not special
        )

    def _text(self, dicts: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        return self._tokenizer.apply_chat_template(
            dicts,
            tools=tools or None,
            chat_template=self.template,
            add_generation_prompt=True,
            tokenize=False,
        )

    def _accepts(self, *roles: str) -> bool:
        """Whether the template shows messages of these roles, in this order."""
        marks = [_mark(number) for number in range(len(roles))]
        try:
            text = self._text([_dict(role, m) for role, m in zip(roles, marks, strict=True)])
        except (TemplateError, ValueError, TypeError, KeyError):
            return False
        return all(mark in text for mark in marks)

    def _quotes(self, *roles: str) -> bool:
        """Whether the template writes the last message's content as a JSON string."""
        return 'a\\"b' in self._text([_dict(role, 'a"b') for role in roles])


def make_renderer(
    tokenizer: Any, *, tool_format_name: str = "auto", tool_names: Sequence[str] = ()
) -> ChatTemplateRenderer:
    """The renderer of a tokenizer; `auto` takes the tool format from its template.

    Raises ConfigError for an unknown format, a template that does not work, or a tokenizer without
    an end token.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no eos_token, so no action could ever end")
    name = tool_format_name
    if name == "auto":
        name = format_of_template(tokenizer.chat_template or "")
    if name != "tags" and name not in FORMATS:
        raise ConfigError(f"model.tool_format: unknown {name!r}; known: tags, {', '.join(FORMATS)}")
    try:
        return ChatTemplateRenderer(
            tokenizer, format=tool_format(name, tool_names), stop_ids=_stop_ids(tokenizer)
        )
    except TemplateError as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"the chat template fails on a single user message: {reason}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFinding:
    """One thing that a template does; `fatal` ones stop a run before it starts."""

    level: Literal["note", "fatal"]
    what: str


def check_template(renderer: ChatTemplateRenderer) -> list[TemplateFinding]:
    """Render a small conversation each way and name what is unusual or wrong about the template."""
    findings: list[TemplateFinding] = []

    def check(level: Literal["note", "fatal"], what: str, holds: Callable[[], bool]) -> None:
        try:
            fine = holds()
        except Exception as error:
            fine, what = False, f"{what} ({type(error).__name__}: {' '.join(str(error).split())})"
        if not fine:
            findings.append(TemplateFinding(level=level, what=what))

    ask, answer = user("question"), Message(role="assistant", content="answer")
    reply = Message(role="tool", content="result", tool_call_id="call_0")
    end = next(iter(renderer.stop_ids))
    check("fatal", "it can't open with a user message", lambda: bool(renderer.open([ask], ())))
    for more in ((reply,), (reply, reply), (user("more"),)):
        check(
            "fatal",
            f"it can't go on after an action with {len(more)} {more[0].role} message(s)",
            lambda more=more: bool(renderer.extend(more, end)),
        )
    check(
        "fatal",
        "an action that is written does not parse back",
        lambda: renderer.parse(renderer.write(answer)).content == "answer",
    )
    check("note", "it takes no system message: system text goes to the user", lambda: (
        renderer.takes_system))  # fmt: skip
    check("note", "it takes no tool message: results are shown as user messages", lambda: (
        renderer.takes_tool_role))  # fmt: skip
    check("note", "it takes no tools: they are described in a preamble", lambda: (
        renderer.takes_tools))  # fmt: skip
    check("note", "it wants roles to alternate: neighbours are shown as one message", lambda: (
        renderer.takes_neighbours))  # fmt: skip
    check("note", "it writes today's date: the same task reads differently tomorrow", lambda: (
        "strftime_now" not in renderer.template))  # fmt: skip
    check(
        "note",
        "it rewrites earlier turns once more messages follow; agentrl keeps the sampled ids",
        lambda: renderer.is_append_only(),
    )
    return findings


def _stop_ids(tokenizer: Any) -> frozenset[int]:
    """The end token, and the end-of-turn tokens that families use beside it."""
    names = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
    vocabulary: dict[str, int] = tokenizer.get_added_vocab()
    return frozenset({tokenizer.eos_token_id, *(vocabulary[n] for n in names if n in vocabulary)})


def _dict(role: str, content: str) -> dict[str, Any]:
    """A message as templates take it. Some insist on the id of a call, of nine characters."""
    call = {"tool_call_id": "call00000", "name": "tool"} if role == "tool" else {}
    return {"role": role, "content": content, **call}


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1].role == message.role:
            out[-1] = replace(out[-1], content=f"{out[-1].content}\n\n{message.content}")
        else:
            out.append(message)
    return out


_THOUGHT = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


def _thinking(text: str, *, open: bool) -> tuple[str, str]:
    """Reasoning, and the rest of the text. A block that never closes is all reasoning.

    Blocks may stand anywhere. A closing tag alone ends a block that the prompt has opened, also
    where the template does not show that it did.
    """
    lone = text.find("</think>")
    begun = text.find("<think>")
    if open or (lone >= 0 and not 0 <= begun < lone):
        text = text if text.lstrip().startswith("<think>") else f"<think>{text}"
    thoughts = [match[1].strip() for match in _THOUGHT.finditer(text)]
    return "\n".join(thought for thought in thoughts if thought), _THOUGHT.sub("", text)


def _with_preamble(
    messages: Sequence[Message], schemas: list[dict[str, Any]], format: ToolFormat
) -> list[Message]:
    """The tools, described in the system message."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    text = f"You have these tools:\n{listed}\n{format.advice}"
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=f"{messages[0].content}\n\n{text}")
        return [first, *messages[1:]]
    return [system(text), *messages]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """System text before the first user message's own."""
    text = "\n\n".join(m.content for m in messages if m.role == "system")
    rest = [m for m in messages if m.role != "system"]
    if not text or not rest:
        return rest or [user(text)]
    return [replace(rest[0], content=f"{text}\n\n{rest[0].content}"), *rest[1:]]
