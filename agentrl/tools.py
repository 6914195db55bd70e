"""What an author writes: tools as methods, problems, a verifier.

class Dice(ToolEnvironment):
    @tool
    def roll(self, sides: int) -> int:
        \"\"\"Roll a die with this many sides.\"\"\"
        return self.rng.randint(1, sides)

    @staticmethod
    def problems(split):
        return [problem("Roll a die with 1 side. What is shown?", "1")]

    verifier = ExactMatch()
"""

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from agentrl.errors import EnvironmentFault, Fault, PluginError, SandboxLost, ToolError
from agentrl.protocols import Sandbox, Script, Verifier
from agentrl.types import (
    Message,
    Messages,
    Problem,
    SandboxSpec,
    Step,
    Task,
    ToolCall,
    ToolEvent,
    user,
)

F = TypeVar("F", bound=Callable[..., Any])

MAX_ARTIFACT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMethod:
    """A tool as the model sees it, and how it is called."""

    name: str
    schema: Mapping[str, Any]
    method: str
    parameters: type[BaseModel]
    final: bool
    timeout_s: float
    max_output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    name: str | None
    final: bool
    timeout_s: float
    max_output_bytes: int


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *,
    name: str | None = None,
    final: bool = False,
    timeout_s: float = 30.0,
    max_output_bytes: int = 16_384,
) -> Callable[[F], F]: ...
def tool(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    final: bool = False,
    timeout_s: float = 30.0,
    max_output_bytes: int = 16_384,
) -> Any:
    """Mark a method as a tool: sync (run in a thread) or async, with hints and a docstring.

    A `final` tool ends the episode. Past `timeout_s` seconds the model is told so; output over
    `max_output_bytes` is cut with a note.
    """

    def mark(method: Any) -> Any:
        method.__agentrl_tool__ = _Mark(
            name=name, final=final, timeout_s=timeout_s, max_output_bytes=max_output_bytes
        )
        return method

    return mark(function) if function is not None else mark


class ToolEnvironment:
    """One episode of an environment whose actions are tool calls; subclass it.

    An action without calls is the final answer. `self.sandbox`, `self.task` and `self.rng` (its own
    stream) are there from `reset` on. Raises PluginError when a subclass's tool lacks hints or
    documentation.
    """

    tool_methods: ClassVar[Mapping[str, ToolMethod]] = MappingProxyType({})
    scripts: ClassVar[Mapping[str, Script]] = MappingProxyType({})
    verifier: ClassVar[Verifier]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        found = {
            described.name: described
            for attribute, value in inspect.getmembers(cls, inspect.isfunction)
            if (mark := getattr(value, "__agentrl_tool__", None)) is not None
            for described in [_describe(cls.__name__, attribute, value, mark)]
        }
        cls.tool_methods = MappingProxyType(found)
        cls.scripts = MappingProxyType({"null": says_nothing, **cls.scripts})

    def __init__(self, *, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self.task = Task(id="none", prompt=())
        self.rng = Random(0)
        self._turn = 0
        self._ended = False
        self._began = time.monotonic()

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox. Raises EnvironmentFault if the task asked for none."""
        if self._sandbox is None:
            raise EnvironmentFault(
                f"task {self.task.id} has no sandbox: give its Task a SandboxSpec"
            )
        return self._sandbox

    @property
    def tools(self) -> Sequence[ToolMethod]:
        """The tools, by name."""
        return tuple(self.tool_methods.values())

    async def reset(self, task: Task, *, seed: int) -> tuple[Messages, Mapping[str, Any]]:
        """Start the episode: the task's own prompt."""
        self.task, self.rng = task, Random(seed)
        self._turn, self._ended, self._began = 0, False, time.monotonic()
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """Run the calls of an action in order, or end with its answer."""
        if self._ended:
            raise EnvironmentFault("step after the end of the episode: reset first")
        replies: list[Message] = []
        events: list[ToolEvent] = []
        final = not action.tool_calls
        for call in action.tool_calls:
            text, event, ends = await self._answer(call)
            replies.append(Message(role="tool", content=text, tool_call_id=call.id))
            events.append(event)
            final = final or ends
        self._turn += 1
        self._ended = final
        return Step(observation=tuple(replies), terminated=final, events=tuple(events))

    async def artifacts(self) -> Mapping[str, bytes]:
        """The task's artifact files that exist, at most 1 MiB each."""
        found: dict[str, bytes] = {}
        for path in self.task.artifacts:
            try:
                found[path] = await self.sandbox.read_file(path, max_bytes=MAX_ARTIFACT_BYTES)
            except ToolError:
                continue
        return found

    async def _answer(self, call: ToolCall) -> tuple[str, ToolEvent, bool]:
        began = time.monotonic()
        method = self.tool_methods.get(call.name)
        status: Literal["ok", "error", "malformed", "unknown", "timeout"]
        if call.error is not None:
            status, text = "malformed", f"error: {call.error}"
        elif method is None:
            known = ", ".join(self.tool_methods) or "none"
            status, text = "unknown", f"error: there is no tool {call.name!r}; tools: {known}"
        else:
            status, text = await self._run(method, call)
        limit = method.max_output_bytes if method else 16_384
        shown, size = cut_bytes(text, limit)
        event = ToolEvent(
            turn=self._turn,
            call_id=call.id,
            name=call.name,
            status=status,
            at_s=began - self._began,
            seconds=time.monotonic() - began,
            output_bytes=size,
            cut=size > limit,
        )
        return shown, event, method is not None and method.final and status == "ok"

    async def _run(
        self, method: ToolMethod, call: ToolCall
    ) -> tuple[Literal["ok", "error", "malformed", "timeout"], str]:
        try:
            arguments = _arguments(method, call.arguments)
        except ToolError as error:
            return "malformed", f"error: {error}"
        try:
            async with asyncio.timeout(method.timeout_s):
                result = await _call(getattr(self, method.method), arguments)
        except ToolError as error:
            return "error", f"error: {error}"
        except TimeoutError:
            return "timeout", f"error: {method.name} ran out of its {method.timeout_s:g} s"
        except (Fault, SandboxLost):
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            raise EnvironmentFault(
                f"tool {method.name}: {type(error).__name__}: {reason}"
            ) from error
        return "ok", as_text(result)


def problem(
    prompt: str | Sequence[Message],
    reference: Any = None,
    *,
    id: str | None = None,
    sandbox: SandboxSpec | None = None,
    artifacts: Sequence[str] = (),
    setup: Mapping[str, Any] = MappingProxyType({}),
) -> Problem:
    """A problem: what is asked, and the reference that only the verifier sees.

    Without an id, it follows from prompt, reference and setup, so that rows with one text and two
    references are two tasks.
    """
    messages = (user(prompt),) if isinstance(prompt, str) else tuple(prompt)
    named = id or sha256(repr((messages, reference, dict(setup))).encode()).hexdigest()[:16]
    task = Task(id=named, prompt=messages, sandbox=sandbox, artifacts=tuple(artifacts), setup=setup)
    return Problem(task=task, reference=reference)


def call(name: str, **arguments: Any) -> Message:
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


async def run_python(sandbox: Sandbox, code: str, *, timeout_s: float) -> str:
    """Run code in a fresh Python of the sandbox; what it printed, as a model should read it."""
    argv = ["python3", "-I", "-S", "-c", code]
    done = await sandbox.exec(argv, timeout_s=timeout_s)
    parts = [done.stdout.decode(errors="replace").rstrip("\n")]
    if done.exit_code != 0:
        parts.append(done.stderr.decode(errors="replace").strip()[-2000:])
    if done.timed_out:
        parts.append(f"timed out after {timeout_s:g} s")
    elif done.out_of_memory:
        parts.append("out of memory")
    if done.cut:
        parts.append(f"[output cut: {done.stdout_bytes + done.stderr_bytes} bytes in all]")
    return "\n".join(part for part in parts if part)


def as_text(result: Any) -> str:
    """A tool's result as the model reads it: text as it is, None as nothing, the rest as JSON."""
    if isinstance(result, str):
        return result
    if isinstance(result, bytes):
        return result.decode(errors="replace")
    if result is None:
        return ""
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def cut_bytes(text: str, limit: int) -> tuple[str, int]:
    """The text cut to `limit` bytes with a note, and its size in bytes before."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode(), len(data)
    kept = data[:limit].decode(errors="ignore")
    return f"{kept}\n[output cut: first {limit} of {len(data)} bytes shown]", len(data)


async def _call(method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(**arguments)
    return await asyncio.to_thread(method, **arguments)


def _arguments(method: ToolMethod, raw: str) -> dict[str, Any]:
    """The call's arguments in the types of the method. Raises ToolError naming the field."""
    try:
        values: Any = json.loads(raw)
    except ValueError as error:
        raise ToolError(f"the arguments of {method.name} are not JSON ({error})") from None
    fields = method.parameters.model_fields
    if isinstance(values, str) and len(fields) == 1:
        values = {next(iter(fields)): values}
    if not isinstance(values, dict):
        raise ToolError(f"the arguments of {method.name} must be an object")
    try:
        checked = method.parameters.model_validate(_decoded(values, fields))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ToolError(f"{method.name}: {'; '.join(lines)}") from None
    return {name: getattr(checked, name) for name in fields}


def _decoded(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Lists and objects that came as JSON text are decoded; text parameters stay text."""

    def one(name: str, value: Any) -> Any:
        wants_text = name not in fields or fields[name].annotation in (str, Any)
        if not isinstance(value, str) or wants_text:
            return value
        try:
            return json.loads(value)
        except ValueError:
            return value

    return {name: one(name, value) for name, value in values.items()}


def _describe(owner: str, attribute: str, method: Callable[..., Any], mark: _Mark) -> ToolMethod:
    where = f"{owner}.{attribute}"
    doc = inspect.getdoc(method)
    if not doc:
        raise PluginError(f"tool {where} has no docstring: say what it does, the model reads it")
    try:
        hints = inspect.get_annotations(method, eval_str=True)
    except NameError as error:
        raise PluginError(f"tool {where}: {error} in its type hints") from None
    parameters = list(inspect.signature(method).parameters.values())[1:]
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name not in hints:
            raise PluginError(f"tool {where}: parameter {parameter.name} has no type hint")
        given = parameter.default is not inspect.Parameter.empty
        fields[parameter.name] = (hints[parameter.name], parameter.default if given else ...)
    model = create_model(attribute, __config__=ConfigDict(extra="forbid"), **fields)
    schema = model.model_json_schema()
    name = mark.name or attribute
    function = {
        "name": name,
        "description": doc,
        "parameters": {
            "type": "object",
            "properties": schema.get("properties", {}),
            "required": schema.get("required", []),
            **({"$defs": schema["$defs"]} if "$defs" in schema else {}),
        },
    }
    return ToolMethod(
        name=name,
        schema={"type": "function", "function": function},
        method=attribute,
        parameters=model,
        final=mark.final,
        timeout_s=mark.timeout_s,
        max_output_bytes=mark.max_output_bytes,
    )
