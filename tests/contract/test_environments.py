"""The built-in environments and the template keep the contract; what breaks it is found."""

import asyncio
import random
import re
import threading
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from agentrl_environments.calculator import Calculator
from agentrl_environments.python_math import PythonMath
from agentrl_sandboxes.bwrap import BwrapProvider
from gymnasium.utils.env_checker import check_env

from agentrl.gym import TextEnv
from agentrl.plugins import find_environment, problems_of
from agentrl.testing.environment import RULES, CountedSandboxes, Finding, check_environment
from agentrl.testing.fakes import FakeSandboxes
from agentrl.tools import ToolEnvironment, answer, call, problem, tool
from agentrl.types import SandboxSpec, Verdict
from agentrl.verifiers import ExactMatch, NumericMatch

TEMPLATE = files("agentrl").joinpath("templates/environment.py.txt").read_text(encoding="utf-8")


@pytest.fixture
def template(tmp_path: Path) -> Any:
    own = tmp_path / "template_env.py"
    own.write_text(TEMPLATE)
    return find_environment(str(own))


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        (Calculator, {}),
        (Calculator, {"digits": 1, "count": 100}),
        (Calculator, {"digits": 3, "operators": ["-"], "count": 100}),
        (PythonMath, {"count": 200}),
    ],
)
async def test_a_built_in_keeps_the_contract(environment: Any, options: Mapping[str, Any]) -> None:
    sandboxes = CountedSandboxes(BwrapProvider())
    assert await check_environment(environment, sandboxes=sandboxes, options=options) == ()
    assert sandboxes.opened > 20 and sandboxes.open_now == 0


async def test_the_template_keeps_it_in_fifteen_lines(template: Any) -> None:
    assert await check_environment(template) == ()
    quotes = '"""'
    code = [
        line
        for line in TEMPLATE.splitlines()
        if line.strip() and not line.strip().startswith(quotes)
    ]
    assert len(code) <= 15
    env = TextEnv(template)
    check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("name", ["Calculator-v0"])
def test_a_built_in_passes_gymnasiums_own_check_in_real_sandboxes(name: str) -> None:
    env = gymnasium.make(f"agentrl/{name}", options={"count": 50})
    check_env(env.unwrapped, skip_render_check=True)
    env.reset(seed=1)
    shown, *_ = env.step(
        '<tool_call>{"name": "python", "arguments": {"code": "print(6*7)"}}</tool_call>'
    )
    assert shown == "42"
    env.close()
    assert not any(t.name.startswith("agentrl") for t in threading.enumerate())


async def test_output_without_end_is_cut_and_says_so() -> None:
    (task, *_) = problems_of(Calculator, "train", {}, 1)
    async with BwrapProvider().session(task.task.sandbox or SandboxSpec()) as sandbox:
        environment = Calculator(sandbox=sandbox)
        await environment.reset(task.task, seed=0)
        for code, said in [
            ("print('x' * 10**7)", "[output cut: "),
            ("import sys; sys.stdout.buffer.write(b'\\xff' * 9)", "\ufffd" * 9),
            ("import sys; sys.exit(3)", "[exit code 3]"),
            ("1/0", "ZeroDivisionError"),
            ("while True: pass", "timed out after"),
            ("x = 'a' * 10**10", "MemoryError"),
            ("print('\ud800')", "\ufffd"),
            ("1\0", "NUL character"),
            ("#" * 300_000 + "\nprint(5)", "5"),
        ]:
            step = await environment.step(call("python", code=code))
            shown = step.observation[0].content
            assert said.lower() in shown.lower(), (code[:40], shown[:200])
            assert len(shown.encode()) < 20_000
            assert step.events[0].status == "ok" or "\0" in code


def test_splits_of_calculator_options() -> None:
    only_minus = problems_of(Calculator, "train", {"operators": ["-"], "count": 200})
    assert all("-" in p.task.id and "+" not in p.task.id for p in only_minus)
    assert any(int(p.reference) < 0 for p in only_minus)
    positive = problems_of(Calculator, "train", {"negative": False, "count": 200})
    assert all(int(p.reference) >= 0 for p in positive)
    assert len(problems_of(Calculator, "train", {"count": 50})) == 50


def test_word_problems_are_the_same_each_time_and_split_by_question() -> None:
    state = random.getstate()
    train, again, other = (
        problems_of(PythonMath, "train", {"count": 100, "seed": seed}) for seed in (0, 0, 1)
    )
    assert [p.task.id for p in train] == [p.task.id for p in again] != [p.task.id for p in other]
    questions = {p.task.prompt[-1].content for seed in (0, 1, 2) for p in problems_of(
        PythonMath, "train", {"count": 500, "seed": seed})}  # fmt: skip
    held_out = {p.task.prompt[-1].content for seed in (0, 3) for p in problems_of(
        PythonMath, "test", {"count": 500, "seed": seed})}  # fmt: skip
    assert not questions & held_out, "whatever the seed"
    assert random.getstate() == state


class Sound(ToolEnvironment):
    """What the broken ones below are made from."""

    verifier: Any = NumericMatch(only_number=True)

    @tool
    def square(self, n: int) -> int:
        """Square a number."""
        return n * n

    @staticmethod
    def problems(split: str):
        first = 200 if split == "test" else 100
        return [problem(f"{n} squared?", n * n, setup={"n": n}) for n in range(first, first + 20)]

    @staticmethod
    def oracle(problem: Any):
        (seen,) = yield call("square", n=problem.task.setup["n"])
        yield answer(seen.content)

    scripts: Any = {"oracle": oracle}  # noqa: RUF012


async def broken(environment: Any, **more: Any) -> set[str]:
    found = await check_environment(environment, **more)
    assert all(isinstance(f, Finding) and f.seen and f.rule in RULES for f in found)
    return {f.rule for f in found}


async def test_a_sound_one_is_not_accused() -> None:
    assert await broken(Sound) == set()


async def test_splits_that_overlap_or_change_are_found() -> None:
    class Same(Sound):
        @staticmethod
        def problems(split: str):
            return Sound.problems("train")

    class Changing(Sound):
        @staticmethod
        def problems(split: str):
            return [problem(f"{time.perf_counter_ns()}", 5)]

    class Empty(Sound):
        @staticmethod
        def problems(split: str):
            return Sound.problems("train") if split == "train" else []

    for environment in (Same, Changing, Empty):
        assert await broken(environment) == {"problems"}


async def test_a_reset_that_is_not_repeatable_is_found() -> None:
    class Global(Sound):
        async def reset(self, task: Any, *, seed: int):
            await super().reset(task, seed=seed)
            return (*task.prompt, answer(str(random.random()))), {}

    class Reseeding(Sound):
        async def reset(self, task: Any, *, seed: int):
            random.seed(seed)
            return await super().reset(task, seed=seed)

    class Silent(Sound):
        async def reset(self, task: Any, *, seed: int):
            await super().reset(task, seed=seed)
            return (), {}

    for environment in (Global, Reseeding, Silent):
        assert "reset" in await broken(environment)


async def test_a_tool_that_a_call_can_break_is_found() -> None:
    class Fragile(Sound):
        @tool
        def read(self, path: str) -> str:
            """Read."""
            return {"a": "b"}[path]

    class Verbose(Sound):
        @tool(max_output_bytes=1 << 30)
        def echo(self, text: str) -> str:
            """Echo."""
            return text

    for environment in (Fragile, Verbose):
        assert await broken(environment) == {"calls"}


async def test_what_can_not_be_solved_or_need_not_be_is_found() -> None:
    class NoOracle(Sound):
        scripts: Any = {}  # noqa: RUF012

    class Wrong(Sound):
        @tool
        def square(self, n: int) -> int:
            """Square a number."""
            return n * n + 1

    class Lenient(Sound):
        verifier = NumericMatch()

        @staticmethod
        def cheat(problem: Any):
            yield answer(f"take {problem.reference}")

        scripts: Any = {"oracle": Sound.oracle, "cheat": cheat}  # noqa: RUF012

    class Open:
        async def grade(self, problem: Any, episodes: Any, sandboxes: Any):
            said = str(problem.reference)
            return [
                Verdict(reward=1.0, passed=True)
                if said in e.trajectory.answer
                else Verdict(reward=0.0)
                for e in episodes
            ]

    class Hedged(Sound):
        verifier = Open()

    class Invalid(Sound):
        verifier = ExactMatch()

    assert await broken(NoOracle) == {"oracle"}
    assert await broken(Wrong) == {"oracle"}
    assert await broken(Lenient) == {"cheats"}
    assert await broken(Hedged) == {"cheats"}
    assert await broken(Invalid) == {"oracle"}


async def test_a_reference_in_reach_is_found() -> None:
    class InSetup(Sound):
        @staticmethod
        def problems(split: str):
            return [
                problem(p.task.prompt, p.reference, setup={**p.task.setup, "gold": p.reference})
                for p in Sound.problems(split)
            ]

    class InFiles(Sound):
        @staticmethod
        def problems(split: str):
            return [
                problem(
                    p.task.prompt,
                    p.reference,
                    setup=p.task.setup,
                    sandbox=SandboxSpec(files={"notes/x.txt": f"it is {p.reference}".encode()}),
                )
                for p in Sound.problems(split)
            ]

    class Written(InFiles):
        async def reset(self, task: Any, *, seed: int):
            gold = int(task.setup["n"]) ** 2
            await self.sandbox.write_file("cache/expected.txt", f"{gold}\n".encode())
            return await super().reset(task, seed=seed)

        @staticmethod
        def problems(split: str):
            return [
                problem(p.task.prompt, p.reference, setup=p.task.setup, sandbox=SandboxSpec())
                for p in Sound.problems(split)
            ]

    assert await broken(InSetup) == {"leak"}
    assert await broken(InSetup, open_book=True) == set()
    assert await broken(InFiles, sandboxes=FakeSandboxes()) == {"leak"}
    assert await broken(Written, sandboxes=BwrapProvider()) == {"leak"}


async def test_an_episode_without_an_end_is_found() -> None:
    class Endless(Sound):
        async def step(self, action: Any):
            self._ended = False
            return await super().step(action)

    assert await broken(Endless) == {"end"}


async def test_what_is_left_behind_is_found() -> None:
    stop = threading.Event()

    class Leaving(Sound):
        async def reset(self, task: Any, *, seed: int):
            threading.Thread(target=stop.wait, daemon=True).start()
            return await super().reset(task, seed=seed)

    assert await broken(Leaving) == {"cleanup"}
    stop.set()


async def test_a_missing_sandbox_is_said() -> None:
    found = await check_environment(Calculator)
    assert any("sandbox" in f.seen for f in found)


async def test_the_documentation_is_true(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    sevens, _, there, back = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    own = tmp_path / "sevens.py"
    own.write_text(sevens)
    assert await check_environment(find_environment(str(own))) == ()
    ours: dict[str, Any] = {}
    await asyncio.to_thread(exec, there, ours)
    assert ours["terminated"] and ours["reward"] in (0.0, 1.0)
    lake = tmp_path / "lake_env.py"
    lake.write_text(back)
    found = await check_environment(find_environment(str(lake)))
    assert {f.rule for f in found} == {"oracle"}, "nobody has written a script that solves it"
