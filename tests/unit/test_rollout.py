"""Episodes: what is recorded, what ends them, and whose fault a failure is."""

import asyncio
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import (
    ConfigError,
    EngineFault,
    EnvironmentFault,
    SandboxFault,
    SandboxLost,
    ToolError,
)
from agentrl.rollout import (
    SCRIPT_VERSION,
    Limits,
    Stage,
    fit_reply,
    run_episode,
    run_group,
    run_script,
    sampling_seed,
)
from agentrl.rollout.sandbox import SandboxOnDemand
from agentrl.testing.fakes import (
    STOP,
    CharRenderer,
    FakeEnvironment,
    FakeSandboxes,
    FakeTool,
    FakeVerifier,
    FixedEngine,
    ScriptedEngine,
    a_problem,
    call,
    echo,
    ends_at_once,
    right_answer,
    says,
)
from agentrl.types import (
    ActionTokens,
    Ending,
    Message,
    Messages,
    Problem,
    SandboxSpec,
    Step,
    Task,
    ToolEvent,
    assistant,
    digest_of_ids,
    user,
)

CHARS = CharRenderer()


def a_stage(engine: Any = None, environment: Any = None, **changes: Any) -> Stage:
    limits = Limits(**{k: changes.pop(k) for k in list(changes) if k in Limits.__slots__})
    return Stage(
        engine=engine or FixedEngine("42"),
        renderer=changes.pop("renderer", CHARS),
        environment=environment or FakeEnvironment(),
        limits=limits,
        **changes,
    )


async def one(stage: Stage, problem: Problem | None = None, seed: int = 7):
    return await run_episode(stage, (problem or a_problem()).task, member=0, seed=seed)


def tool(text: str, id: str = "call_0") -> Message:
    return Message(role="tool", content=text, tool_call_id=id)


# ---------------------------------------------------------------- the record


async def test_one_turn_is_prompt_action_and_nothing_more() -> None:
    trajectory = (await one(a_stage(FixedEngine("42", version=3)))).trajectory
    prompt = CHARS.open((user("?"),), ())
    assert trajectory.token_ids == (*prompt, *CHARS.write(assistant("42")))
    assert trajectory.action_mask == (False,) * len(prompt) + (True,) * 3
    assert trajectory.versions == (None,) * len(prompt) + (3, 3, 3)
    assert (trajectory.answer, trajectory.ending) == ("42", Ending.ANSWERED)


async def test_each_turn_adds_to_what_the_engine_saw_before() -> None:
    engine = FixedEngine('one\n@f {"a": 1}', '@f {"b": 2}', "done")
    trajectory = (await one(a_stage(engine, FakeEnvironment(answer=echo)))).trajectory
    (requests,) = engine.requests.values()
    prompts = [prompt for prompt, _ in requests]
    assert [turn.seen for turn in trajectory.turns] == [digest_of_ids(p) for p in prompts]
    assert len(prompts) == len(trajectory.turns) == 3
    for turn, (before, after) in zip(
        trajectory.turns,
        zip(prompts, [*prompts[1:], trajectory.token_ids], strict=True),
        strict=True,
    ):
        grown = (*before, *turn.action.token_ids)
        assert after[: len(grown)] == grown
    assert CHARS.text(trajectory.token_ids).count('{"a": 1}') == 2  # the call, and its echo


async def test_newline_after_the_stop_token_is_scaffold_exactly_once() -> None:
    engine = FixedEngine("@f {}", "done")
    trajectory = (await one(a_stage(engine, FakeEnvironment(answer=echo)))).trajectory
    first, second = trajectory.turns
    assert first.action.token_ids[-1] == STOP
    assert CHARS.text(second.observation.token_ids) == "\n{}\n"
    assert second.observation.token_ids[0] != STOP


async def test_stop_token_that_was_not_sampled_is_added_as_scaffold() -> None:
    ids = [(*CHARS.write(assistant("@f {}"))[:-1],), CHARS.write(assistant("done"))]

    def choose(prompt_ids: Sequence[int], sampling: Any) -> Sequence[int]:
        return ids[sum(i == 3 for i in prompt_ids) - 1]

    trajectory = (
        await one(a_stage(ScriptedEngine(choose), FakeEnvironment(answer=echo)))
    ).trajectory
    first, second = trajectory.turns
    assert STOP not in first.action.token_ids
    assert second.observation.token_ids[0] == STOP
    assert sum(trajectory.action_mask) == 5 + 5


async def test_opening_text_that_only_reset_knows_is_in_the_first_prompt() -> None:
    class Told(FakeEnvironment):
        def __call__(self, *, sandbox: Any) -> Any:
            episode = super().__call__(sandbox=sandbox)

            class Telling:
                tools = (FakeTool("f"),)
                step, artifacts = episode.step, episode.artifacts

                async def reset(self, task: Task, *, seed: int):
                    return (user(f"secret word {seed}"),), {}

            return Telling()

    trajectory = (await one(a_stage(environment=Told()))).trajectory
    assert "secret word 7" in CHARS.text(trajectory.turns[0].observation.token_ids)
    assert trajectory.prompt == (user("secret word 7"),)
    assert "tools: f" in CHARS.text(trajectory.token_ids)


async def test_reply_to_the_last_action_is_kept_as_messages_not_tokens() -> None:
    environment = FakeEnvironment(
        answer=lambda action, turn: Step(observation=(tool("bye"),), reward=0.5, terminated=True)
    )
    trajectory = (await one(a_stage(environment=environment))).trajectory
    assert trajectory.turns[-1].reply == (tool("bye"),)
    assert trajectory.turns[-1].reward == 0.5
    assert "bye" not in CHARS.text(trajectory.token_ids)
    assert trajectory.action_mask[-1]


async def test_events_and_seconds_are_recorded() -> None:
    event = ToolEvent(
        turn=0, call_id="call_0", name="f", status="ok", at_s=0.0, seconds=0.1, output_bytes=1
    )
    environment = FakeEnvironment(
        answer=lambda action, turn: Step(terminated=True, events=(event,)), delay_s=0.03
    )
    trajectory = (await one(a_stage(FixedEngine("x", delay_s=0.02), environment))).trajectory
    assert trajectory.events == (event,)
    seconds = trajectory.metrics
    assert 0.02 <= seconds["sample_s"] < 1 and 0.03 <= seconds["tools_s"] < 1
    assert seconds["total_s"] >= seconds["sample_s"] + seconds["tools_s"] + seconds["open_s"] - 1e-3


# ---------------------------------------------------------------- endings


async def test_endless_calls_end_at_the_turn_limit_with_the_whole_record() -> None:
    environment = FakeEnvironment(answer=echo)
    trajectory = (await one(a_stage(FixedEngine("@f {}"), environment, max_turns=3))).trajectory
    assert trajectory.ending is Ending.OUT_OF_TURNS
    assert len(trajectory.turns) == environment.log.count("step") == 3
    assert trajectory.turns[-1].reply == (tool("{}"),)


async def test_success_on_the_last_allowed_turn_is_an_answer() -> None:
    stage = a_stage(FixedEngine("@f {}", "done"), FakeEnvironment(answer=echo), max_turns=2)
    assert (await one(stage)).trajectory.ending is Ending.ANSWERED


async def test_environment_may_truncate() -> None:
    environment = FakeEnvironment(answer=lambda action, turn: Step(truncated=True))
    assert (await one(a_stage(environment=environment))).trajectory.ending is Ending.TRUNCATED


async def test_action_that_hits_its_limit_is_cut_off_and_its_call_not_run() -> None:
    environment = FakeEnvironment(answer=echo)
    stage = a_stage(FixedEngine('@f {"a": 1}'), environment, max_action_tokens=5)
    trajectory = (await one(stage)).trajectory
    assert trajectory.ending is Ending.CUT_OFF
    assert trajectory.turns[0].action.finish == "length"
    assert len(trajectory.turns[0].action.token_ids) == 5
    assert "step" not in environment.log


async def test_finish_is_the_engines_word_not_guessed_from_the_last_id() -> None:
    class Odd(ScriptedEngine):
        async def sample(self, prompt_ids: Any, sampling: Any, *, session: str) -> ActionTokens:
            action = await super().sample(prompt_ids, sampling, session=session)
            return replace(action, finish=self.finish)

    stopped = Odd(lambda *_: (65,))
    stopped.finish = "stop"  # type: ignore[attr-defined]
    assert (await one(a_stage(stopped))).trajectory.ending is Ending.ANSWERED
    cut = Odd(lambda *_: (65, STOP))
    cut.finish = "length"  # type: ignore[attr-defined]
    assert (await one(a_stage(cut))).trajectory.ending is Ending.CUT_OFF


async def test_action_budget_is_cut_to_the_context() -> None:
    prompt = len(CHARS.open((user("?"),), ()))
    engine = FixedEngine("a" * 20)
    trajectory = (await one(a_stage(engine, context_tokens=prompt + 5))).trajectory
    ((_, sampling),) = next(iter(engine.requests.values()))
    assert sampling.max_tokens == 5
    assert len(trajectory.token_ids) == prompt + 5
    assert trajectory.ending is Ending.OUT_OF_TOKENS


async def test_answer_that_fits_is_kept_though_no_further_turn_would() -> None:
    prompt = len(CHARS.open((user("?"),), ()))
    stage = a_stage(
        FixedEngine("42"), FakeEnvironment(answer=ends_at_once), context_tokens=prompt + 3
    )
    assert (await one(stage)).trajectory.ending is Ending.ANSWERED


async def test_reply_that_leaves_no_room_to_act_ends_the_episode() -> None:
    prompt = len(CHARS.open((user("?"),), ()))
    action = CHARS.write(assistant("@f {}"))
    reply = len(CHARS.extend((tool("{}"),), STOP))
    engine = FixedEngine("@f {}", "done")
    full = prompt + len(action) + reply
    short = (
        await one(a_stage(engine, FakeEnvironment(answer=echo), context_tokens=full))
    ).trajectory
    assert short.ending is Ending.OUT_OF_TOKENS
    assert (len(short.turns), short.turns[0].reply) == (1, (tool("{}"),))
    enough = a_stage(engine, FakeEnvironment(answer=echo), context_tokens=full + 1)
    assert len((await one(enough)).trajectory.turns) == 2


async def test_prompt_over_the_context_is_a_fault_that_names_the_task() -> None:
    with pytest.raises(EnvironmentFault, match=r"task long: its prompt has 10\d tokens.*\(50\)"):
        await one(a_stage(context_tokens=50), a_problem("x" * 100, id="long"))


# ---------------------------------------------------------------- long replies


def reply_of(text: str) -> FakeEnvironment:
    event = ToolEvent(
        turn=0,
        call_id="call_0",
        name="f",
        status="ok",
        at_s=0.0,
        seconds=0.0,
        output_bytes=len(text.encode()),
    )
    return FakeEnvironment(
        answer=lambda action, turn: (
            Step(observation=(tool(text),), events=(event,))
            if action.tool_calls
            else Step(terminated=True)
        )
    )


async def test_long_reply_is_cut_to_tokens_and_says_so() -> None:
    stage = a_stage(FixedEngine("@f {}", "ok"), reply_of("🙂" * 1000), max_observation_tokens=100)
    trajectory = (await one(stage)).trajectory
    shown = trajectory.turns[1].observation.token_ids
    assert 95 <= len(shown) <= 100
    assert "characters left out" in CHARS.text(shown)
    assert trajectory.turns[0].reply[0].content in CHARS.text(shown)
    (event,) = trajectory.events
    assert event.cut and event.output_bytes == 4000


async def test_reply_within_the_limit_is_whole() -> None:
    stage = a_stage(FixedEngine("@f {}", "ok"), reply_of("x" * 90), max_observation_tokens=100)
    trajectory = (await one(stage)).trajectory
    assert trajectory.turns[0].reply == (tool("x" * 90),)
    assert not trajectory.events[0].cut


async def test_reply_that_cannot_be_cut_enough_ends_the_episode() -> None:
    def many(action: Message, turn: int) -> Step:
        return Step(observation=tuple(tool("", id=str(i)) for i in range(100)))

    stage = a_stage(FixedEngine("x"), FakeEnvironment(answer=many), max_observation_tokens=50)
    assert (await one(stage)).trajectory.ending is Ending.OUT_OF_TOKENS


@given(
    texts=st.lists(st.text(max_size=200), min_size=1, max_size=4),
    limit=st.integers(1, 300),
    last=st.sampled_from([STOP, 65]),
)
def test_fitted_replies_fit_and_never_grow(texts: list[str], limit: int, last: int) -> None:
    reply = tuple(tool(text, id=str(i)) for i, text in enumerate(texts))
    fitted = fit_reply(CHARS, reply, last_id=last, max_tokens=limit)
    if fitted is None:
        assert len(CHARS.extend(reply, last)) > limit
        return
    ids, shown = fitted
    assert len(ids) <= limit and ids == CHARS.extend(shown, last)
    for whole, part in zip(reply, shown, strict=True):
        assert (part is whole) == (part.content == whole.content)
        assert len(part.content) <= len(whole.content)


# ---------------------------------------------------------------- time


async def test_one_limit_covers_all_phases() -> None:
    class Slow(FakeEnvironment):
        def __call__(self, *, sandbox: Any) -> Any:
            episode = super().__call__(sandbox=sandbox)
            reset = episode.reset

            async def slow_reset(task: Task, *, seed: int) -> Any:
                await asyncio.sleep(0.2)
                return await reset(task, seed=seed)

            episode.reset = slow_reset  # type: ignore[method-assign]
            return episode

    stage = a_stage(
        FixedEngine("@f {}", delay_s=0.1),
        Slow(answer=echo, delay_s=0.2),
        timeout_s=0.6,
        max_turns=100,
        context_tokens=9999,
        sandboxes=FakeSandboxes(delay_s=0.1),
    )
    begun = time.monotonic()
    trajectory = (await one(stage, a_problem(sandbox=SandboxSpec()))).trajectory
    assert time.monotonic() - begun < 1.2
    assert trajectory.ending is Ending.TIMED_OUT
    assert trajectory.turns and trajectory.action_mask[-1]
    assert trajectory.metrics["total_s"] >= 0.5


async def test_timed_out_episode_is_graded_with_its_artifacts() -> None:
    environment = FakeEnvironment(
        answer=echo, delay_s=10, kept={"out.txt": b"half done"}, verifier=FakeVerifier()
    )
    environment.verifier = FakeVerifier(
        rate=lambda problem, episode: 0.6 * (episode.artifacts["out.txt"] == b"half done")
    )
    stage = a_stage(FixedEngine("@f {}"), environment, timeout_s=0.2)
    group = await run_group(stage, a_problem(), size=1, seed=1)
    assert group.trajectories[0].ending is Ending.TIMED_OUT
    assert group.rewards == (0.6,)


async def test_late_result_is_ignored() -> None:
    late: list[str] = []

    class Deaf(FakeEnvironment):
        """Swallows its cancellation and answers all the same."""

        def __call__(self, *, sandbox: Any) -> Any:
            episode = super().__call__(sandbox=sandbox)

            async def step(action: Message) -> Step:
                for _ in range(8):
                    try:
                        await asyncio.sleep(0.05)
                    except asyncio.CancelledError:
                        late.append("swallowed")
                late.append("answered")
                return Step(observation=(tool("too late"),))

            episode.step = step  # type: ignore[method-assign]
            return episode

    engine = FixedEngine("@f {}")
    episode = await one(a_stage(engine, Deaf(), timeout_s=0.1))
    await asyncio.sleep(0.5)
    assert late == ["swallowed", "answered"]
    assert episode.trajectory.ending is Ending.TIMED_OUT
    assert [turn.reply for turn in episode.trajectory.turns] == [()]
    assert [len(r) for r in engine.requests.values()] == [1]


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (a_stage(FixedEngine("x", delay_s=9), timeout_s=0.1), EngineFault),
        (
            a_stage(
                environment=FakeEnvironment(sets_up=True),
                timeout_s=0.1,
                sandboxes=FakeSandboxes(delay_s=9),
            ),
            SandboxFault,
        ),
    ],
)
async def test_no_action_in_time_is_a_fault(stage: Stage, fault: type[Exception]) -> None:
    with pytest.raises(fault, match=r"0\.1 s"):
        await one(stage, a_problem(sandbox=SandboxSpec() if stage.sandboxes else None))


async def test_artifacts_that_take_too_long_are_left_out() -> None:
    class Endless(FakeEnvironment):
        def __call__(self, *, sandbox: Any) -> Any:
            episode = super().__call__(sandbox=sandbox)
            episode.artifacts = lambda: asyncio.sleep(9)  # type: ignore[method-assign]
            return episode

    episode = await one(a_stage(environment=Endless(), timeout_s=0.2))
    assert (episode.trajectory.ending, episode.artifacts) == (Ending.TIMED_OUT, {})


# ---------------------------------------------------------------- whose fault


class Raising(FakeEnvironment):
    """Raises in one phase."""

    def __init__(self, phase: str, error: BaseException) -> None:
        super().__init__(answer=echo, sets_up=True)
        self.phase, self.error = phase, error

    def __call__(self, *, sandbox: Any) -> Any:
        if self.phase == "make":
            raise self.error
        episode = super().__call__(sandbox=sandbox)

        async def fail(*args: Any, **options: Any) -> Any:
            raise self.error

        setattr(episode, self.phase, fail)
        return episode


@pytest.mark.parametrize("phase", ["make", "reset", "step", "artifacts"])
@pytest.mark.parametrize(
    "error", [KeyError("x"), ToolError("y"), TimeoutError("z"), OSError(5, "w")]
)
async def test_exception_of_an_environment_is_its_fault(phase: str, error: Exception) -> None:
    with pytest.raises(EnvironmentFault, match=type(error).__name__):
        await one(a_stage(environment=Raising(phase, error)))


@pytest.mark.parametrize("phase", ["reset", "step", "artifacts"])
@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
async def test_environment_that_exits_or_cancels_itself_ends_only_its_member(
    phase: str, error: BaseException
) -> None:
    group = await run_group(a_stage(environment=Raising(phase, error)), a_problem(), size=2, seed=0)
    assert group.trajectories == ()
    assert [fault.partition(":")[0] for fault in group.faults] == ["EnvironmentFault"] * 2


async def test_fault_keeps_its_kind() -> None:
    with pytest.raises(SandboxFault, match="daemon gone"):
        await one(a_stage(environment=Raising("step", SandboxFault("daemon gone"))))


async def test_sandbox_lost_by_the_agent_ends_the_episode_and_is_graded() -> None:
    lost = Raising("step", SandboxLost("killed: out of memory"))
    lost.verifier = FakeVerifier(rate=lambda *_: 0.0)
    group = await run_group(a_stage(environment=lost), a_problem(), size=2, seed=0)
    assert [t.ending for t in group.trajectories] == [Ending.SANDBOX_LOST] * 2
    assert (group.rewards, group.faults) == ((0.0, 0.0), ())


async def test_sandbox_lost_at_the_artifacts_is_never_an_answer() -> None:
    episode = await one(a_stage(environment=Raising("artifacts", SandboxLost("gone"))))
    assert (episode.trajectory.ending, episode.artifacts) == (Ending.SANDBOX_LOST, {})


async def test_sandbox_lost_before_any_action_is_not_the_agents_doing() -> None:
    with pytest.raises(SandboxFault, match="before the first action"):
        await one(a_stage(environment=Raising("reset", SandboxLost("gone"))))


def fails(*_: Any) -> Sequence[int]:
    raise RuntimeError("CUDA error")


async def test_engine_failures_are_engine_faults() -> None:
    with pytest.raises(EngineFault, match="CUDA error"):
        await one(a_stage(ScriptedEngine(fails)))
    with pytest.raises(EngineFault, match="at least one"):
        await one(a_stage(ScriptedEngine(lambda *_: ())))


async def test_engine_that_gives_more_than_was_asked_for_is_refused() -> None:
    class Wordy(ScriptedEngine):
        async def sample(self, prompt_ids: Any, sampling: Any, *, session: str) -> ActionTokens:
            more = replace(sampling, max_tokens=99)
            return await super().sample(prompt_ids, more, session=session)

    with pytest.raises(EngineFault, match="9 tokens where 4 were allowed"):
        await one(a_stage(Wordy(lambda *_: (65,) * 9), max_action_tokens=4))


async def test_aborted_request_is_an_engine_fault() -> None:
    class Aborting(ScriptedEngine):
        async def sample(self, prompt_ids: Any, sampling: Any, *, session: str) -> ActionTokens:
            action = await super().sample(prompt_ids, sampling, session=session)
            return replace(action, finish="abort")

    with pytest.raises(EngineFault, match="aborted"):
        await one(a_stage(Aborting(lambda *_: (65,))))


async def test_step_without_answer_or_end_is_the_environments_fault() -> None:
    class Bare(CharRenderer):
        def extend(self, reply: Sequence[Message], last_id: int | None) -> tuple[int, ...]:
            return super().extend(reply, last_id) if reply else ()

    environment = FakeEnvironment(answer=lambda action, turn: Step())
    with pytest.raises(EnvironmentFault, match="no observation"):
        await one(a_stage(environment=environment, renderer=Bare()))


async def test_task_with_a_sandbox_needs_a_backend() -> None:
    with pytest.raises(ConfigError, match="needs a sandbox"):
        await run_group(a_stage(), a_problem(sandbox=SandboxSpec()), size=2, seed=0)
    graded_there = replace(a_problem(), grading=SandboxSpec())
    with pytest.raises(ConfigError, match="needs a sandbox"):
        await run_group(a_stage(), graded_there, size=2, seed=0)


# ---------------------------------------------------------------- sandbox


async def test_artifacts_before_the_sandbox_closes_grading_after() -> None:
    log: list[str] = []
    environment = FakeEnvironment(log=log, verifier=FakeVerifier(log=log), sets_up=True)
    stage = a_stage(environment=environment, sandboxes=FakeSandboxes(log=log))
    await run_group(stage, a_problem(sandbox=SandboxSpec()), size=1, seed=0)
    assert log == ["reset", "open", "exec set-up", "step", "artifacts", "close", "grade"]


async def test_sandbox_that_nobody_uses_is_never_opened() -> None:
    sandboxes = FakeSandboxes()
    await one(a_stage(sandboxes=sandboxes), a_problem(sandbox=SandboxSpec()))
    assert sandboxes.log == []


async def test_sandbox_is_open_before_the_clock_of_the_first_call_starts() -> None:
    log: list[str] = []
    stage = a_stage(
        FixedEngine("@f {}", "@f {}", "x"),
        FakeEnvironment(answer=echo, log=log),
        sandboxes=FakeSandboxes(log=log, delay_s=0.05),
    )
    episode = await one(stage, a_problem(sandbox=SandboxSpec()))
    assert log == ["reset", "open", "step", "step", "step", "artifacts", "close"]
    seconds = episode.trajectory.metrics
    assert seconds["open_s"] > 0.05 > seconds["tools_s"]


async def test_agent_is_not_blamed_for_a_sandbox_that_opens_too_slowly_in_mid_episode() -> None:
    sandboxes = FakeSandboxes(delay_s=9)
    stage = a_stage(
        FixedEngine("@f {}"), FakeEnvironment(answer=echo), sandboxes=sandboxes, timeout_s=0.2
    )
    with pytest.raises(SandboxFault, match=r"did not open within 0\.2 s"):
        await one(stage, a_problem(sandbox=SandboxSpec()))
    assert sandboxes.open_now == 0


async def test_tool_that_runs_out_of_time_leaves_the_opening_for_the_next_one() -> None:
    sandboxes = FakeSandboxes(delay_s=0.1)
    sandbox = SandboxOnDemand(sandboxes, SandboxSpec())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await sandbox.write_file("a", b"1")
    assert sandbox.opening
    await asyncio.gather(sandbox.write_file("a", b"2"), sandbox.write_file("b", b"3"))
    assert await sandbox.read_file("a", max_bytes=9) == b"2"
    await sandbox.close()
    await sandbox.close()
    assert (sandboxes.log.count("open"), sandboxes.open_now) == (1, 0)


async def test_every_sandbox_is_closed_before_the_group_is_graded() -> None:
    log: list[str] = []
    environment = FakeEnvironment(log=log, verifier=FakeVerifier(log=log), answer=echo)
    stage = a_stage(FixedEngine("@f {}", "x"), environment, sandboxes=FakeSandboxes(log=log))
    await run_group(stage, a_problem(sandbox=SandboxSpec()), size=5, seed=0)
    assert log.count("open") == log.count("close") == 5
    assert log[-1] == "grade"


@pytest.mark.parametrize("phase", ["make", "reset", "step", "artifacts"])
@pytest.mark.parametrize("error", [KeyError("x"), SandboxLost("y")])
async def test_sandbox_is_closed_whatever_fails(phase: str, error: Exception) -> None:
    sandboxes = FakeSandboxes()
    stage = a_stage(environment=Raising(phase, error), sandboxes=sandboxes)
    await run_group(stage, a_problem(sandbox=SandboxSpec()), size=3, seed=0)
    assert sandboxes.log.count("open") == (3 if phase in ("step", "artifacts") else 0)
    assert sandboxes.open_now == 0


async def test_cancelling_leaves_nothing_open() -> None:
    sandboxes, environment = FakeSandboxes(), FakeEnvironment(answer=echo, delay_s=9)
    stage = a_stage(FixedEngine("@f {}"), environment, sandboxes=sandboxes)
    running = asyncio.create_task(
        run_group(stage, a_problem(sandbox=SandboxSpec()), size=4, seed=0)
    )
    await asyncio.sleep(0.05)
    assert sandboxes.open_now == 4
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sandboxes.open_now == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_sandbox_that_cannot_be_closed_is_a_fault() -> None:
    class Stuck(FakeSandboxes):
        @asynccontextmanager
        async def session(self, spec: SandboxSpec):
            async with super().session(spec) as sandbox:
                yield sandbox
            raise OSError("busy")

    with pytest.raises(SandboxFault, match="closing the sandbox: OSError: busy"):
        await one(
            a_stage(environment=FakeEnvironment(sets_up=True), sandboxes=Stuck()),
            a_problem(sandbox=SandboxSpec()),
        )


# ---------------------------------------------------------------- groups and seeds


async def test_members_share_the_reset_but_not_the_sampling_seed() -> None:
    engine, environment = FixedEngine("@f {}", "x"), FakeEnvironment(answer=echo)
    await run_group(a_stage(engine, environment), a_problem(), size=3, seed=11)
    assert environment.resets == [11] * 3
    seeds = [s.seed for requests in engine.requests.values() for _, s in requests]
    assert len(set(seeds)) == 6
    again = FixedEngine("@f {}", "x")
    await run_group(a_stage(again, environment), a_problem(), size=3, seed=11)
    assert again.requests == engine.requests


def test_sampling_seeds_are_stable_and_fit_64_signed_bits() -> None:
    assert sampling_seed(0, 0, 0) == 6_436_203_349_130_839_549
    seeds = {sampling_seed(s, m, t) for s in range(9) for m in range(9) for t in range(9)}
    assert len(seeds) == 9**3
    assert all(0 <= s < 2**63 for s in seeds)


async def test_requests_carry_the_stages_sampling_and_the_renderers_stop_ids() -> None:
    engine = FixedEngine("x")
    await one(a_stage(engine, temperature=0.7, top_p=0.9, top_k=5, max_action_tokens=33))
    ((_, sampling),) = next(iter(engine.requests.values()))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 5)
    assert (sampling.stop_ids, sampling.max_tokens) == (CHARS.stop_ids, 33)


async def test_one_failing_member_leaves_an_uneven_group() -> None:
    made = 0

    class Sometimes(FakeEnvironment):
        def __call__(self, *, sandbox: Any) -> Any:
            nonlocal made
            made += 1
            return (
                Raising("reset", OSError("no route"))(sandbox=None)
                if made == 2
                else super().__call__(sandbox=sandbox)
            )

    group = await run_group(a_stage(environment=Sometimes()), a_problem(), size=4, seed=0)
    assert [t.member for t in group.trajectories] == [0, 2, 3]
    assert group.faults == ("EnvironmentFault: reset: OSError: no route",)


async def test_slow_tools_of_a_group_run_side_by_side() -> None:
    stage = a_stage(environment=FakeEnvironment(delay_s=0.2))
    begun = time.monotonic()
    await run_group(stage, a_problem(), size=8, seed=0)
    assert time.monotonic() - begun < 0.8


# ---------------------------------------------------------------- scripts


async def test_script_takes_the_same_path_and_sees_the_replies() -> None:
    heard: list[Messages] = []

    def oracle(problem: Problem) -> Generator[Message, Messages, None]:
        heard.append((yield assistant("", tool_calls=[call("add", a=1)])))
        yield assistant(str(problem.reference))

    environment = FakeEnvironment(answer=echo, verifier=FakeVerifier(rate=right_answer))
    problem = a_problem(reference=42)
    episode = await run_script(a_stage(environment=environment), problem, oracle)
    trajectory = episode.trajectory
    assert heard == [(tool('{"a": 1}'),)]
    assert (trajectory.answer, trajectory.ending) == ("42", Ending.ANSWERED)
    assert {turn.action.logprobs for turn in trajectory.turns} == {None}
    assert set(trajectory.versions) == {None, SCRIPT_VERSION}
    with pytest.raises(ValueError, match="turn 0 has no logprobs"):
        _ = trajectory.behavior_logprobs
    sampled = FixedEngine('\n@add {"a": 1}', "42")
    same = (await one(a_stage(sampled, environment), problem, seed=0)).trajectory
    assert same.token_ids == trajectory.token_ids
    assert same.action_mask == trajectory.action_mask


async def test_script_is_held_to_the_same_limits() -> None:
    long = says(assistant("x" * 50))
    trajectory = (await run_script(a_stage(max_action_tokens=9), a_problem(), long)).trajectory
    assert trajectory.ending is Ending.CUT_OFF
    assert trajectory.action_tokens == 9


async def test_script_without_more_lines_is_out_of_turns() -> None:
    stage = a_stage(environment=FakeEnvironment(answer=echo))
    once = says(assistant("", tool_calls=[call("f")]))
    trajectory = (await run_script(stage, a_problem(), once)).trajectory
    assert (trajectory.ending, len(trajectory.turns)) == (Ending.OUT_OF_TURNS, 1)
    nothing = (await run_script(stage, a_problem(), says())).trajectory
    assert (nothing.ending, nothing.turns, nothing.answer) == (Ending.OUT_OF_TURNS, (), "")


async def test_script_may_yield_from_a_plain_list() -> None:
    def lines(problem: Problem) -> Generator[Message, Messages, None]:
        yield from [assistant("", tool_calls=[call("f")]), assistant("", tool_calls=[call("g")])]
        yield from says(assistant("done"))(problem)

    stage = a_stage(environment=FakeEnvironment(answer=echo))
    trajectory = (await run_script(stage, a_problem(), lines)).trajectory
    assert [turn.message.content for turn in trajectory.turns] == ["", "", "done"]


async def test_script_that_raises_is_the_environments_fault_and_is_closed() -> None:
    closed: list[bool] = []

    def broken(problem: Problem) -> Generator[Message, Messages, None]:
        try:
            yield assistant("", tool_calls=[call("f")])
            raise ZeroDivisionError
        finally:
            closed.append(True)

    stage = a_stage(environment=FakeEnvironment(answer=echo))
    with pytest.raises(EnvironmentFault, match="the script: ZeroDivisionError"):
        await run_script(stage, a_problem(), broken)
    assert closed == [True]


async def test_script_needs_a_renderer_that_writes() -> None:
    class Reads:
        stop_ids = frozenset({0})
        open, parse, extend = CHARS.open, CHARS.parse, CHARS.extend

    with pytest.raises(ConfigError, match="Reads has no write"):
        await run_script(a_stage(renderer=Reads()), a_problem(), says())


# ---------------------------------------------------------------- the toy renderer, limits

WORDS = st.text(st.characters(exclude_characters="@\n", exclude_categories=["Cs"]), max_size=20)
NAMES = st.text("abc_", min_size=1, max_size=5)
CALLS = st.lists(st.builds(lambda n, a: (n, a), NAMES, st.dictionaries(NAMES, WORDS)), max_size=3)


@given(content=WORDS, calls=CALLS)
def test_toy_renderer_parses_what_it_writes(
    content: str, calls: list[tuple[str, Mapping[str, str]]]
) -> None:
    message = assistant(
        content, tool_calls=[call(n, id=f"call_{i}", **a) for i, (n, a) in enumerate(calls)]
    )
    assert CHARS.parse(CHARS.write(message)) == message


@given(st.lists(st.integers(0, 0x10FFFF + 8), max_size=50))
def test_toy_renderer_parses_anything(ids: list[int]) -> None:
    assert CHARS.parse(ids).role == "assistant"


@pytest.mark.parametrize("name", Limits.__slots__)
def test_limits_are_above_zero(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})
