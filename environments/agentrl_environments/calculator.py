"""Arithmetic with a Python tool: the smallest problem on which using a tool pays."""

from collections.abc import Generator, Iterator, Sequence
from random import Random
from typing import Literal

from agentrl.protocols import Split
from agentrl.tools import ToolEnvironment, answer, call, problem, run_python, tool
from agentrl.types import Message, Messages, Problem, SandboxSpec
from agentrl.verifiers import NumericMatch


class Calculator(ToolEnvironment):
    """`(37+18)*4` → call python → answer `220`."""

    verifier = NumericMatch(only_number=True)

    @tool(timeout_s=20)
    async def python(self, code: str) -> str:
        """Run Python code and see what it prints."""
        return await run_python(self.sandbox, code, timeout_s=5)

    @staticmethod
    def problems(
        split: Split,
        *,
        digits: int = 2,
        operators: Sequence[Literal["+", "-"]] = ("+", "-"),
        negative: bool = True,
        count: int = 4000,
    ) -> Iterator[Problem]:
        """Expressions `(a±b)*c` on numbers of up to `digits` digits, `count` at most.

        `operators` are those between a and b; without `negative`, no value is below 0. The splits
        don't overlap: an expression is in the test split when its own hash says so.
        """
        if not 1 <= digits <= 6 or count < 1 or not operators:
            raise ValueError("digits must be 1 to 6, count at least 1, operators one at least")
        if not negative and "+" not in operators:
            raise ValueError("with '-' alone most values are negative: leave negative at true")
        seen: set[str] = set()
        rng = Random(f"calculator:{digits}")
        # The space of expressions is far larger than any count in use; tries bound small ones.
        for _ in range(20 * count):
            if len(seen) >= count:
                return
            text = _expression(rng, digits, operators)
            fits = negative or _value(text) >= 0
            if text not in seen and fits and _is_test(text) == (split == "test"):
                seen.add(text)
                yield problem(text, str(_value(text)), id=text, sandbox=SPEC)

    @staticmethod
    def oracle(problem: Problem) -> Generator[Message, Messages, None]:
        """Call the tool once and answer with what it printed."""
        (seen,) = yield call("python", code=f"print({problem.task.prompt[-1].content})")
        yield answer(seen.content)

    @staticmethod
    def guess(problem: Problem) -> Generator[Message, Messages, None]:
        """Answer at once, by a guess of the right size."""
        rng = Random(problem.task.id)
        yield answer(str(rng.randrange(10 ** len(str(abs(int(problem.reference)))))))

    @staticmethod
    def copy_the_prompt(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: the question as the answer."""
        yield answer(problem.task.prompt[-1].content)

    @staticmethod
    def shotgun(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: many answers, the right one last."""
        right = int(problem.reference)
        yield answer(" ".join(str(n) for n in range(right - 9, right + 1)))

    scripts = {  # noqa: RUF012
        "oracle": oracle,
        "guess": guess,
        "copy_the_prompt": copy_the_prompt,
        "shotgun": shotgun,
    }


SPEC = SandboxSpec(memory_mb=256)


def _expression(rng: Random, digits: int, operators: Sequence[str]) -> str:
    a, b, c = (rng.randrange(1, 10**digits) for _ in range(3))
    first = rng.choice(operators)
    return f"({a}{first}{b})*{c}"


def _value(text: str) -> int:
    """The value of an expression made above: parsed, not evaluated."""
    inner, _, factor = text[1:].partition(")*")
    sign = "+" if "+" in inner else "-"
    a, b = inner.split(sign)
    return (int(a) + int(b) if sign == "+" else int(a) - int(b)) * int(factor)


def _is_test(text: str) -> bool:
    return Random(f"split:{text}").random() < 0.2
