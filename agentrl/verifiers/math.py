"""Mathematical equivalence, judged by math-verify in processes that can be killed.

Model-written expressions may hang a computer algebra system or eat all memory (9^9^9^9), and a
time limit inside a thread stops the waiting, not the work. So every comparison has its own
process, and what it may cost is bounded.
"""

import asyncio
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, LifoQueue

from agentrl.errors import PluginError, VerifierFault
from agentrl.protocols import SandboxProvider
from agentrl.types import Episode, Problem, Verdict
from agentrl.verifiers.base import candidate, each, invalid, outcome
from agentrl.verifiers.numbers import only_number

START_S = 60.0
"""How long a worker may take to import the algebra system, beyond the limit of a question."""
MAX_CHARACTERS = 4000

_WORKER = Path(__file__).with_name("math_worker.py")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "max", "min", "gcd", "lcm")
)


class MathPool:
    """Worker processes, started when needed and reused; at most as many as questions at once."""

    def __init__(self) -> None:
        self._idle: LifoQueue[subprocess.Popen[bytes]] = LifoQueue()

    def __del__(self) -> None:
        self.close()

    def ask(self, gold: str, answer: str | None, limit_s: float) -> str:
        """The worker's word on one comparison. Raises VerifierFault when there is none."""
        question = {"gold": gold, "answer": answer, "limit_s": limit_s}
        with self._worker() as worker:
            return _ask(worker, json.dumps(question).encode() + b"\n", limit_s + START_S)

    def close(self) -> None:
        """End the workers."""
        while True:
            try:
                _end(self._idle.get_nowait())
            except Empty:
                return

    @contextmanager
    def _worker(self) -> Generator["subprocess.Popen[bytes]"]:
        """A worker; it goes back to the others unless something went wrong."""
        try:
            worker = self._idle.get_nowait()
        except Empty:
            worker = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            )
        try:
            yield worker
        except BaseException:
            _end(worker)
            raise
        self._idle.put(worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathMatch:
    """1 if the answer's expression equals the reference's, else 0.

    The expression is that of the last `\\boxed{…}`; without a box it is the whole answer, which
    must be an expression and nothing else (`require_box`: there must be one). Numbers are compared
    exactly: 50/3 is not 16.7. What can't be compared within `limit_s` seconds is not equal.
    `concurrency` bounds the comparisons of a group that run at once.

    Raises PluginError without math-verify.
    """

    require_box: bool = False
    limit_s: float = 3.0
    concurrency: int = 2
    _pool: MathPool = field(default_factory=MathPool, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if find_spec("math_verify") is None:
            raise PluginError("MathMatch needs math-verify: pip install math-verify")
        if self.limit_s <= 0 or self.concurrency < 1:
            raise ValueError("limit_s must be above 0 and concurrency at least 1")

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; invalid when the reference can't be read as an expression."""
        gold = _bare(str(problem.reference))
        if not await self._readable(gold):
            return invalid(episodes, "the reference is no expression that can be read")
        answers = {id(e): self._expression(e) for e in episodes}
        gate = asyncio.Semaphore(self.concurrency)

        async def compare(expression: str) -> str:
            async with gate:
                return await self._compare(gold, expression)

        distinct = [a for a in dict.fromkeys(answers.values()) if a is not None]
        words = await asyncio.gather(*map(compare, distinct), return_exceptions=True)
        results = dict(zip(distinct, words, strict=True))
        return each(episodes, lambda e: _verdict(results.get(answers[id(e)] or "", "different")))

    async def _readable(self, gold: str) -> bool:
        if not gold or _has_words(gold) or not _balanced(gold) or len(gold) > MAX_CHARACTERS:
            return False
        if only_number(gold) is not None:
            return True
        return await asyncio.to_thread(self._pool.ask, gold, None, self.limit_s) == "equal"

    def _expression(self, episode: Episode) -> str | None:
        """The answer's expression; None if there is nothing that could be one."""
        text = candidate(episode, require_box=self.require_box)
        bare = _bare(text or "")
        return bare if bare and len(bare) <= MAX_CHARACTERS and _balanced(bare) else None

    async def _compare(self, gold: str, expression: str) -> str:
        if expression == gold:
            return "equal"
        wanted, given = only_number(gold), only_number(expression)
        if wanted is not None and given is not None:
            return "equal" if given.equals(wanted, Decimal(0)) else "different"
        return await asyncio.to_thread(self._pool.ask, gold, expression, self.limit_s)


def _verdict(result: str | BaseException) -> Verdict:
    if isinstance(result, BaseException):
        raise result
    note = {"too_slow": "not comparable within the limit", "failed": "not comparable"}
    return outcome(result == "equal", note.get(result, ""))


def _bare(text: str) -> str:
    """Without the marks of inline mathematics around it."""
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening):
            return text[len(opening) : -len(closing)].strip()
    return text


def _has_words(text: str) -> bool:
    """Whether there is prose in it: letters in a row that are neither command nor function."""
    return any(
        len(word) > 2 and word.casefold() not in _FUNCTIONS
        for word in re.findall(r"[^\W\d_]+", _COMMAND.sub(" ", text))
    )


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _ask(worker: "subprocess.Popen[bytes]", question: bytes, timeout_s: float) -> str:
    assert worker.stdin is not None and worker.stdout is not None, "started with pipes"
    deadline, said = time.monotonic() + timeout_s, b""
    try:
        worker.stdin.write(question)
        worker.stdin.flush()
        handle = worker.stdout.fileno()
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(handle, 4096) if ready else b""
            if not piece:
                raise VerifierFault("the math worker ended or is late")
            said += piece
        return str(json.loads(said)["result"])
    except (OSError, ValueError, KeyError) as error:
        raise VerifierFault(f"the math worker failed: {error}") from error


def _end(worker: "subprocess.Popen[bytes]") -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            pipe.close()
