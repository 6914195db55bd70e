"""Agent programs: what they ask becomes trajectories, token for token."""

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agents import GivenTool, OutsideAgent, serve
from agentrl.agents.program import Heard, run_program
from agentrl.errors import ConfigError, ContextFull, EngineFault, OutOfTurns, RequestError
from agentrl.protocols import ChatPolicy
from agentrl.replay.check import check_trajectory
from agentrl.rollout import Limits, Stage, run_episode, run_group, run_script
from agentrl.testing.fakes import (
    STOP,
    CharRenderer,
    FakeSandboxes,
    FakeVerifier,
    FixedEngine,
    ScriptedEngine,
    a_problem,
    says,
)
from agentrl.types import (
    Completion,
    Ending,
    Episode,
    Message,
    Sampling,
    SandboxSpec,
    Task,
    ToolCall,
    Trajectory,
    assistant,
    system,
    user,
)

Program = Callable[[Task, ChatPolicy], Awaitable[Any]]
LIMITS = Limits(max_turns=20, max_action_tokens=400, context_tokens=20_000, timeout_s=20)
RENDERER = CharRenderer()
pytestmark = pytest.mark.timeout(60)


def agent(program: Program) -> type[OutsideAgent]:
    class Agent(OutsideAgent):
        verifier = FakeVerifier()

        async def run_agent(self, task: Task, policy: ChatPolicy, *, seed: int) -> bool:
            return await program(task, policy) is not False

        @staticmethod
        def problems(split: str) -> list[Any]:
            return [a_problem()]

    return Agent


def stage(program: Program, engine: Any, limits: Limits = LIMITS) -> Stage:
    return Stage(engine=engine, renderer=RENDERER, environment=agent(program), limits=limits)


async def played(program: Program, *texts: str, limits: Limits = LIMITS) -> Episode:
    engine = counting(*texts)
    return await run_episode(stage(program, engine, limits), a_problem().task, member=0, seed=0)


def counting(*texts: str, delays: Sequence[float] = ()) -> ScriptedEngine:
    """Says one text after the other, whatever is asked."""
    asked = 0

    def choose(prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        nonlocal asked
        asked += 1
        return RENDERER.write(assistant(texts[min(asked, len(texts)) - 1]))

    return ScriptedEngine(choose=choose)


def well_formed(episode: Episode) -> list[Trajectory]:
    """Its trajectories, held against the digests of what the engine saw."""
    found = [episode.trajectory, *episode.segments]
    for trajectory in found:
        assert [f.what for f in check_trajectory(trajectory) if f.level == "problem"] == []
    return found


# ---------------------------------------------------------------- matching


async def test_a_talk_that_goes_on_appends_to_the_sampled_ids() -> None:
    async def program(task: Task, policy: ChatPolicy) -> None:
        first = await policy.complete([user("hi")])
        await policy.complete([user("hi"), first.message, user("more")])

    (one,) = well_formed(await played(program, "  a ", "b"))
    assert [t.message.content for t in one.turns] == ["  a ", "b"]
    assert one.turns[0].reply == (user("more"),)
    written = RENDERER.write(assistant("  a "))
    assert one.turns[0].action.token_ids == written
    assert one.turns[1].observation.token_ids == RENDERER.extend([user("more")], STOP)
    assert one.ending is Ending.ANSWERED


async def test_blanks_thinking_and_json_may_differ_in_what_comes_back() -> None:
    tools = [GivenTool(name="f", schema={"type": "function", "function": {"name": "f"}})]

    async def program(task: Task, policy: ChatPolicy) -> None:
        said = (await policy.complete([user("hi")], tools)).message
        (call,) = said.tool_calls
        again = ToolCall(id=call.id, name="f", arguments='{ "b":2,"a":1}')
        told = Message(role="assistant", content=" a\n", tool_calls=(again,))
        result = Message(role="tool", content="3", tool_call_id=call.id)
        await policy.complete([user("hi"), told, result], tools)

    (one,) = well_formed(await played(program, 'a\n@f {"a": 1, "b": 2}', "b"))
    assert len(one.turns) == 2


async def test_a_fork_begins_with_the_recorded_ids_and_trains_no_action_twice() -> None:
    async def program(task: Task, policy: ChatPolicy) -> None:
        first = (await policy.complete([user("hi")])).message
        await policy.complete([user("hi"), first, user("left")])
        await policy.complete([user("hi"), first, user("right")])

    fork, trunk = well_formed(await played(program, "a", "b", "c"))
    assert [t.message.content for t in trunk.turns] == ["a", "b"]
    assert [t.message.content for t in fork.turns] == ["c"]
    assert (fork.id, trunk.id) == ("task/0/0", "task/0/0.1")
    shared = trunk.token_ids[: len(trunk.turns[0].observation.token_ids) + 2]
    assert fork.turns[0].observation.token_ids[: len(shared)] == shared
    assert fork.prompt == (user("hi"), assistant("a"), user("right"))


async def test_a_retry_is_a_segment_and_either_may_go_on() -> None:
    async def program(task: Task, policy: ChatPolicy) -> None:
        await policy.complete([user("hi")])
        second = (await policy.complete([user("hi")])).message
        await policy.complete([user("hi"), second, user("go")])

    again, first = well_formed(await played(program, "a", "b", "c"))
    assert [t.message.content for t in first.turns] == ["a"]
    assert [t.message.content for t in again.turns] == ["b", "c"]


async def test_two_requests_at_once_from_one_place_are_two_segments() -> None:
    async def program(task: Task, policy: ChatPolicy) -> None:
        first = (await policy.complete([user("hi")])).message
        await asyncio.gather(
            *(policy.complete([user("hi"), first, user(text)]) for text in ("x", "y"))
        )

    found = well_formed(await played(program, "a", "b", "c"))
    assert sorted(len(t.turns) for t in found) == [1, 2]


async def test_a_rewritten_history_is_a_new_talk() -> None:
    async def program(task: Task, policy: ChatPolicy) -> None:
        await policy.complete([user("hi")])
        await policy.complete([user("hi"), assistant("never said"), user("go")])

    found = well_formed(await played(program, "a", "b"))
    assert [len(t.turns) for t in found] == [1, 1]
    assert found[0].metrics["segments"] == 2


async def test_other_tools_are_another_prompt() -> None:
    async def program(task: Task, policy: ChatPolicy) -> None:
        tool = GivenTool(name="f", schema={"type": "function", "function": {"name": "f"}})
        first = (await policy.complete([user("hi")])).message
        await policy.complete([user("hi"), first, user("go")], [tool])

    assert len(well_formed(await played(program, "a", "b"))) == 2


TALK = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["x", "y"])), max_size=6)


@given(moves=TALK)
@settings(max_examples=30, deadline=None)
def test_every_answer_is_recorded_once_and_every_record_replays_the_engine(moves: Any) -> None:
    """A program that goes on from any earlier point, in any order."""
    texts = [f"t{n}" for n in range(8)]
    engine = counting(*texts)

    async def program(task: Task, policy: ChatPolicy) -> None:
        talks = [(user("hi"),)]
        talks[0] += ((await policy.complete(talks[0])).message,)
        for which, text in moves:
            talk = (*talks[which % len(talks)], user(text))
            talks.append((*talk, (await policy.complete(talk)).message))

    running = run_episode(stage(program, engine), a_problem().task, member=0, seed=0)
    episode = asyncio.run(running)
    found = well_formed(episode)
    sampled = sorted(t.message.content for one in found for t in one.turns)
    assert sampled == sorted(texts[: len(moves) + 1])
    prompts = {ids for asked in engine.requests.values() for ids, _ in asked}
    for one in found:
        before: tuple[int, ...] = ()
        for turn in one.turns:
            before += turn.observation.token_ids
            assert before in prompts
            before += turn.action.token_ids


# ---------------------------------------------------------------- endings, limits, faults


async def test_a_bad_call_is_served_as_text() -> None:
    heard: list[Completion] = []

    async def program(task: Task, policy: ChatPolicy) -> None:
        heard.append(await policy.complete([user("hi")]))

    episode = await played(program, "so\n@f {broken")
    assert heard[0].message == assistant("so\n{broken")
    assert episode.trajectory.turns[0].message.tool_calls[0].error


async def test_a_bare_value_becomes_the_one_argument() -> None:
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}}
    schema = {"type": "function", "function": {"name": "run", "parameters": parameters}}
    heard: list[Completion] = []

    async def program(task: Task, policy: ChatPolicy) -> None:
        heard.append(await policy.complete([user("hi")], [GivenTool(name="run", schema=schema)]))

    await played(program, '@run "1+1"')
    assert heard[0].message.tool_calls[0].arguments == '{"code": "1+1"}'


async def test_a_stop_text_cuts_what_is_told_but_not_what_is_recorded() -> None:
    async def program(task: Task, policy: ChatPolicy) -> None:
        first = (await policy.complete([user("hi")], stop=["Observation:"])).message
        assert first.content == "look "
        await policy.complete([user("hi"), first, user("go")])

    (one,) = well_formed(await played(program, "look Observation: fake", "b"))
    assert one.turns[0].message.content == "look Observation: fake"
    assert len(one.turns) == 2


async def test_the_limits_end_the_episode_and_it_is_graded() -> None:
    async def greedy(task: Task, policy: ChatPolicy) -> None:
        for _ in range(10):
            await policy.complete([user("hi")])

    out = await played(greedy, "a", limits=Limits(max_turns=3))
    assert out.trajectory.ending is Ending.OUT_OF_TURNS
    assert len(out.segments) == 2

    async def growing(task: Task, policy: ChatPolicy) -> None:
        talk = [user("x" * 40)]
        while True:
            talk += [(await policy.complete(talk)).message, user("x" * 40)]

    full = await played(growing, "a", limits=Limits(context_tokens=120, max_action_tokens=20))
    assert full.trajectory.ending is Ending.OUT_OF_TOKENS

    async def short(task: Task, policy: ChatPolicy) -> None:
        assert (await policy.complete([user("hi")], max_tokens=2)).cut_off

    assert (await played(short, "abcdef")).trajectory.ending is Ending.CUT_OFF


async def test_a_refusal_that_the_program_survives_is_told_to_it() -> None:
    async def program(task: Task, policy: ChatPolicy) -> None:
        await policy.complete([user("hi")])
        with pytest.raises(ContextFull, match=r"context_tokens \(100\)"):
            await policy.complete([user("x" * 200)])
        with pytest.raises(RequestError, match="no messages"):
            await policy.complete([])
        await policy.complete([user("hi")])
        with pytest.raises(OutOfTurns):
            await policy.complete([user("hi")])

    limits = Limits(context_tokens=100, max_action_tokens=20, max_turns=3)
    assert (await played(program, "a", limits=limits)).trajectory.ending is Ending.OUT_OF_TURNS


async def test_a_slow_program_is_timed_out_and_stopped() -> None:
    stopped: list[bool] = []

    async def program(task: Task, policy: ChatPolicy) -> None:
        await policy.complete([user("hi")])
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(True)

    episode = await played(program, "a", limits=Limits(timeout_s=0.3))
    assert episode.trajectory.ending is Ending.TIMED_OUT
    assert stopped == [True]


@pytest.mark.parametrize("begun", [True, False])
async def test_a_broken_engine_takes_the_member_whatever_the_program_does(begun: bool) -> None:
    class Broken(ScriptedEngine):
        async def sample(self, *args: Any, **more: Any) -> Any:
            if begun and not self.requests:
                return await super().sample(*args, **more)
            raise EngineFault("gone")

    async def stubborn(task: Task, policy: ChatPolicy) -> None:
        for _ in range(3):
            try:
                await policy.complete([user("hi")])
            except Exception:
                await asyncio.sleep(0.01)

    engine = Broken(choose=lambda ids, sampling: (9, STOP))
    group = await run_group(stage(stubborn, engine), a_problem(), size=2, seed=0)
    assert group.faults == ("EngineFault: gone",) * 2


async def test_a_program_that_fails_or_never_asks_is_the_authors_fault() -> None:
    async def raises(task: Task, policy: ChatPolicy) -> None:
        raise KeyError("x")

    async def idles(task: Task, policy: ChatPolicy) -> None:
        return

    for program, why in ((raises, "KeyError"), (idles, "it never asked")):
        group = await run_group(stage(program, counting("a")), a_problem(), size=1, seed=0)
        assert why in group.faults[0]


async def test_members_share_the_verdict_of_their_episode() -> None:
    async def program(task: Task, policy: ChatPolicy) -> None:
        await policy.complete([user("hi")])
        await policy.complete([user("hi")])

    group = await run_group(stage(program, FixedEngine("a")), a_problem(), size=3, seed=0)
    assert group.members == ((0, 1), (2, 3), (4, 5))
    assert group.rewards == (1.0, 1.0, 1.0)
    assert len({t.id for t in group.trajectories}) == 6


async def test_a_script_can_stand_in_for_the_policy() -> None:
    async def program(task: Task, policy: ChatPolicy) -> None:
        talk = [system("s"), user("hi")]
        while True:
            talk += [(await policy.complete(talk)).message, user("and?")]

    there = stage(program, counting("a"))
    episode = await run_script(there, a_problem(), says(assistant("one"), assistant("two")))
    assert [t.message.content for t in episode.trajectory.turns] == ["one", "two"]
    assert episode.trajectory.ending is Ending.OUT_OF_TURNS


# ---------------------------------------------------------------- dialects

RUN: Any = {
    "name": "run",
    "description": "Run it.",
    "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
}
TEXTS = ('so\n@run {"code": "1+1"}', "two")


async def open_ai_responses(policy: ChatPolicy, stream: bool) -> str:
    openai = pytest.importorskip("openai")
    items: list[Any] = [{"role": "user", "content": "hi"}]
    async with (
        serve(policy) as endpoint,
        openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key) as client,
    ):
        while True:
            more = {"model": "any", "input": items, "instructions": "be brief",
                    "tools": [{"type": "function", "strict": False, **RUN}]}  # fmt: skip
            if stream:
                async with client.responses.stream(**more) as stream_:
                    answer = await stream_.get_final_response()
            else:
                answer = await client.responses.create(**more)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            for call in calls:
                assert call.arguments == '{"code": "1+1"}'
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
                )


async def anthropic_messages(policy: ChatPolicy, stream: bool) -> str:
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "run", "description": "Run it.", "input_schema": RUN["parameters"]}
    talk: list[Any] = [{"role": "user", "content": "hi"}]
    async with (
        serve(policy) as endpoint,
        anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key) as client,
    ):
        while True:
            more = {"model": "any", "max_tokens": 50, "system": "be brief", "messages": talk,
                    "tools": [tool]}  # fmt: skip
            if stream:
                async with client.messages.stream(**more) as stream_:
                    answer = await stream_.get_final_message()
            else:
                answer = await client.messages.create(**more)
            talk.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                assert answer.stop_reason == "end_turn"
                return answer.content[0].text
            assert [call.input for call in calls] == [{"code": "1+1"}]
            talk.append({
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
                    for call in calls
                ],
            })  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("loop", [open_ai_responses, anthropic_messages])
async def test_other_dialects_are_recorded_as_one_talk(loop: Any, stream: bool) -> None:
    told: list[str] = []

    async def program(task: Task, policy: ChatPolicy) -> None:
        told.append(await loop(policy, stream))

    (one,) = well_formed(await played(program, *TEXTS))
    assert told == ["two"]
    assert one.prompt == (system("be brief"), user("hi"))
    assert [t.message.content for t in one.turns] == ["so", "two"]
    (result,) = one.turns[0].reply
    assert (result.role, result.content, result.tool_call_id) == ("tool", "2", "call_0_0")


# ---------------------------------------------------------------- programs


def command(tmp_path: Path, code: str) -> type[OutsideAgent]:
    path = tmp_path / "agent.py"
    path.write_text(code)

    class Agent(OutsideAgent):
        verifier = FakeVerifier()
        command = (sys.executable, "-S", str(path))

    return Agent


ASKS = """
import json, os, sys, urllib.request

def ask(text, key=os.environ["OPENAI_API_KEY"]):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + key}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


async def run_command(tmp_path: Path, code: str, **limits: Any) -> Any:
    there = Stage(
        engine=FixedEngine("a"), renderer=RENDERER, environment=command(tmp_path, ASKS + code),
        limits=Limits(**limits),
    )  # fmt: skip
    return await run_group(there, a_problem("what?"), size=1, seed=0)


async def test_a_program_gets_its_task_and_what_it_prints_is_kept(tmp_path: Path) -> None:
    code = """
task = json.loads(os.environ["AGENTRL_TASK"])
print(task["id"], ask(sys.stdin.read()), os.listdir("."))
"""
    group = await run_command(tmp_path, code)
    assert group.artifacts == ({"stdout": b"task a []\n"},)
    assert group.trajectories[0].prompt == (user("what?"),)


async def test_a_program_sees_no_secret_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hush")
    group = await run_command(tmp_path, "ask('x'); print('MY_TOKEN' in os.environ)")
    assert group.artifacts[0]["stdout"] == b"False\n"


async def test_a_failing_program_is_graded_once_the_policy_has_spoken(tmp_path: Path) -> None:
    group = await run_command(tmp_path, "ask('x'); sys.exit(3)")
    assert group.trajectories[0].ending is Ending.TRUNCATED
    group = await run_command(tmp_path, "sys.exit('no such thing')")
    assert "exit code 1 before the policy's first answer: no such thing" in group.faults[0]


async def test_a_stopped_program_is_killed_with_its_children(tmp_path: Path) -> None:
    code = """
import subprocess, time
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
time.sleep(60)
"""
    heard = Heard()
    argv = [sys.executable, "-S", "-c", code]
    running = asyncio.create_task(
        run_program(argv, environ={}, stdin=b"", folder=tmp_path, heard=heard)
    )
    while not heard.stdout.endswith(b"\n"):
        await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.wait({running})
    child = Path("/proc", heard.stdout.decode().strip(), "status")
    end = time.monotonic() + 10
    while _is_alive(child) and time.monotonic() < end:
        await asyncio.sleep(0.05)
    assert not _is_alive(child)


def _is_alive(status: Path) -> bool:
    try:
        return "zombie" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_wrong_key_and_a_wrong_body_are_refused() -> None:
    httpx = pytest.importorskip("httpx")

    class Echo:
        async def complete(self, messages: Any, tools: Any = (), **_: Any) -> Completion:
            said = assistant(messages[-1].content)
            return Completion(message=said, cut_off=False, prompt_tokens=1, action_tokens=1)

    async with serve(Echo()) as endpoint, httpx.AsyncClient(base_url=endpoint.url) as client:
        path, good = "/v1/chat/completions", {"Authorization": f"Bearer {endpoint.key}"}
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert (await client.post(path, json=body)).status_code == 401
        assert (await client.post(path, json=body, headers=good)).status_code == 200
        for wrong, why in (
            ({"messages": [{"role": "boss", "content": "x"}]}, "messages.0.role"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
            ({**body, "n": 2}, "n: ask several times"),
            ({**body, "response_format": {"type": "json_object"}}, "response_format"),
            ({}, "messages: Field required"),
            ([], "not an object"),
        ):
            answer = await client.post(path, json=wrong, headers=good)
            assert answer.status_code == 400
            assert why in answer.json()["error"]["message"]


def test_an_agent_without_a_command_says_so() -> None:
    class Nothing(OutsideAgent):
        verifier = FakeVerifier()

    there = Stage(engine=counting("a"), renderer=RENDERER, environment=Nothing)
    group = asyncio.run(run_group(there, a_problem(), size=1, seed=0))
    assert "Nothing has no command" in group.faults[0]
    assert issubclass(ConfigError, ValueError)


async def test_the_documentation_is_true() -> None:
    text = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
    program, coder = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    made: dict[str, Any] = {}
    exec(program, made)
    assert len(made["MyAgent"].problems("train")) == 80
    exec(coder, made)

    class Coder(made["Coder"]):
        verifier = FakeVerifier()

    there = Stage(
        engine=FixedEngine("print(1)", "DONE"), renderer=RENDERER, environment=Coder,
        sandboxes=FakeSandboxes(), limits=LIMITS,
    )  # fmt: skip
    group = await run_group(there, a_problem(sandbox=SandboxSpec()), size=1, seed=0)
    assert [len(t.turns) for t in group.trajectories] == [2]
