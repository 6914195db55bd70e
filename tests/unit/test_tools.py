import asyncio
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, EnvironmentFault, PluginError, SandboxLost, ToolError
from agentrl.plugins import find_environment, find_sandbox, problems_of
from agentrl.tools import ToolEnvironment, answer, call, cut_bytes, problem, tool
from agentrl.types import Message, Step, ToolCall
from agentrl.verifiers import ExactMatch


class Everything(ToolEnvironment):
    verifier = ExactMatch()

    @staticmethod
    def problems(split, *, count: int = 2):
        return [problem(f"{split} {i}", str(i)) for i in range(count)]

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    @tool
    def join(self, words: list[str]) -> str:
        """Join."""
        return "-".join(words)

    @tool
    def echo(self, text: str) -> str:
        """Say it again."""
        return text

    @tool(final=True)
    async def finish(self, text: str) -> str:
        """End."""
        return text

    @tool(timeout_s=0.1)
    async def slow(self) -> None:
        """Wait."""
        await asyncio.sleep(9)

    @tool
    def block(self) -> None:
        """Block."""
        time.sleep(0.3)

    @tool(max_output_bytes=10)
    def flood(self) -> bytes:
        """Print much."""
        return b"\xff" + b"x" * 100

    @tool
    def refuse(self) -> None:
        """Refuse."""
        raise ToolError("not today")

    @tool
    def crash(self) -> None:
        """Break."""
        raise ZeroDivisionError("oops")

    @tool
    def lose(self) -> None:
        """Lose the sandbox."""
        raise SandboxLost("gone")


def step(action: Message) -> Step:
    return asyncio.run(Everything(sandbox=None).step(action))


def said(name: str, raw: str | None = None, **arguments: object) -> str:
    one = ToolCall(id="call_0", name=name, arguments=raw or json.dumps(arguments))
    return step(Message(role="assistant", content="", tool_calls=(one,))).observation[0].content


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (said("add", a=2), "3"),
        (said("add", a="2", b=3), "5"),
        (said("add"), "error: add: a: Field required"),
        (said("add", a="x"), "a: Input should be a valid integer"),
        (said("add", a=1, c=1), "c: Extra inputs are not permitted"),
        (said("add", raw="[1"), "not JSON"),
        (said("add", raw="null"), "must be an object"),
        (said("join", words='["a","b"]'), "a-b"),
        (said("echo", text="[1]"), "[1]"),
        (said("echo", raw='"bare"'), "bare"),
        (said("nothing"), "there is no tool 'nothing'; tools: add,"),
        (said("refuse"), "error: not today"),
        (said("slow"), "ran out of its 0.1 s"),
        (said("flood"), "[output cut: first 10 of 103 bytes shown]"),
    ],
)
def test_what_the_model_reads(text: str, shown: str) -> None:
    assert shown in text


def test_calls_run_in_order_and_each_has_an_event() -> None:
    calls = tuple(
        ToolCall(id=f"call_{i}", name=n, arguments="{}", error=e)
        for i, (n, e) in enumerate([("refuse", None), ("", "no name"), ("slow", None)])
    )
    done = step(Message(role="assistant", content="", tool_calls=calls))
    assert [e.status for e in done.events] == ["error", "malformed", "timeout"]
    assert [m.tool_call_id for m in done.observation] == ["call_0", "call_1", "call_2"]
    assert not done.terminated


def test_an_answer_and_a_final_tool_end_the_episode() -> None:
    assert step(answer("x")).terminated
    assert step(call("finish", text="x")).terminated
    assert not step(call("finish")).terminated, "a call that failed ends nothing"


def test_a_bug_in_a_tool_is_the_environments_fault_not_the_agents() -> None:
    with pytest.raises(EnvironmentFault, match="crash: ZeroDivisionError: oops"):
        step(call("crash"))
    with pytest.raises(SandboxLost):
        step(call("lose"))


async def test_blocking_tools_do_not_hold_up_each_other() -> None:
    begun = time.monotonic()
    await asyncio.gather(*(Everything(sandbox=None).step(call("block")) for _ in range(5)))
    assert time.monotonic() - begun < 1.2


async def test_step_after_the_end_is_an_error() -> None:
    environment = Everything(sandbox=None)
    await environment.step(answer("x"))
    with pytest.raises(EnvironmentFault, match="reset"):
        await environment.step(answer("x"))


async def test_reset_gives_the_same_stream_and_leaves_the_global_one() -> None:
    import random

    environment, task = Everything(sandbox=None), problem("q").task
    state = random.getstate()
    await environment.reset(task, seed=5)
    first = environment.rng.random()
    await environment.reset(task, seed=5)
    assert environment.rng.random() == first
    await environment.reset(task, seed=6)
    assert environment.rng.random() != first
    assert random.getstate() == state


def test_a_tool_without_docs_or_hints_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match=r"Bad\.t.*docstring"):

        class Bad(ToolEnvironment):
            @tool
            def t(self) -> None: ...

    with pytest.raises(PluginError, match=r"Worse\.t.*x has no type"):

        class Worse(ToolEnvironment):
            @tool
            def t(self, x) -> None:
                """Do."""


def test_same_text_with_two_references_is_two_tasks() -> None:
    assert problem("q", "1").task.id != problem("q", "2").task.id
    assert problem("q", "1").task.id == problem("q", "1").task.id
    assert "1" not in repr(problem("q", "1").reference) or "reference" not in repr(problem("q"))


@given(st.text(), st.integers(1, 50))
def test_a_cut_says_so_and_keeps_whole_characters(text: str, limit: int) -> None:
    shown, size = cut_bytes(text, limit)
    assert size == len(text.encode(errors="replace"))
    assert ("[output cut" in shown) >= (size > limit)


def test_options_are_checked_against_the_parameters_of_problems() -> None:
    assert len(problems_of(Everything, "train", {"count": 3})) == 3
    for options, message in [
        ({"cuont": 3}, "did you mean count"),
        ({"count": "many"}, "count: Input should be a valid integer"),
        ({"count": 0}, "no train problems"),
    ]:
        with pytest.raises(ConfigError, match=message):
            problems_of(Everything, "train", options)


def test_environments_are_found_by_name_module_and_file(tmp_path: Path) -> None:
    assert find_environment("calculator").__name__ == "Calculator"
    assert find_environment("agentrl_environments.calculator:Calculator").__name__ == "Calculator"
    own = tmp_path / "my_own_env.py"
    own.write_text(
        "from agentrl.tools import ToolEnvironment, problem\n"
        "from agentrl.verifiers import ExactMatch\n"
        "class Mine(ToolEnvironment):\n"
        "    verifier = ExactMatch()\n"
        "    @staticmethod\n"
        "    def problems(split): return [problem('q', 'a')]\n"
    )
    assert find_environment(str(own)).__name__ == "Mine"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("calculater", "did you mean calculator"),
        ("no.such:Thing", "does not import"),
        ("agentrl.tools:Nope", "has no Nope"),
        ("nope.py", "no such file"),
        ("agentrl.tools:problem", "has no"),
    ],
)
def test_what_can_not_be_found_is_one_line(reference: str, said: str) -> None:
    with pytest.raises(PluginError, match=said) as caught:
        find_environment(reference)
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_import_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "broken_env.py"
    bad.write_text("def f(:\n")
    with pytest.raises(PluginError, match="SyntaxError"):
        find_environment(str(bad))
    with pytest.raises(PluginError, match="known sandboxes: bwrap"):
        find_sandbox("zzz")
