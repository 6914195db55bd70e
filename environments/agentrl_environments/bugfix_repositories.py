"""Small repositories made of an exercise's functions, with one fault injected."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Any

from agentrl_environments.code_exercises import SHOWN, Exercise, exercises

MAIN, STEPS, TESTS = "toolbox/main.py", "toolbox/steps.py", "tests/test_main.py"

FAULTS = (
    ("x > n", "x >= n"),
    ("x % n != 0", "x % n == 0"),
    ("[x * n for", "[x + n for"),
    ("items[turn:] + items[:turn]", "items[:turn] + items[turn:]"),
    ("items[::n]", "items[1::n]"),
    ("- n + 1)]", "- n)]"),
    ("out[-1] if out", "out[0] if out"),
    ("items[i] - items[i - 1]", "items[i - 1] - items[i]"),
    ("key=lambda x: x % n", "key=lambda x: x // n"),
    ("return sum(items)\n", "return sum(items[1:])\n"),
    ("max(items", "min(items"),
    ("items[::2]) - sum(items[1::2]", "items[1::2]) - sum(items[::2]"),
    ("out.get(x % n, 0)", "out.get(x % n, 1)"),
    ("- 97 + n", "- 97 - n"),
    ("if i % n", "if (i + 1) % n"),
    ("word[::-1]", "word[::1]"),
    ("i - start >= n", "i - start > n"),
    ("[:n]", "[: n - 1]"),
    ("i - start + 1", "i - start"),
)
"""What is right and what stands there instead, each in one of `code_operations`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """Its files with the fault, what the function `name` should do, and what mends it.

    `hidden` holds arguments and right values that none of the files shows.
    """

    name: str
    task: str
    files: Mapping[str, bytes]
    mended: str
    hidden: tuple[tuple[Any, Any], ...]


def repositories(levels: Sequence[int], seed: int) -> Iterator[Repository]:
    """Different repositories from exercises of the levels in turn, the same for the same seed."""
    rng = Random(f"bugfix:{seed}")
    streams = [exercises(level, seed) for level in dict.fromkeys(levels)]
    while streams:
        for stream in list(streams):
            exercise = next(stream, None)
            if exercise is None:
                streams.remove(stream)
            elif (made := _repository(rng, exercise)) is not None:
                yield made


def _repository(rng: Random, exercise: Exercise) -> Repository | None:
    """The exercise with a fault that its shown and its hidden values tell; None if none does."""
    steps, main = _parts(exercise)
    possible = [fault for fault in FAULTS if steps.count(fault[0]) == 1]
    for right, wrong in rng.sample(possible, len(possible)):
        broken = steps.replace(right, wrong)
        bad = [_differs(broken + main, exercise.name, *pair) for pair in exercise.values]
        if any(bad[:SHOWN]) and sum(bad[SHOWN:]) >= 3:
            return Repository(
                name=exercise.name,
                task=exercise.text,
                files=MappingProxyType(_files(exercise, broken, main)),
                mended=steps,
                hidden=exercise.values[SHOWN:],
            )
    return None


def _parts(exercise: Exercise) -> tuple[str, str]:
    """The source of the steps, and that of the function that uses them."""
    source = exercise.solution.replace("{n}", "n")
    start = source.index(f"def {exercise.name}(x):")
    return source[:start].rstrip() + "\n", source[start:]


def _differs(source: str, name: str, given: Any, wanted: Any) -> bool:
    """Whether a program of ours (no model's) gives something else."""
    space: dict[str, Any] = {}
    exec(source, space)
    return repr(space[name](given)) != repr(wanted)


def _files(exercise: Exercise, broken: str, main: str) -> dict[str, bytes]:
    used = [n.name for n in ast.parse(broken).body if isinstance(n, ast.FunctionDef)]
    checks = "".join(
        f"        self.assertEqual({exercise.name}({given!r}), {value!r})\n"
        for given, value in exercise.values[:SHOWN]
    )
    tests = (
        f"import unittest\n\nfrom toolbox.main import {exercise.name}\n\n\n"
        f"class Main(unittest.TestCase):\n    def test_examples(self):\n{checks}"
    )
    texts = {
        "README.md": f"# toolbox\n\n{exercise.text}\n",
        "toolbox/__init__.py": "",
        STEPS: broken,
        MAIN: f"from toolbox.steps import {', '.join(used)}\n\n\n{main}",
        "tests/__init__.py": "",
        TESTS: tests,
    }
    return {path: text.encode() for path, text in texts.items()}
