"""What every environment must keep, as checks that anybody can run on theirs.

    findings = await check_environment(find_environment("my_env.py"), sandboxes=BwrapProvider())
    assert not findings, findings

Scripted policies act, so no model is needed. The checks for leaks and cheats are samples: they
find what is systematically wrong, and prove nothing about what they did not try.
"""

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentrl.errors import AgentRLError, ToolError
from agentrl.grading import grade_group
from agentrl.plugins import problems_of
from agentrl.protocols import (
    Environment,
    EnvironmentClass,
    Isolation,
    Sandbox,
    SandboxProvider,
    Script,
    Split,
)
from agentrl.rollout import Limits, Stage, run_script
from agentrl.testing.fakes import CharRenderer, FixedEngine
from agentrl.tools import answer, says_nothing
from agentrl.types import Message, Messages, Problem, SandboxSpec, ToolCall, Verdict

LIMITS = Limits(
    max_turns=16,
    max_action_tokens=1 << 20,
    context_tokens=1 << 24,
    max_observation_tokens=1 << 20,
)
HONEST = frozenset({"oracle", "guess"})
"""Scripts that may earn a reward; every other script of an environment is a cheat."""
MAX_REPLY_BYTES = 1 << 17
COMPARED = 500
"""Problems of each split that are looked through for overlaps."""

BAD_ARGUMENTS = (
    "", "{", "null", "[]", "7", "true", '"x"', "{}", '{"": 1}', '{"no such parameter": 1}',
    "NaN", '{"a": 1e999}', "[" * 50_000, '"\\ud800"', '"\\u0000"', json.dumps({"x": "y" * 300_000}),
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = ("", "\0", "\ud800", "é😀", "x" * 200_000, None, -1, 1e300, [], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A broken rule (a name of `RULES`), and what was seen."""

    rule: str
    seen: str


async def check_environment(
    environment: EnvironmentClass,
    *,
    sandboxes: SandboxProvider | None = None,
    options: Mapping[str, Any] | None = None,
    sample: int = 4,
    open_book: bool = False,
) -> Sequence[Finding]:
    """The rules of `RULES` that the environment breaks; empty if it keeps them all.

    `sandboxes` is needed if its tasks ask for one; `options` are those of its `problems`; `sample`
    problems of each split are played. `open_book`: what the policy is given holds the answer by
    intent (reading, searching), so leaks are not looked for.
    """
    bench = _Bench(
        environment=environment,
        sandboxes=None if sandboxes is None else CountedSandboxes(sandboxes),
        options=options or {},
        size=sample,
    )
    findings: list[Finding] = []
    for rule, check in RULES.items():
        if rule == "leak" and open_book:
            continue
        try:
            seen = await check(bench)
        except (Exception, SystemExit) as error:
            kind = "" if isinstance(error, AgentRLError) else f"{type(error).__name__}: "
            seen = [f"{kind}{' '.join(str(error).split())}"]
        findings += [Finding(rule=rule, seen=line) for line in seen]
        if rule == "problems" and seen:
            break  # nothing to play with
    return tuple(findings)


class CountedSandboxes:
    """A SandboxProvider around another, that counts what is open."""

    def __init__(self, inner: SandboxProvider) -> None:
        self.isolation: Isolation = inner.isolation
        self.opened = 0
        self.open_now = 0
        self._inner = inner

    @asynccontextmanager
    async def session(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        """The inner provider's sandbox."""
        async with self._inner.session(spec) as sandbox:
            self.opened += 1
            self.open_now += 1
            try:
                yield sandbox
            finally:
                self.open_now -= 1

    def describe(self) -> Mapping[str, str]:
        """As the inner provider."""
        return self._inner.describe()

    async def prune(self, run_id: str) -> int:
        """As the inner provider does."""
        return await self._inner.prune(run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """An environment under test."""

    environment: EnvironmentClass
    sandboxes: CountedSandboxes | None
    options: Mapping[str, Any]
    size: int

    def problems(self, split: Split, limit: int) -> Sequence[Problem]:
        return problems_of(self.environment, split, self.options, limit)

    def sample(self) -> Sequence[Problem]:
        """Problems of both splits."""
        return (*self.problems("train", self.size), *self.problems("test", self.size))

    @asynccontextmanager
    async def live(self, problem: Problem) -> AsyncGenerator[tuple[Environment, Sandbox | None]]:
        """An episode's environment and its sandbox, to be driven by hand."""
        spec = problem.task.sandbox
        if spec is None:
            yield self.environment(sandbox=None), None
            return
        if self.sandboxes is None:
            raise ToolError("its tasks ask for a sandbox: give check_environment one")
        async with self.sandboxes.session(spec) as sandbox:
            yield self.environment(sandbox=sandbox), sandbox

    async def play(self, problem: Problem, script: Script) -> Verdict:
        """The verdict on a script's episode. Raises the episode's Fault."""
        stage = Stage(
            engine=FixedEngine(""),
            renderer=CharRenderer(),
            environment=self.environment,
            sandboxes=self.sandboxes,
            limits=LIMITS,
        )
        episode = await run_script(stage, problem, script)
        group = await grade_group(
            problem,
            [episode],
            self.environment.verifier,
            sandboxes=self.sandboxes,
            timeout_s=LIMITS.grade_timeout_s,
        )
        return group.verdicts[0]


_Check: TypeAlias = Callable[[_Bench], Awaitable[list[str]]]


async def _problems(bench: _Bench) -> list[str]:
    """Both splits have problems, always the same, and share none."""
    seen: list[str] = []
    asked: dict[Split, set[str]] = {}
    for split in ("train", "test"):
        first, again = (bench.problems(split, COMPARED) for _ in range(2))
        if [p.task.id for p in first] != [p.task.id for p in again]:
            seen.append(f"two calls give different {split} problems: seed their own generator")
        asked[split] = {repr((p.task.prompt, dict(p.task.setup))) for p in first}
    both = len(asked["train"] & asked["test"])
    return [*seen, f"{both} problems are in train and in test"] if both else seen


async def _tools(bench: _Bench) -> list[str]:
    """Every tool has a schema that a model can be shown."""
    seen: list[str] = []
    names: list[str] = []
    for tool in bench.environment(sandbox=None).tools:
        function = json.loads(json.dumps(dict(tool.schema)))["function"]
        names.append(tool.name)
        if function["name"] != tool.name or not re.fullmatch(r"[\w-]{1,64}", tool.name):
            seen.append(f"tool {tool.name!r}: bad name, or another one in its schema")
        if not function.get("description") or function["parameters"].get("type") != "object":
            seen.append(f"tool {tool.name}: its schema lacks a description or object parameters")
    return seen if len(set(names)) == len(names) else [*seen, "two tools have the same name"]


async def _reset(bench: _Bench) -> list[str]:
    """The same seed opens the same episode for every member, and touches nobody else's stream."""
    seen: list[str] = []
    problem = bench.sample()[0]
    state = random.getstate()

    async def opened(*seeds: int) -> Messages:
        async with bench.live(problem) as (environment, _):
            messages: Messages = ()
            for seed in seeds:
                opening, _ = await environment.reset(problem.task, seed=seed)
                messages = tuple(opening)
            return messages

    first, *members = await asyncio.gather(opened(5), opened(5), opened(5), opened(6, 5))
    if any(other != first for other in members):
        seen.append("reset with one seed opened different episodes")
    if not first or not any(m.content.strip() for m in first):
        seen.append("reset shows nothing: the policy has no task")
    if random.getstate() != state:
        seen.append("reset moved Python's global random stream: use self.rng")
    return seen


async def _calls(bench: _Bench) -> list[str]:
    """Whatever the model writes as a call is answered; nothing of it is a fault."""
    seen: list[str] = []
    problem = bench.sample()[0]
    async with bench.live(problem) as (environment, _):
        await environment.reset(problem.task, seed=0)
        names = [tool.name for tool in environment.tools]
        for name, arguments in _odd_calls(environment):
            call = ToolCall(id="call_7", name=name, arguments=arguments)
            label = f"{name[:40]}({arguments[:60]})"
            try:
                step = await environment.step(
                    Message(role="assistant", content="", tool_calls=(call,))
                )
            except (Exception, SystemExit) as error:
                seen.append(f"{label} raised {type(error).__name__}: {str(error)[:200]}")
                await environment.reset(problem.task, seed=0)
                continue
            reply = [m for m in step.observation if m.tool_call_id == "call_7"]
            size = sum(len(m.content.encode(errors="replace")) for m in step.observation)
            if len(reply) != 1 or size > MAX_REPLY_BYTES:
                seen.append(f"{label} got {len(reply)} replies of {size} bytes in all")
            elif name not in names and not all(known in reply[0].content for known in names):
                seen.append("the error for an unknown tool does not list the tools")
            if names and len(step.events) != 1:
                seen.append(f"{label} left {len(step.events)} events")
            if step.terminated or step.truncated:
                await environment.reset(problem.task, seed=0)
    return seen


def _odd_calls(environment: Environment) -> Generator[tuple[str, str], None, None]:
    yield from (("no_such_tool", "{}"), ("", "{}"), ("x" * 100_000, "{}"))
    for tool in environment.tools:
        yield from ((tool.name, arguments) for arguments in BAD_ARGUMENTS)
        for parameter in tool.schema["function"]["parameters"].get("properties", {}):
            yield from ((tool.name, json.dumps({parameter: value})) for value in ODD_VALUES)


async def _oracle(bench: _Bench) -> list[str]:
    """The problems can be solved: its script "oracle" passes on each."""
    oracle = bench.environment.scripts.get("oracle")
    if oracle is None:
        return ["there is no script named oracle, so nobody knows whether it can be solved"]
    verdicts = [(p, await bench.play(p, oracle)) for p in bench.sample()]
    return [
        f"task {p.task.id}: the oracle gets {v.invalid or v.reward}"
        for p, v in verdicts
        if not v.passed
    ]


async def _cheats(bench: _Bench) -> list[str]:
    """What solves nothing passes nowhere."""
    sample = bench.sample()
    scripts = {n: s for n, s in bench.environment.scripts.items() if n not in HONEST}
    builtin = {
        "an empty answer": says_nothing,
        "the prompt as answer": _says_prompt,
        "many answers in one": _shotgun([p.reference for p in sample]),
    }
    seen: list[str] = []
    for name, script in {**builtin, **scripts}.items():
        verdicts = [(p, await bench.play(p, script)) for p in sample]
        seen += [
            f"task {p.task.id}: {name} passes with {v.reward}" for p, v in verdicts if v.passed
        ]
    return seen


def _says_prompt(problem: Problem) -> Generator[Message, Messages, None]:
    yield answer(problem.task.prompt[-1].content if problem.task.prompt else "")


def _shotgun(references: Sequence[Any]) -> Script:
    """Says the answers of all these problems, its own last."""
    known = dict.fromkeys(str(r) for r in references if r is not None)

    def script(problem: Problem) -> Generator[Message, Messages, None]:
        own = str(problem.reference)
        others = [text for text in known if text != own]
        yield answer(" or ".join([*others, own]) if others else "")

    return script


async def _leak(bench: _Bench) -> list[str]:
    """The reference is nowhere in what the policy can see when it begins."""
    sample = [p for p in bench.sample() if p.reference is not None and str(p.reference).strip()]
    golds = {str(p.reference) for p in sample}
    if len(golds) < 2:
        return []
    texts = [await _open_texts(bench, problem) for problem in sample]
    seen: list[str] = []
    for place in texts[0]:
        own = [_holds(t[place], str(p.reference)) for t, p in zip(texts, sample, strict=True)]
        other = [
            _holds(t[place], gold)
            for t, p in zip(texts, sample, strict=True)
            for gold in golds - {str(p.reference)}
        ]
        # Choices stand in every prompt; only one's own answer, time after time, is a leak.
        if all(own) and sum(other) < len(other) / 2:
            seen.append(f"the reference stands in the {place} of all {len(sample)} problems tried")
    return seen


async def _open_texts(bench: _Bench, problem: Problem) -> dict[str, str]:
    """What there is to read at the beginning, by place."""
    task = problem.task
    spec = task.sandbox or SandboxSpec()
    files = "\n".join(
        f"{path}\n{data.decode(errors='replace')}" for path, data in spec.files.items()
    )
    async with bench.live(problem) as (environment, sandbox):
        messages, _ = await environment.reset(task, seed=0)
        if sandbox is not None:
            command = ["grep", "-rhwF", "-m1", "--", str(problem.reference), "."]
            files += (await sandbox.exec(command, timeout_s=10)).stdout.decode(errors="replace")
    return {
        "opening messages": "\n".join(m.content for m in messages),
        "setup": repr(dict(task.setup)),
        "sandbox files": files,
    }


def _holds(text: str, gold: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", text) is not None


async def _end(bench: _Bench) -> list[str]:
    """An episode that is over takes no further step."""
    problem = bench.sample()[0]
    async with bench.live(problem) as (environment, _):
        await environment.reset(problem.task, seed=0)
        step = await environment.step(answer(""))
        if not (step.terminated or step.truncated):
            return []
        if step.terminated and step.truncated:
            return ["a step was terminated and truncated at once"]
        try:
            await environment.step(answer(""))
        except AgentRLError:
            return []
    return ["a step after the end of the episode raised nothing"]


async def _cleanup(bench: _Bench) -> list[str]:
    """What an episode opens is closed with it."""
    problem = bench.sample()[0]
    before = _threads()
    for script in (bench.environment.scripts.get("oracle", says_nothing), says_nothing):
        for _ in range(3):
            await bench.play(problem, script)
    left = _threads() - before
    deadline = time.monotonic() + 1
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = sum(thread.is_alive() for thread in left)
    seen = [f"{alive} threads are left of six episodes"] if alive else []
    if bench.sandboxes is not None and bench.sandboxes.open_now:
        seen.append(f"{bench.sandboxes.open_now} sandboxes are still open")
    return seen


def _threads() -> set[threading.Thread]:
    """All but the event loop's own pool, which is kept."""
    return {t for t in threading.enumerate() if not t.name.startswith("asyncio_")}


RULES: Mapping[str, _Check] = {
    "problems": _problems,
    "tools": _tools,
    "reset": _reset,
    "calls": _calls,
    "oracle": _oracle,
    "cheats": _cheats,
    "leak": _leak,
    "end": _end,
    "cleanup": _cleanup,
}
"""The checks by name, in the order they run."""
