"""Word problems and number theory with one number as the answer, and a Python tool."""

import re
from collections.abc import Generator, Iterator, Sequence
from functools import cache
from hashlib import sha256
from random import Random, getstate, setstate
from typing import Any, Literal

from agentrl.errors import PluginError
from agentrl.protocols import Split
from agentrl.tools import ToolEnvironment, answer, call, problem, run_python, tool
from agentrl.types import Message, Messages, Problem, SandboxSpec, system, user
from agentrl.verifiers import NumericMatch
from agentrl.verifiers.numbers import whole_number

Family = Literal[
    "gsm_symbolic",
    "leg_counting",
    "chain_sum",
    "decimal_chain_sum",
    "products",
    "gcd",
    "lcm",
    "simple_equations",
    "count_primes",
]
"""Generators of reasoning-gym (Apache-2.0) whose answers are numbers."""

FAMILIES: tuple[Family, ...] = ("gsm_symbolic", "leg_counting", "products", "gcd", "lcm")
INSTRUCTIONS = (
    "Solve the problem. You can run Python with the tool. "
    "When you are sure, reply with the number alone, or with \\boxed{the number}."
)
SPEC = SandboxSpec(memory_mb=256)


class PythonMath(ToolEnvironment):
    """A question with a number as its answer; python may be called as often as turns allow."""

    verifier = NumericMatch(only_number=True)

    @tool(timeout_s=30)
    async def python(self, code: str) -> str:
        """Run Python code in a fresh interpreter and see what it prints."""
        return await run_python(self.sandbox, code, timeout_s=10)

    @staticmethod
    def problems(
        split: Split,
        *,
        families: Sequence[Family] = FAMILIES,
        count: int = 2000,
        seed: int = 0,
    ) -> Iterator[Problem]:
        """`count` problems at most, the families in turn; the same for the same options.

        A question is in the test split when its own hash says so (one in five), so the splits
        don't overlap, whatever the seeds. Questions without a single number as answer are left out.
        """
        if not families or count < 1:
            raise ValueError("families must name one at least, and count be at least 1")
        streams = [_questions(family, seed) for family in dict.fromkeys(families)]
        seen: set[str] = set()
        while streams and len(seen) < count:
            for stream in list(streams):
                found = next((q for q in stream if _is_wanted(q, split, seen)), None)
                if found is None:
                    streams.remove(stream)
                elif len(seen) < count:
                    question, reference = found
                    seen.add(question)
                    yield problem((system(INSTRUCTIONS), user(question)), reference, sandbox=SPEC)

    @staticmethod
    def oracle(problem: Problem) -> Generator[Message, Messages, None]:
        """Compute with the tool what the question spells out, and answer with what it printed."""
        question = problem.task.prompt[-1].content
        (seen,) = yield call("python", code=_code(question, problem.reference))
        yield answer(seen.content)

    @staticmethod
    def guess(problem: Problem) -> Generator[Message, Messages, None]:
        """Answer at once, by a guess of the right size."""
        size = len(str(problem.reference).lstrip("-").partition(".")[0])
        yield answer(str(Random(problem.task.id).randrange(10**size)))

    @staticmethod
    def copy_the_prompt(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: the question as the answer."""
        yield answer(problem.task.prompt[-1].content)

    @staticmethod
    def shotgun(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: several answers, the right one last."""
        yield answer(f"1 2 3 {problem.reference}")

    scripts = {  # noqa: RUF012
        "oracle": oracle,
        "guess": guess,
        "copy_the_prompt": copy_the_prompt,
        "shotgun": shotgun,
    }


_ARITHMETIC = re.compile(r"(?:problem|multiplication): ([\d.+*\- ]*\d)")
_NUMBERS = re.compile(r"(?:\((GCD|LCM)\)).*?: ([\d, ]*\d)")


def _code(question: str, reference: str) -> str:
    """Code that computes the answer where the question is a formula, else code that prints it."""
    if found := _ARITHMETIC.search(question):
        # Rounded: 0.1 + 0.2 prints more digits than the question has.
        return f"print(round({found[1]}, 6))" if "." in found[1] else f"print({found[1]})"
    if found := _NUMBERS.search(question):
        return f"import math; print(math.{found[1].lower()}({found[2]}))"
    return f"print({reference})"


_TRIES = 200_000
"""Generated questions of a family; small families run out of new ones before."""
_STALE = 2000
"""A family that gives nothing new for so long has run out."""


def _questions(family: Family, seed: int) -> Iterator[tuple[str, str]]:
    """Different questions of a family with their answers, by index."""
    items = library().create_dataset(family, seed=stream_seed(family, seed), size=_TRIES)
    seen: set[str] = set()
    stale = 0
    for index in range(_TRIES):
        item: Any = items[index]
        question, reference = str(item["question"]).strip(), str(item["answer"]).strip()
        stale = stale + 1 if question in seen else 0
        if stale > _STALE:
            return
        if not stale and whole_number(reference) is not None:
            seen.add(question)
            yield question, reference


def _is_wanted(found: tuple[str, str], split: Split, seen: set[str]) -> bool:
    question = found[0]
    in_test = sha256(question.encode()).digest()[0] % 5 == 0
    return question not in seen and in_test == (split == "test")


def stream_seed(family: str, seed: int) -> int:
    """A seed of the family's own, so that families don't share their numbers."""
    return int.from_bytes(sha256(f"{family}:{seed}".encode()).digest()[:4], "big")


@cache
def library() -> Any:
    """reasoning-gym. Importing it draws from the global random stream, so that is put back."""
    state = getstate()
    try:
        import reasoning_gym
    except ImportError as error:
        raise PluginError("python-math needs reasoning-gym: pip install reasoning-gym") from error
    finally:
        setstate(state)
    return reasoning_gym
