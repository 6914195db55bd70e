"""The base class of environments whose actions are tool calls."""

import inspect
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

from agentrl.errors import EnvironmentFault, PluginError, SandboxLost, ToolError
from agentrl.guard import blaming, until
from agentrl.protocols import Sandbox, Script, Verifier
from agentrl.tools.foreign import ForeignTool, HeldSession, ToolServer, object_of
from agentrl.tools.problems import says_nothing
from agentrl.tools.schema import ToolMethod, arguments_of, tools_of
from agentrl.tools.text import as_text, cut_bytes, shortened
from agentrl.tools.thread import ToolThread
from agentrl.types import Message, Messages, Step, Task, ToolCall, ToolEvent

MAX_ARTIFACT_BYTES = 1 << 20
MAX_ERROR_BYTES = 4096
"""What the model is told about a call that reached no tool."""

_Bound: TypeAlias = Callable[[], Coroutine[Any, Any, Any]]
_Status: TypeAlias = Literal["ok", "error", "malformed", "unknown", "timeout"]


class ToolEnvironment:
    """One episode of an environment whose actions are tool calls; subclass it.

    An action without calls is the final answer. `self.task` and `self.rng` (a stream of its own)
    are there from `reset` on, `self.sandbox` if the task asks for one. Raises PluginError when a
    subclass's tool lacks hints or documentation.
    """

    tool_methods: ClassVar[Mapping[str, ToolMethod]] = MappingProxyType({})
    servers: ClassVar[Sequence[ToolServer]] = ()
    """Where further tools live: an `McpServer`, an `OpenApiServer`."""
    scripts: ClassVar[Mapping[str, Script]] = MappingProxyType({"null": says_nothing})
    verifier: ClassVar[Verifier]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.tool_methods = MappingProxyType(tools_of(cls))
        cls.scripts = MappingProxyType({"null": says_nothing, **cls.scripts})

    def __init__(self, *, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._thread: ToolThread | None = None
        self._sessions: dict[int, HeldSession] = {}
        self.task = Task(id="none", prompt=())
        self.rng = Random(0)
        self._turn = 0
        self._ended = False
        self._began = time.monotonic()

    def __del__(self) -> None:
        if getattr(self, "_thread", None) is not None:
            self._drop_thread()

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox. Raises EnvironmentFault if the task asked for none."""
        if self._sandbox is None:
            raise EnvironmentFault(
                f"task {self.task.id} has no sandbox: give its Task a SandboxSpec"
            )
        return self._sandbox

    @property
    def tools(self) -> Sequence[ToolMethod | ForeignTool]:
        """The tools: methods in the order they are written, then the servers'."""
        return tuple(self._known().values())

    async def reset(self, task: Task, *, seed: int) -> tuple[Messages, Mapping[str, Any]]:
        """Start the episode: the task's own prompt."""
        self.task, self.rng = task, Random(seed)
        self._turn, self._ended, self._began = 0, False, time.monotonic()
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """Run the calls of an action in order, or end with its answer.

        Calls behind a final tool that has ended the episode are not run. Raises EnvironmentFault
        when a tool raises something else than a ToolError, and after the end of the episode.
        """
        if self._ended:
            raise EnvironmentFault("step after the end of the episode: reset first")
        try:
            step = await self._answered(action)
        except BaseException:
            self._drop_thread()
            await self._close_sessions()
            raise
        self._turn += 1
        self._ended = step.terminated
        if self._ended:
            self._drop_thread()
            await self._close_sessions()
        return step

    async def artifacts(self) -> Mapping[str, bytes]:
        """The task's artifact files that exist, at most 1 MiB each. The episode is over then."""
        self._drop_thread()
        await self._close_sessions()
        found: dict[str, bytes] = {}
        for path in self.task.artifacts:
            try:
                found[path] = await self.sandbox.read_file(path, max_bytes=MAX_ARTIFACT_BYTES)
            except ToolError:
                continue
        return found

    async def _answered(self, action: Message) -> Step:
        replies: list[Message] = []
        events: list[ToolEvent] = []
        final = not action.tool_calls
        for call in action.tool_calls:
            text, event, final = await self._answer(call)
            replies.append(Message(role="tool", content=text, tool_call_id=call.id))
            events.append(event)
            if final:
                break
        return Step(observation=tuple(replies), terminated=final, events=tuple(events))

    async def _answer(self, call: ToolCall) -> tuple[str, ToolEvent, bool]:
        """What the model reads, what happened, and whether the episode is over."""
        began = time.monotonic()
        method = self._known().get(call.name)
        status, text, limit = await self._outcome(call, method)
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

    async def _outcome(
        self, call: ToolCall, method: ToolMethod | ForeignTool | None
    ) -> tuple[_Status, str, int]:
        if call.error is not None:
            return "malformed", f"error: {call.error}", MAX_ERROR_BYTES
        if method is None:
            known = ", ".join(self._known()) or "none"
            name = shortened(call.name, 80)
            return "unknown", f"error: there is no tool {name!r}; tools: {known}", MAX_ERROR_BYTES
        try:
            bound = await self._bound(method, call.arguments)
        except ToolError as error:
            return "malformed", f"error: {error}", MAX_ERROR_BYTES
        status, text = await self._run(method, bound)
        return status, text, method.max_output_bytes

    async def _bound(self, tool: ToolMethod | ForeignTool, raw: str) -> _Bound:
        """The call, ready to be made. Raises ToolError for arguments that don't fit."""
        if isinstance(tool, ToolMethod):
            arguments, method = arguments_of(tool, raw), getattr(self, tool.method)
            return lambda: self._call(method, arguments)
        values = object_of(tool, raw)
        # Before the tool's own clock starts: opening is not the model's time.
        remote = await self._session(tool.server).opened()
        return lambda: remote(tool.remote_name, values)

    async def _run(self, method: ToolMethod | ForeignTool, bound: _Bound) -> tuple[_Status, str]:
        async def result() -> str:
            # Inside the limit: a TimeoutError of the tool's own is not the limit's.
            with blaming(EnvironmentFault, f"tool {method.name}", but=(ToolError, SandboxLost)):
                return as_text(await bound())

        try:
            return "ok", await until(time.monotonic() + method.timeout_s, result())
        except ToolError as error:
            return "error", f"error: {error}"
        except TimeoutError:
            self._drop_thread()
            return "timeout", f"error: {method.name} ran out of its {method.timeout_s:g} s"

    async def _call(self, bound: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(bound):
            return await bound(**arguments)
        if self._thread is None:
            self._thread = ToolThread()
        return await self._thread.run(lambda: bound(**arguments))

    def _known(self) -> Mapping[str, ToolMethod | ForeignTool]:
        """All tools by name. Raises PluginError when two have the same."""
        known: dict[str, ToolMethod | ForeignTool] = dict(self.tool_methods)
        for tool in (tool for server in self.servers for tool in server.tools()):
            if tool.name in known:
                raise PluginError(f"{type(self).__name__} has two tools named {tool.name!r}")
            known[tool.name] = tool
        return known

    def _session(self, server: ToolServer) -> HeldSession:
        return self._sessions.setdefault(id(server), HeldSession(server))

    async def _close_sessions(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    def _drop_thread(self) -> None:
        """Let the tool thread go: after the episode, or left behind in a call that doesn't end."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
