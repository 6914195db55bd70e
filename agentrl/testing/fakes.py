"""Stand-ins for every seam of an episode: small, deterministic, and open to look into.

They need no model, no template and no sandbox, so a test says in full what happens.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import ToolError
from agentrl.protocols import Isolation, Sandbox, SandboxProvider, Script, Split, Tool, Verifier
from agentrl.snapshot import Entry, pack, unpack
from agentrl.types import (
    ActionTokens,
    Episode,
    ExecResult,
    Message,
    Messages,
    Problem,
    Role,
    Sampling,
    SandboxSpec,
    Step,
    Task,
    ToolCall,
    Verdict,
    user,
)

STOP = 0
_ROLES: Mapping[Role, int] = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
_FIRST_CHARACTER = 8


class CharRenderer:
    """A toy chat format with one id for each character; both a Renderer and a Writer.

    A message is a role mark, its characters, `STOP` and a newline (which nobody samples). A call
    is a line `@name arguments` after the content; the calls of a message are numbered from 0.
    """

    stop_ids = frozenset({STOP})

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """Names of the tools, then the messages, then the mark after which the policy writes."""
        names = " ".join(tool.name for tool in tools)
        head = [_Line("system", f"tools: {names}")] if names else []
        lines = [*head, *(_Line(m.role, _body(m)) for m in messages)]
        return (*(i for line in lines for i in line.ids()), _ROLES["assistant"])

    def parse(self, token_ids: Sequence[int]) -> Message:
        """Lines that begin with @ are calls, the rest is content; a call without JSON is bad."""
        content: list[str] = []
        calls: list[ToolCall] = []
        for line in self.text(token_ids).split("\n"):
            if line.startswith("@"):
                calls.append(_call(len(calls), line[1:]))
            else:
                content.append(line)
        return Message(role="assistant", content="\n".join(content), tool_calls=tuple(calls))

    def extend(self, reply: Sequence[Message], last_id: int | None) -> tuple[int, ...]:
        """Closes the action (`STOP` only if it was not sampled), then the reply."""
        closing = () if last_id == STOP else (STOP,)
        lines = [_Line(m.role, _body(m)) for m in reply]
        ids = (i for line in lines for i in line.ids())
        return (*closing, *_encode("\n"), *ids, _ROLES["assistant"])

    def write(self, message: Message) -> tuple[int, ...]:
        """The characters of a message and `STOP`."""
        return (*_encode(_body(message)), STOP)

    def text(self, token_ids: Sequence[int]) -> str:
        """The characters among the ids."""
        return "".join(chr(i - _FIRST_CHARACTER) for i in token_ids if i >= _FIRST_CHARACTER)


@dataclass(frozen=True, slots=True)
class _Line:
    role: Role
    body: str

    def ids(self) -> tuple[int, ...]:
        return (_ROLES[self.role], *_encode(self.body), STOP, *_encode("\n"))


def _encode(text: str) -> tuple[int, ...]:
    return tuple(ord(character) + _FIRST_CHARACTER for character in text)


def _body(message: Message) -> str:
    calls = [f"@{call.name} {call.arguments}" for call in message.tool_calls]
    return "\n".join([message.content, *calls])


def _call(index: int, text: str) -> ToolCall:
    name, _, arguments = text.partition(" ")
    try:
        json.loads(arguments)
    except ValueError as error:
        reason = f"arguments are not JSON: {error}"
        return ToolCall(id=f"call_{index}", name=name, arguments=arguments, error=reason)
    return ToolCall(id=f"call_{index}", name=name, arguments=arguments)


def call(name: str, *, id: str = "call_0", **arguments: Any) -> ToolCall:
    """A well-formed call, as `CharRenderer` parses it."""
    return ToolCall(id=id, name=name, arguments=json.dumps(arguments))


@dataclass(slots=True)
class ScriptedEngine:
    """An InferenceEngine that plays `choose(prompt_ids, sampling)`; every token has logprob -0.5.

    What it gives is cut at `max_tokens`, then with finish "length". Each request waits `delay_s`
    first. `requests` keeps the prompts and samplings of every session, in order.
    """

    choose: Callable[[Sequence[int], Sampling], Sequence[int]]
    version: int = 0
    delay_s: float = 0.0
    requests: dict[str, list[tuple[tuple[int, ...], Sampling]]] = field(
        default_factory=dict[str, list[tuple[tuple[int, ...], Sampling]]]
    )

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> ActionTokens:
        """What was chosen for this prompt."""
        self.requests.setdefault(session, []).append((tuple(prompt_ids), sampling))
        await asyncio.sleep(self.delay_s)
        chosen = tuple(self.choose(prompt_ids, sampling))
        ids = chosen[: sampling.max_tokens]
        return ActionTokens(
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            versions=(self.version,) * len(ids),
            finish="stop" if ids == chosen else "length",
        )

    @asynccontextmanager
    async def released(self) -> AsyncGenerator[None]:
        """Nothing to give up."""
        yield


class FixedEngine(ScriptedEngine):
    """An engine that says the same texts in every session, one a turn; then the last for ever.

    Texts are in the form of `CharRenderer`.
    """

    def __init__(self, *texts: str, version: int = 0, delay_s: float = 0.0) -> None:
        turns = [(*_encode(text), STOP) for text in texts]

        def choose(prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
            said = _actions_in(prompt_ids)
            return turns[min(said, len(turns) - 1)]

        super().__init__(choose=choose, version=version, delay_s=delay_s)


def _actions_in(prompt_ids: Sequence[int]) -> int:
    """How many assistant messages lie before the one that is to be written."""
    return sum(i == _ROLES["assistant"] for i in prompt_ids) - 1


@dataclass(slots=True)
class FakeSandbox:
    """Files in memory; `run` answers commands (by default with an empty success). Runs nothing."""

    log: list[str] = field(default_factory=list[str])
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    run: Callable[[Sequence[str]], ExecResult] | None = None
    max_output_bytes: int = 65_536

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        user: str | None = None,
    ) -> ExecResult:
        """What `run` says."""
        self.log.append(f"exec {' '.join(argv)}")
        if self.run is not None:
            return self.run(argv)
        return ExecResult(
            stdout=b"", stderr=b"", exit_code=0, seconds=0.0, stdout_bytes=0, stderr_bytes=0
        )

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """A file that was written, or of the spec."""
        self.log.append(f"read {path}")
        if path not in self.files:
            raise ToolError(f"{path}: no such file")
        if len(self.files[path]) > max_bytes:
            raise ToolError(f"{path}: larger than {max_bytes} bytes")
        return self.files[path]

    async def write_file(self, path: str, data: bytes) -> None:
        """Keep it."""
        self.log.append(f"write {path}")
        self.files[path] = data

    async def snapshot(self, *, max_bytes: int) -> bytes:
        """The files, packed."""
        self.log.append("snapshot")
        packed = pack(Entry(path=path, data=data) for path, data in self.files.items())
        if sum(map(len, self.files.values())) > max_bytes:
            raise ToolError(f"the workspace is larger than {max_bytes} bytes")
        return packed


@dataclass(slots=True)
class FakeSandboxes:
    """A SandboxProvider that opens `FakeSandbox`es and writes down what happens, in order.

    `open_now` counts sandboxes that are not closed. Opening waits `delay_s`.
    """

    log: list[str] = field(default_factory=list[str])
    run: Callable[[Sequence[str]], ExecResult] | None = None
    delay_s: float = 0.0
    open_now: int = 0
    isolation: Isolation = "none"

    @asynccontextmanager
    async def session(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        """A fresh sandbox with the spec's files."""
        await asyncio.sleep(self.delay_s)
        self.log.append("open")
        self.open_now += 1
        try:
            kept = {e.path: e.data for e in unpack(spec.snapshot) if e.data is not None}
            yield FakeSandbox(log=self.log, files={**kept, **spec.files}, run=self.run)
        finally:
            await asyncio.sleep(0)
            self.open_now -= 1
            self.log.append("close")

    def describe(self) -> Mapping[str, str]:
        """That it is none."""
        return {"backend": "fake"}

    async def prune(self, run_id: str) -> int:
        """Nothing outlives its session."""
        return 0


Answer = Callable[[Message, int], Step]
"""What an environment says to an action at a turn (from 0)."""


def ends_at_once(action: Message, turn: int) -> Step:
    """An environment with a single turn."""
    return Step(terminated=True)


def echo(action: Message, turn: int) -> Step:
    """Ends at an action without calls; answers every call with its arguments."""
    if not action.tool_calls:
        return Step(terminated=True)
    replies = [
        Message(role="tool", content=c.arguments, tool_call_id=c.id) for c in action.tool_calls
    ]
    return Step(observation=tuple(replies))


@dataclass(slots=True)
class FakeTool:
    """A tool that only has a name."""

    name: str

    @property
    def schema(self) -> Mapping[str, Any]:
        """A function without parameters."""
        parameters = {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


@dataclass(slots=True)
class FakeVerifier:
    """Grades each episode by `rate`; a number above 0 is a pass. Waits `delay_s` first."""

    rate: Callable[[Problem, Episode], Verdict | float] = lambda problem, episode: 1.0
    delay_s: float = 0.0
    log: list[str] = field(default_factory=list[str])

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode."""
        self.log.append("grade")
        await asyncio.sleep(self.delay_s)
        return [_verdict(self.rate(problem, episode)) for episode in episodes]


def right_answer(problem: Problem, episode: Episode) -> float:
    """1 if the answer is the reference, else 0."""
    return float(episode.trajectory.answer == str(problem.reference))


def _verdict(rated: Verdict | float) -> Verdict:
    return rated if isinstance(rated, Verdict) else Verdict(reward=rated, passed=rated > 0)


@dataclass(slots=True)
class FakeEnvironment:
    """An EnvironmentClass whose episodes answer by `answer` and leave `kept` as artifacts.

    `resets` keeps the seed of every reset; `log` what happens, in order. With `sets_up` a reset
    runs a command in the sandbox, which opens it.
    """

    answer: Answer = ends_at_once
    verifier: Verifier = field(default_factory=FakeVerifier)
    all_problems: Sequence[Problem] = ()
    scripts: Mapping[str, Script] = field(default_factory=dict[str, Script])
    tools: Sequence[Tool] = ()
    kept: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    delay_s: float = 0.0
    sets_up: bool = False
    log: list[str] = field(default_factory=list[str])
    resets: list[int] = field(default_factory=list[int])

    def __call__(self, *, sandbox: Sandbox | None) -> "FakeEpisode":
        """One episode."""
        return FakeEpisode(self, sandbox)

    def problems(self, split: Split) -> Sequence[Problem]:
        """All of them for training, none held out."""
        return self.all_problems if split == "train" else ()


class FakeEpisode:
    """One episode of a `FakeEnvironment`."""

    def __init__(self, made_by: FakeEnvironment, sandbox: Sandbox | None) -> None:
        self._made_by, self._sandbox = made_by, sandbox
        self._turn = 0

    @property
    def tools(self) -> Sequence[Tool]:
        """As given."""
        return self._made_by.tools

    async def reset(self, task: Task, *, seed: int) -> tuple[Messages, Mapping[str, Any]]:
        """The task's prompt."""
        self._made_by.log.append("reset")
        self._made_by.resets.append(seed)
        if self._made_by.sets_up and self._sandbox is not None:
            await self._sandbox.exec(["set-up"], timeout_s=1)
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """What `answer` says, after `delay_s`."""
        self._made_by.log.append("step")
        await asyncio.sleep(self._made_by.delay_s)
        turn, self._turn = self._turn, self._turn + 1
        return self._made_by.answer(action, turn)

    async def artifacts(self) -> Mapping[str, bytes]:
        """As given."""
        self._made_by.log.append("artifacts")
        return self._made_by.kept


def says(*lines: Message) -> Script:
    """A script that says these lines whatever is replied."""

    def script(problem: Problem) -> Generator[Message, Messages, None]:
        yield from lines

    return script


def a_problem(
    prompt: str = "?",
    *,
    reference: Any = None,
    id: str = "task",
    sandbox: SandboxSpec | None = None,
) -> Problem:
    """A problem whose prompt is one user message."""
    return Problem(task=Task(id=id, prompt=(user(prompt),), sandbox=sandbox), reference=reference)
