import asyncio
import gc
import json
import random
import sqlite3
import threading
import time
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentrl.errors import EnvironmentFault, PluginError, SandboxLost, ToolError
from agentrl.testing.fakes import FakeSandbox, FakeSandboxes
from agentrl.tools import (
    ToolEnvironment,
    answer,
    as_text,
    call,
    cut_bytes,
    problem,
    run_python,
    tool,
)
from agentrl.types import ExecResult, Message, SandboxSpec, Step, Task, ToolCall
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


async def test_blocking_tools_of_many_episodes_sleep_together() -> None:
    class Sleepy(ToolEnvironment):
        @tool
        def sleep(self) -> None:
            """Sleep."""
            time.sleep(0.5)

    begun = time.monotonic()
    await asyncio.gather(*(Sleepy(sandbox=None).step(call("sleep")) for _ in range(40)))
    assert time.monotonic() - begun < 1.5, "whatever the size of the loop's own pool"


async def test_a_tool_that_never_returns_holds_up_nobody() -> None:
    stop = threading.Event()

    class Hanging(ToolEnvironment):
        @tool(timeout_s=0.1)
        def hang(self) -> None:
            """Hang."""
            stop.wait()

        @tool
        def go(self) -> str:
            """Go on."""
            return "on"

    environments = [Hanging(sandbox=None) for _ in range(20)]
    steps = await asyncio.gather(*(e.step(call("hang")) for e in environments))
    assert {s.events[0].status for s in steps} == {"timeout"}
    step = await environments[0].step(call("go"))
    assert step.observation[0].content == "on"
    stop.set()


async def test_what_is_bound_to_its_thread_works_through_an_episode() -> None:
    class Database(ToolEnvironment):
        @tool
        def open(self) -> None:
            """Open."""
            self.rows = sqlite3.connect(":memory:")

        @tool
        def count(self) -> int:
            """Count."""
            return self.rows.execute("select 7").fetchone()[0]

    environment = Database(sandbox=None)
    await environment.step(call("open"))
    assert (await environment.step(call("count"))).observation[0].content == "7"


async def test_no_thread_outlives_its_episode() -> None:
    def tool_threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "agentrl-tool"]

    gc.collect()
    for thread in tool_threads():
        thread.join(2)
    assert not tool_threads()
    ended, faulty, left, kept = (Everything(sandbox=None) for _ in range(4))
    await ended.step(call("add", a=1))
    await ended.step(answer("done"))
    with pytest.raises(EnvironmentFault):
        await faulty.step(call("crash"))
    await kept.step(call("add", a=1))
    await kept.artifacts()
    await left.step(call("add", a=1))
    del left
    gc.collect()
    for thread in tool_threads():
        thread.join(2)
    assert not tool_threads()


async def test_a_tools_own_timeout_is_a_bug_not_the_limit() -> None:
    class Slow(ToolEnvironment):
        @tool
        async def ask(self) -> None:
            """Ask."""
            raise TimeoutError("the service is slow")

        @tool
        def leave(self) -> None:
            """Leave."""
            raise SystemExit(0)

        @tool
        def stop(self) -> None:
            """Stop."""
            raise StopIteration

    for name, said in (("ask", "the service is slow"), ("leave", "SystemExit"), ("stop", "Stop")):
        with pytest.raises(EnvironmentFault, match=said):
            await Slow(sandbox=None).step(call(name))


class Point(BaseModel):
    x: int
    y: int = 0


class Typed(ToolEnvironment):
    @tool
    def many(
        self,
        text: str | None = None,
        kind: Literal["a", "[1]"] = "a",
        points: list[Point] | None = None,
        size: Annotated[int, Field(ge=1, description="how large")] = 1,
        anything: Any = None,
    ) -> str:
        """Take many things."""
        return repr((text, kind, points, size, anything))

    @tool
    def odd(self, model_config: int, schema: int, _x: int, copy: int, *, json: int) -> int:
        """Names that a model class has already."""
        return model_config + schema + _x + copy + json


def typed(raw: str, name: str = "many") -> tuple[str, str]:
    one = ToolCall(id="c", name=name, arguments=raw)
    step = asyncio.run(
        Typed(sandbox=None).step(Message(role="assistant", content="", tool_calls=(one,)))
    )
    return step.observation[0].content, step.events[0].status


def test_texts_stay_texts_and_json_in_texts_is_decoded_where_it_must_be() -> None:
    assert typed('{"text": "[1]"}')[0].startswith("('[1]'")
    assert typed('{"text": "null"}')[0].startswith("('null'")
    assert typed('{"kind": "[1]"}')[0].startswith("(None, '[1]'")
    assert typed('{"anything": "[1]"}')[0].endswith("'[1]')")
    assert "Point(x=1, y=0)" in typed('{"points": "[{\\"x\\": 1}]"}')[0]
    assert "Point(x=2, y=3)" in typed('{"points": [{"x": 2, "y": 3}]}')[0]
    assert typed('{"model_config":1,"schema":2,"_x":3,"copy":4,"json":5}', "odd") == ("15", "ok")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ('{"size": 0}', "size: Input should be greater than or equal to 1"),
        ('{"points": [{"y": 1}]}', "points.0.x: Field required"),
        ('{"points": "[1]"}', "points"),
        ('{"size": NaN}', "NaN is no JSON number"),
        ('{"kind": "c"}', "kind"),
        ("[" * 100_000, "not JSON"),
        ('{"' + "k" * 9000 + '": 1}', "…"),
        (json.dumps({f"k{i}": i for i in range(99)}), "and 94 more"),
        ("null", "must be an object with text, kind"),
        ("[]", "must be an object"),
        ("7", "must be an object"),
        ('"x"', "must be an object"),
    ],
)
def test_what_is_wrong_with_arguments_is_said_in_short(raw: str, said: str) -> None:
    text, status = typed(raw)
    assert said in text and status == "malformed"
    assert len(text) < 1500


@given(st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["text", "points", "size", "kind", "x"]) | st.text(max_size=3),
        inner, max_size=4),
    max_leaves=8,
))  # fmt: skip
def test_no_arguments_are_a_fault(value: Any) -> None:
    text, status = typed(json.dumps(value))
    assert status in ("ok", "malformed")
    text.encode()


def test_schemas_are_what_a_model_needs() -> None:
    many, odd = Typed(sandbox=None).tools
    assert (many.name, odd.name) == ("many", "odd"), "in the order they are written"
    function = many.schema["function"]
    assert function["description"] == "Take many things."
    assert function["parameters"]["properties"]["size"] == {
        "default": 1, "description": "how large", "minimum": 1, "type": "integer",
    }  # fmt: skip
    assert function["parameters"]["required"] == []
    assert "Point" in function["parameters"]["$defs"]
    assert odd.schema["function"]["parameters"]["required"] == [
        "model_config", "schema", "_x", "copy", "json",
    ]  # fmt: skip


class Unknown:
    """A type that has no schema."""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("@tool\n@staticmethod\ndef t(x: int) -> int:\n 'Do.'", "plain method"),
        ("@staticmethod\n@tool\ndef t(x: int) -> int:\n 'Do.'", "Bad.t: a tool is a plain method"),
        ("@classmethod\n@tool\ndef t(cls) -> int:\n 'Do.'", "Bad.t: a tool is a plain method"),
        ("@tool\ndef t(x: int) -> int:\n 'Do.'", "Bad.t: .*self"),
        ("@tool\ndef t(self, *xs: int) -> int:\n 'Do.'", r"Bad.t: \*xs"),
        ("@tool\ndef t(self, **xs: int) -> int:\n 'Do.'", r"Bad.t: \*\*xs"),
        ("@tool\ndef t(self, x: int, /) -> int:\n 'Do.'", "Bad.t: x: int can't be filled"),
        ("@tool\ndef t(self, x: Unknown) -> int:\n 'Do.'", "Bad.t: a type hint has no schema"),
        ("@tool\ndef t(self, x: 'Nope') -> int:\n 'Do.'", "Bad.t: .*Nope"),
        ("@tool\ndef t(self):\n 'Do.'\n yield 1", "Bad.t is a generator"),
        ("@tool(name='a b')\ndef t(self) -> int:\n 'Do.'", "Bad.t: 'a b' is no tool name"),
        ("@tool(timeout_s=0)\ndef t(self) -> int:\n 'Do.'", "Bad.t: timeout_s"),
        (
            "@tool\ndef t(self) -> int:\n 'Do.'\n@tool(name='t')\ndef u(self) -> int:\n 'Do.'",
            "Bad.u: there already is",
        ),
    ],
)  # fmt: skip
def test_what_can_be_no_tool_is_named(source: str, said: str) -> None:
    body = "\n".join(f"    {line}" for line in source.split("\n"))
    with pytest.raises(PluginError, match=said) as caught:
        exec(  # our own text, not a model's
            f"class Bad(ToolEnvironment):\n{body}",
            {"ToolEnvironment": ToolEnvironment, "tool": tool, "Unknown": Unknown},
        )
    assert "\n" not in str(caught.value)


def test_subclasses_add_and_hide_tools_and_scripts() -> None:
    class More(Everything):
        add = None  # type: ignore[assignment]

        @tool
        def third(self) -> int:
            """Third."""
            return 3

        scripts = {"oracle": lambda problem: iter(())}  # type: ignore[dict-item]  # noqa: RUF012

    names = [t.name for t in More(sandbox=None).tools]
    assert "add" not in names and names[-1] == "third" and names[0] == "join"
    assert set(More.scripts) == {"null", "oracle"} and set(Everything.scripts) == {"null"}
    assert next(More.scripts["null"](problem("q"))).content == ""


async def test_calls_behind_a_final_tool_are_not_run() -> None:
    calls = tuple(
        ToolCall(id=f"call_{i}", name=n, arguments='{"text": "x"}')
        for i, n in enumerate(("finish", "lose"))
    )
    done = await Everything(sandbox=None).step(
        Message(role="assistant", content="", tool_calls=calls)
    )
    assert done.terminated and [m.tool_call_id for m in done.observation] == ["call_0"]


def test_ids_are_the_same_in_every_process_or_refused() -> None:
    words = [f"w{i}" for i in range(30)]
    assert problem("q", set(words)).task.id == problem("q", {*reversed(words)}).task.id
    assert problem("q", {"a": 1, "b": 2}).task.id == problem("q", {"b": 2, "a": 1}).task.id
    assert problem("q", "1", setup={"a": 1}).task.id != problem("q", "1").task.id
    assert problem("q", 1).task.id != problem("q", "1").task.id
    with pytest.raises(PluginError, match="give problem"):
        problem("q", object())
    assert problem("q", object(), id="mine").task.id == "mine"


async def test_artifacts_are_those_that_exist_and_fit() -> None:
    sandbox = FakeSandbox(files={"a.txt": b"yes", "big": b"x" * (1 << 21)})
    environment = Everything(sandbox=sandbox)
    await environment.reset(Task(id="t", prompt=(), artifacts=("a.txt", "big", "none")), seed=0)
    assert await environment.artifacts() == {"a.txt": b"yes"}
    with pytest.raises(EnvironmentFault, match="SandboxSpec"):
        await Everything(sandbox=None).reset(Task(id="t", prompt=(), artifacts=("a",)), seed=0)
        _ = Everything(sandbox=None).sandbox


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"stdout": b"4\n"}, "4"),
        ({"stdout": b"4\n", "stderr": b"a warning"}, "4"),
        ({"exit_code": 1, "stderr": b"Traceback: bad"}, "Traceback: bad"),
        ({"exit_code": 3}, "[exit code 3]"),
        ({"exit_code": None, "timed_out": True, "stdout": b"1\n"}, "1\ntimed out after 2 s"),
        ({"exit_code": 1, "out_of_memory": True, "stderr": b"oh"}, "oh\nout of memory"),
        ({"stdout": b"xx", "stdout_bytes": 99}, "xx\n[output cut: 99 bytes in all]"),
        ({"stdout": b"\xffa"}, "\ufffda"),
    ],
)  # fmt: skip
async def test_what_python_did_is_told(more: dict[str, Any], said: str) -> None:
    plain: dict[str, Any] = {"stdout": b"", "stderr": b"", "exit_code": 0, "seconds": 0.1}
    given = {**plain, **more}
    sizes = {"stdout_bytes": len(given["stdout"]), "stderr_bytes": len(given["stderr"])}
    result = ExecResult(**{**sizes, **given})
    async with FakeSandboxes(run=lambda argv: result).session(SandboxSpec()) as sandbox:
        assert await run_python(sandbox, "print(4)", timeout_s=2) == said
        with pytest.raises(ToolError, match="NUL"):
            await run_python(sandbox, "1\0", timeout_s=2)


def test_results_are_texts() -> None:
    assert as_text({"a": ["é"]}) == '{"a": ["é"]}'
    assert as_text(None) == ""
    assert as_text(b"\xff") == "\ufffd"
    assert as_text({1, }) == "{1}"  # fmt: skip
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(EnvironmentFault):
        asyncio.run(_Deep(deep).step(call("deep")))


class _Deep(ToolEnvironment):
    def __init__(self, value: Any) -> None:
        super().__init__(sandbox=None)
        self.value = value

    @tool
    def deep(self) -> Any:
        """Too deep."""
        return self.value
