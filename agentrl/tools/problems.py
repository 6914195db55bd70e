"""Short ways to write problems, and the lines of scripted policies."""

import json
from collections.abc import Generator, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from agentrl.errors import PluginError
from agentrl.types import Message, Messages, Problem, SandboxSpec, Task, ToolCall, user


def problem(
    prompt: str | Sequence[Message],
    reference: Any = None,
    *,
    id: str | None = None,
    sandbox: SandboxSpec | None = None,
    grading: SandboxSpec | None = None,
    artifacts: Sequence[str] = (),
    setup: Mapping[str, Any] = MappingProxyType({}),
) -> Problem:
    """A problem: what is asked, and the reference that only the verifier sees.

    The agent's tools run in `sandbox`, the verifier's in another, `grading`, after it is closed.
    Without an id, it follows from prompt, reference and setup, so that rows with one text and two
    references are two tasks. Raises PluginError when it can't: a reference without a lasting repr.
    """
    messages = (user(prompt),) if isinstance(prompt, str) else tuple(prompt)
    task = Task(
        id=id or _id_of(messages, reference, setup),
        prompt=messages,
        sandbox=sandbox,
        artifacts=tuple(artifacts),
        setup=setup,
    )
    return Problem(task=task, reference=reference, grading=grading)


def call(name: str, /, **arguments: Any) -> Message:
    """An action that calls one tool: for scripted policies."""
    raw = json.dumps(arguments, ensure_ascii=False)
    return Message(
        role="assistant", content="", tool_calls=(ToolCall(id="call_0", name=name, arguments=raw),)
    )


def answer(text: str) -> Message:
    """An action that ends the episode with an answer: for scripted policies."""
    return Message(role="assistant", content=text)


def says_nothing(problem: Problem) -> Generator[Message, Messages, None]:
    """The null policy: an empty answer."""
    yield answer("")


def _id_of(messages: Messages, reference: Any, setup: Mapping[str, Any]) -> str:
    text = repr((messages, _lasting(reference), _lasting(dict(setup))))
    if " object at 0x" in text:
        raise PluginError(
            f"problem {messages[-1].content[:60]!r}: the repr of its reference or setup is "
            "different in each process; give problem() an id"
        )
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _lasting(value: Any) -> Any:
    """The value with its sets and mappings in order: a set of text has another order each time."""
    if isinstance(value, set | frozenset):
        return ("set", *sorted(repr(_lasting(v)) for v in value))
    if isinstance(value, Mapping):
        return ("map", *sorted((repr(k), repr(_lasting(v))) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return [_lasting(v) for v in value]
    return value
