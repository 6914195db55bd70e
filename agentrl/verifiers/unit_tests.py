"""Hidden unit tests: a candidate's functions are called in a fresh sandbox, and judged outside.

The sandbox is told what to call and says what came of it; what should have come never enters it.
So there is no verdict inside that could be forged: exit codes, printed markers, reward files and
objects that equal everything count for nothing.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from agentrl.errors import Fault, SandboxLost, ToolError, VerifierFault
from agentrl.guard import blaming
from agentrl.protocols import Sandbox, SandboxProvider
from agentrl.types import Episode, ExecResult, Problem, SandboxSpec, Verdict
from agentrl.verifiers.base import invalid
from agentrl.verifiers.unit_driver import decode, encode

MAX_CANDIDATE_BYTES = 1 << 20
_DRIVER = Path(__file__).with_name("unit_driver.py").read_text(encoding="utf-8")
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)

_Files: TypeAlias = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One required test: `call` ("module:function") of `arguments` gives `expected`.

    Values are made of None, bool, int, float, str, list, tuple, set and dict. A list is no tuple
    and True is no 1, but 2 is 2.0. Numbers may differ by `tolerance` (absolute).
    """

    call: str
    arguments: tuple[Any, ...]
    expected: Any
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The reference of a problem that `UnitTests` grades: all `cases` must pass.

    The candidate is the answer's code, written as file `answer_as`; without that it is the
    episode's artifacts, written over the files of the problem's `grading` sandbox. `solution`
    holds files that pass, for scripts. Raises ValueError without a case: all of nothing is true.
    """

    cases: tuple[Case, ...]
    answer_as: str | None = None
    solution: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("a suite needs at least one case")
        for case in self.cases:
            encode((case.arguments, case.expected))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTests:
    """1 if all cases of the reference (a `Suite`) pass in a fresh sandbox, else 0.

    `components["tests"]` is the share that passes. A candidate has `timeout_s` seconds for all
    cases together, and its crash, its time and its memory are its failure; only a sandbox that
    fails by itself is an invalid verdict, of that candidate alone. `concurrency` sandboxes are
    open at once, and members with the same candidate share a run, so a group takes at most
    `timeout_s * members / concurrency` and a little: keep that below `rollout.grade_timeout_s`.
    """

    timeout_s: float = 5.0
    concurrency: int = 4

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.concurrency < 1:
            raise ValueError("timeout_s must be above 0 and concurrency at least 1")

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; all invalid for a reference that is no `Suite`."""
        suite, spec = problem.reference, problem.grading
        if not isinstance(suite, Suite) or spec is None or sandboxes is None:
            return invalid(episodes, "UnitTests needs a Suite as reference, and grading=")
        gate = asyncio.Semaphore(self.concurrency)

        async def judge(files: _Files) -> Verdict:
            async with gate:
                return await self._judged(suite, files, sandboxes, spec)

        candidates = [_files(suite, episode) for episode in episodes]
        distinct = list(dict.fromkeys(candidates))
        verdicts = await asyncio.gather(*map(judge, distinct))
        by_candidate = dict(zip(distinct, verdicts, strict=True))
        return [by_candidate[files] for files in candidates]

    async def _judged(
        self, suite: Suite, files: _Files, sandboxes: SandboxProvider, spec: SandboxSpec
    ) -> Verdict:
        if sum(len(data) for _, data in files) > MAX_CANDIDATE_BYTES:
            return _verdict(0, len(suite.cases), "the candidate is too large")
        try:
            with blaming(VerifierFault, "unit tests", but=(SandboxLost,)):
                async with sandboxes.session(spec) as sandbox:
                    return await self._run(suite, files, sandbox)
        except SandboxLost as lost:
            return _verdict(0, len(suite.cases), f"the candidate ended its sandbox: {lost}")
        except Fault as fault:
            return Verdict(invalid=f"{type(fault).__name__}: {fault}")

    async def _run(self, suite: Suite, files: _Files, sandbox: Sandbox) -> Verdict:
        try:
            for path, data in files:
                await sandbox.write_file(path, data)
        except ToolError as error:
            return _verdict(0, len(suite.cases), f"a file can't be written: {error}")
        # Drawn for this run, so that nothing said in another can be said again.
        nonce = secrets.token_hex(16)
        calls = [
            {"id": number, "call": case.call, "arguments": encode(case.arguments)}
            for number, case in enumerate(suite.cases)
        ]
        done = await sandbox.exec(
            ["python3", "-I", "-S", "-c", _DRIVER],
            stdin=json.dumps({"nonce": nonce, "cases": calls}).encode(),
            timeout_s=self.timeout_s,
        )
        said = _said(done, nonce)
        results = [_judge(case, said.get(str(n))) for n, case in enumerate(suite.cases)]
        passed = results.count("")
        return _verdict(passed, len(results), _note(results, done))


def code_of(text: str) -> str:
    """The last fenced block of an answer, else the whole answer."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks else text


def _files(suite: Suite, episode: Episode) -> _Files:
    if suite.answer_as is None:
        return tuple(sorted(episode.artifacts.items()))
    code = code_of(episode.trajectory.answer)
    return ((suite.answer_as, code.encode(errors="replace")),)


def _verdict(passed: int, cases: int, note: str) -> Verdict:
    whole = passed == cases
    return Verdict(
        reward=float(whole), passed=whole, components={"tests": passed / cases}, note=note
    )


def _said(done: ExecResult, nonce: str) -> Mapping[str, str]:
    """What was said of each case. A case of which two things were said has none."""
    said: dict[str, str] = {}
    for line in done.stdout.decode("ascii", errors="replace").splitlines():
        mark, _, rest = line.partition(" ")
        if mark == nonce:
            case, _, outcome = rest.partition(" ")
            said[case] = "" if case in said else outcome
    return said


def _judge(case: Case, outcome: str | None) -> str:
    """What is wrong with an outcome; "" for a pass."""
    if outcome is None:
        return "no value"
    try:
        said = json.loads(outcome)
        if "value" not in said:
            return str(said["error"])[:80]
        right = _same(decode(said["value"]), case.expected, case.tolerance)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "no value that can be read"
    return "" if right else "wrong value"


def _same(given: Any, wanted: Any, tolerance: float) -> bool:
    """Whether two values of plain types are the same; nothing is the same as NaN."""
    if type(given) in (int, float) and type(wanted) in (int, float):
        return given == wanted or (
            tolerance > 0 and isclose(given, wanted, rel_tol=0, abs_tol=tolerance)
        )
    if type(given) is not type(wanted):
        return False
    if isinstance(given, list | tuple):
        pairs = zip(given, wanted, strict=False)
        return len(given) == len(wanted) and all(_same(g, w, tolerance) for g, w in pairs)
    if isinstance(given, dict):
        return given.keys() == wanted.keys() and all(
            _same(value, wanted[key], tolerance) for key, value in given.items()
        )
    return bool(given == wanted)


def _note(results: Sequence[str], done: ExecResult) -> str:
    """For people: the first failure, and how the run ended if that was the reason."""
    wrong = [(number, why) for number, why in enumerate(results) if why]
    if not wrong:
        return ""
    number, why = wrong[0]
    ended = "timeout" if done.timed_out else "out of memory" if done.out_of_memory else ""
    if not ended and done.exit_code:
        ended = f"exit code {done.exit_code}"
    return f"{len(wrong)} of {len(results)} tests fail, first number {number}: {ended or why}"
