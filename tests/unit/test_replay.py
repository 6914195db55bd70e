"""The rungs that need no model, on records made with fakes: what is in order, what departs, why."""

import asyncio
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, EnvironmentFault, RecordError
from agentrl.replay.check import Language, check_group, check_trajectory, mask_by_rendering
from agentrl.replay.diff import diff
from agentrl.replay.difference import first_difference
from agentrl.replay.fork import Edit, fork
from agentrl.replay.records import Recorded, Records
from agentrl.replay.reexecute import World, reexecute
from agentrl.replay.regrade import regrade
from agentrl.rollout import SCRIPT_VERSION, Limits, Stage, run_group
from agentrl.store import ParquetStore
from agentrl.testing.fakes import (
    CharRenderer,
    FakeEnvironment,
    FakeSandboxes,
    FakeTool,
    FakeVerifier,
    FixedEngine,
    ScriptedEngine,
    a_problem,
    echo,
    right_answer,
)
from agentrl.types import (
    Ending,
    Group,
    Message,
    ObservationTokens,
    SandboxSpec,
    Step,
    ToolEvent,
    Trajectory,
    Verdict,
    digest_of_ids,
)

CHARS = CharRenderer()
LANGUAGE = Language(renderer=CHARS)
CALL = '@f {"a": 1}'


def answering(say: Callable[[str, int], str]) -> Callable[[Message, int], Step]:
    """An environment that answers a call's arguments by `say`, and ends without a call."""

    def answer(action: Message, turn: int) -> Step:
        if not action.tool_calls:
            return Step(terminated=True)
        call = action.tool_calls[0]
        said = Message(role="tool", content=say(call.arguments, turn), tool_call_id=call.id)
        return Step(observation=(said,))

    return answer


def a_stage(environment: FakeEnvironment, engine: Any = None, **limits: Any) -> Stage:
    return Stage(
        engine=engine or FixedEngine(CALL, CALL, "done"),
        renderer=CHARS,
        environment=environment,
        sandboxes=FakeSandboxes(),
        limits=Limits(**limits),
    )


async def a_record(environment: FakeEnvironment, engine: Any = None, **limits: Any) -> Recorded:
    stage = a_stage(environment, engine, **limits)
    group = await run_group(stage, a_problem(reference="done"), size=2, seed=3)
    return Recorded(step=0, number=0, group=group, place=0)


async def again(recorded: Recorded, environment: Any, **world: Any):
    assert recorded.task is not None
    return await reexecute(recorded, recorded.task, World(environment=environment, **world))


def whole(trajectory: Trajectory, turn: int, **changes: Any) -> Trajectory:
    turns = list(trajectory.turns)
    turns[turn] = replace(turns[turn], **changes)
    return replace(trajectory, turns=tuple(turns))


# ---------------------------------------------------------------- check

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="@\n"), max_size=8)


@given(texts=st.lists(TEXTS, max_size=3), cut=st.none() | st.integers(1, 12))
def test_the_mask_is_found_again_from_words_alone(texts: list[str], cut: int | None) -> None:
    engine = FixedEngine(*(f"{text}\n{CALL}" for text in texts), "end")
    limits = {} if cut is None else {"max_action_tokens": cut}
    record = asyncio.run(a_record(FakeEnvironment(answer=echo), engine, **limits))
    assert mask_by_rendering(record.trajectory, LANGUAGE) == record.trajectory.action_mask
    assert list(check_group(record.group, LANGUAGE)) == []


async def test_tools_are_part_of_the_language() -> None:
    environment = FakeEnvironment(answer=echo, tools=(FakeTool("f"),))
    record = await a_record(environment)
    fits = Language(renderer=CHARS, tools=environment.tools)
    assert not list(check_group(record.group, fits))
    assert list(check_group(record.group, LANGUAGE))


def moved_boundary(trajectory: Trajectory) -> Trajectory:
    """One sampled token is called an observation."""
    turn = trajectory.turns[1]
    ids, action = turn.action.token_ids, turn.action
    assert action.logprobs is not None
    return whole(
        trajectory,
        1,
        observation=ObservationTokens(token_ids=(*turn.observation.token_ids, ids[0])),
        action=replace(
            action,
            token_ids=ids[1:],
            logprobs=action.logprobs[1:],
            versions=action.versions[1:],
        ),
    )


def other_id(trajectory: Trajectory) -> Trajectory:
    ids = (9, *trajectory.turns[0].observation.token_ids[1:])
    return whole(trajectory, 0, observation=ObservationTokens(token_ids=ids))


CORRUPTED = {
    "a moved boundary": (moved_boundary, "mask by author and mask by rendering differ"),
    "another id": (other_id, "not what the engine saw"),
    "another id, no digest": (
        lambda t: whole(whole(other_id(t), 0, seen=""), 1, seen=""),
        "not its messages as the template writes them",
    ),
    "another message": (
        lambda t: whole(t, 0, message=replace(t.turns[0].message, content="other")),
        "the action's ids don't parse to its message",
    ),
    "another reply": (
        lambda t: whole(t, 0, reply=(replace(t.turns[0].reply[0], content="other"),)),
        "not its messages as the template writes them",
    ),
    "an event of no call": (
        lambda t: replace(t, events=(an_event(turn=0, call_id="other"),)),
        "an event of f without its call",
    ),
    "an event of no turn": (
        lambda t: replace(t, events=(an_event(turn=9),)),
        "an event of f for no turn",
    ),
    "a cut in the middle": (
        lambda t: whole(t, 0, action=replace(t.turns[0].action, finish="length")),
        "it was cut off, but another turn follows",
    ),
    "no turns": (lambda t: replace(t, turns=()), "there is no action"),
    "a cut that was none": (
        lambda t: replace(t, ending=Ending.CUT_OFF),
        "cut off here, but the action stopped by itself",
    ),
}


def an_event(**changes: Any):
    fields = {"turn": 0, "call_id": "call_0", "name": "f", "status": "ok"}
    return ToolEvent(**{**fields, "at_s": 0.0, "seconds": 0.0, "output_bytes": 0, **changes})


@pytest.mark.parametrize("kind", CORRUPTED)
async def test_a_corrupted_record_is_named(kind: str) -> None:
    corrupt, expected = CORRUPTED[kind]
    record = await a_record(FakeEnvironment(answer=echo))
    found = list(check_trajectory(corrupt(record.trajectory), LANGUAGE))
    assert any(expected in one.what and one.level == "problem" for one in found), found


async def test_the_digest_is_of_what_went_to_the_engine() -> None:
    engine = FixedEngine(CALL, "done")
    record = await a_record(FakeEnvironment(answer=echo), engine)
    prompts = [ids for ids, _ in engine.requests[record.trajectory.id]]
    assert [turn.seen for turn in record.trajectory.turns] == list(map(digest_of_ids, prompts))


async def test_groups_and_verdicts_are_looked_at() -> None:
    record = await a_record(FakeEnvironment(answer=echo))
    first, second = record.group.trajectories
    mixed = replace(
        record.group,
        trajectories=(first, replace(second, seed=99)),
        verdicts=(Verdict(reward=1.0, step_rewards=(0.1,)), record.group.verdicts[1]),
    )
    told = " ".join(one.what for one in check_group(mixed))
    assert "different seeds" in told and "1 step rewards for 3 turns" in told


async def test_a_redacted_record_is_a_note_and_not_a_problem() -> None:
    record = await a_record(FakeEnvironment(answer=echo))
    changed = replace(other_id(record.trajectory), metrics={"redacted_tokens": 1.0})
    (note,) = check_trajectory(changed, LANGUAGE)
    assert note.level == "note" and "spelled a secret" in note.what


# ---------------------------------------------------------------- regrade


async def test_the_same_verifier_says_the_same_another_is_shown() -> None:
    environment = FakeEnvironment(
        answer=echo, verifier=FakeVerifier(rate=right_answer), kept={"out": b"x"}
    )
    record = await a_record(environment)
    problem = a_problem(reference="done")
    same = await regrade(record.group, problem, environment.verifier, timeout_s=5)
    assert [one.changed for one in same] == [False, False]
    by_artifact = FakeVerifier(rate=lambda p, e: float(e.artifacts == {"out": b"y"}))
    other = await regrade(record.group, problem, by_artifact, timeout_s=5)
    assert [(one.before.reward, one.after.reward, one.changed) for one in other] == [
        (1.0, 0.0, True)
    ] * 2


async def test_artifacts_that_were_not_kept_are_no_empty_ones() -> None:
    record = await a_record(FakeEnvironment(answer=echo))
    problem = a_problem()
    problem = replace(problem, task=replace(problem.task, artifacts=("out",)))
    with pytest.raises(RecordError, match="reads out, but the record was written before"):
        await regrade(
            replace(record.group, artifacts=()),
            problem,
            FakeVerifier(),
            timeout_s=5,
        )


# ---------------------------------------------------------------- reexecute


async def test_the_same_environment_gives_the_same_record() -> None:
    environment = FakeEnvironment(answer=echo, kept={"out": b"x"})
    record = await a_record(environment)
    found = await again(record, environment)
    assert (found.divergence, found.turns, found.of) == (None, 3, 3)
    assert environment.resets[-1] == record.trajectory.seed


@pytest.mark.parametrize(
    "limits", [{"max_turns": 2}, {"max_action_tokens": 4}, {"context_tokens": 30}]
)
async def test_every_ending_replays(limits: dict[str, int]) -> None:
    environment = FakeEnvironment(answer=echo)
    record = await a_record(environment, **limits)
    assert record.trajectory.ending is not Ending.ANSWERED
    found = await again(record, environment, limits=Limits(**limits))
    assert found.divergence is None


async def test_a_reply_that_was_cut_is_compared_by_what_is_left() -> None:
    long = FakeEnvironment(answer=answering(lambda a, t: "x" * 300 + "y" * 300))
    limits = {"max_observation_tokens": 100}
    record = await a_record(long, **limits)
    assert "characters left out" in record.trajectory.turns[0].reply[0].content
    assert (await again(record, long, limits=Limits(**limits))).divergence is None
    other = FakeEnvironment(answer=answering(lambda a, t: "x" * 300 + "y" * 301))
    assert (await again(record, other, limits=Limits(**limits))).divergence is not None


COUNT = itertools.count(1_764_590_000)
CAUSES = {
    "the clock": (
        lambda a, t: f"now {next(COUNT)}",
        lambda a, t: f"now {next(COUNT)}",
    ),
    "the clock: it shows": (lambda a, t: "on 2026-03-01", lambda a, t: "on 2026-03-02"),
    "ordering": (lambda a, t: "b.txt a.txt c.txt", lambda a, t: "a.txt b.txt c.txt"),
    "the network": (
        lambda a, t: "200 OK",
        lambda a, t: "Failed to resolve example.org",
    ),
    "a time limit": (lambda a, t: "ok", lambda a, t: "error: f ran out of its 5 s"),
    "a change": (lambda a, t: "v1", lambda a, t: "v2"),
    "randomness": (
        lambda a, t: "drew apple",
        lambda a, t: f"drew {'abcdefghij'[next(COUNT) % 10]}{next(COUNT) % 7}x",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
async def test_the_first_departure_is_named_with_its_likely_cause(cause: str) -> None:
    then, now = CAUSES[cause]
    record = await a_record(FakeEnvironment(answer=answering(then)))
    found = await again(record, FakeEnvironment(answer=answering(now)))
    at = found.divergence
    assert at is not None and at.cause.startswith(cause), at
    assert (at.turn, at.what, at.tool) == (0, "reply", "f")
    assert found.turns == 1


async def test_the_bytes_are_those_of_the_recorded_text() -> None:
    record = await a_record(FakeEnvironment(answer=answering(lambda a, t: f"héllo {t} world")))
    seen = FakeEnvironment(answer=answering(lambda a, t: f"héllo {t and 'XY'} world"))
    at = (await again(record, seen)).divergence
    assert at is not None and at.turn == 1
    text = record.trajectory.turns[1].reply[0].content.encode()
    assert text[at.begin : at.end] == b"1"
    assert (at.recorded, at.seen) == ("1", "XY")


async def test_declared_patterns_may_differ() -> None:
    record = await a_record(FakeEnvironment(answer=answering(lambda a, t: f"at {next(COUNT)}")))
    fresh = FakeEnvironment(answer=answering(lambda a, t: f"at {next(COUNT)}"))
    assert (await again(record, fresh)).divergence is not None
    assert (await again(record, fresh, ignore=[re.compile(r"\d{10}")])).divergence is None


async def test_prompt_reward_ending_status_and_artifacts_are_compared() -> None:
    record = await a_record(FakeEnvironment(answer=echo, kept={"out": b"x"}))
    task = record.task
    assert task is not None
    prompt = replace(task, prompt=(replace(task.prompt[0], content="!"),))

    def paid(action: Message, turn: int) -> Step:
        return replace(echo(action, turn), reward=0.5)

    def cut(action: Message, turn: int) -> Step:
        step = echo(action, turn)
        return replace(step, terminated=False, truncated=step.terminated)

    def told(action: Message, turn: int) -> Step:
        return replace(echo(action, turn), events=(an_event(turn=turn, status="timeout"),))

    cases = {
        "prompt": (prompt, FakeEnvironment(answer=echo, kept={"out": b"x"})),
        "reward": (task, FakeEnvironment(answer=paid, kept={"out": b"x"})),
        "ending": (task, FakeEnvironment(answer=cut, kept={"out": b"x"})),
        "status": (task, FakeEnvironment(answer=told, kept={"out": b"x"})),
        "artifact out": (task, FakeEnvironment(answer=echo, kept={"out": b"y"})),
    }
    for what, (given_task, environment) in cases.items():
        found = await reexecute(record, given_task, World(environment=environment))
        assert found.divergence is not None and found.divergence.what == what


async def test_a_fault_is_said_and_not_called_a_difference() -> None:
    def fails(action: Message, turn: int) -> Step:
        raise EnvironmentFault("the disk is gone")

    record = await a_record(FakeEnvironment(answer=echo))
    at = (await again(record, FakeEnvironment(answer=fails))).divergence
    assert at is not None and at.what == "fault" and "the disk is gone" in at.seen


async def test_the_sandbox_is_fresh_and_closed() -> None:
    backend = FakeSandboxes()
    environment = FakeEnvironment(answer=echo, sets_up=True)
    stage = replace(a_stage(environment), sandboxes=backend)
    problem = a_problem(sandbox=SandboxSpec(image="own"))
    group = await run_group(stage, problem, size=1, seed=0)
    opened = backend.log.count("open")
    record = Recorded(step=0, number=0, group=group, place=0)
    found = await again(record, environment, sandboxes=backend)
    assert found.divergence is None
    assert backend.log.count("open") == opened + 1 and backend.open_now == 0


@given(a=st.text(max_size=9), b=st.text(max_size=9))
def test_the_difference_is_where_the_texts_differ(a: str, b: str) -> None:
    def said(text: str) -> tuple[Message, ...]:
        return (Message(role="tool", content=text, tool_call_id="c"),)

    found = first_difference(said(a), said(b))
    assert (found is None) == (a == b)
    if found is not None:
        x, y = a.encode(), b.encode()
        assert 0 <= found.begin <= found.end <= len(x)
        tail = len(x) - found.end
        assert x[: found.begin] == y[: found.begin]
        assert x[found.end :] == (y[len(y) - tail :] if tail else b"")


# ---------------------------------------------------------------- fork


async def forked(
    record: Recorded, edit: Edit, engine: Any, answer: Any = echo, **more: Any
) -> Group:
    environment = FakeEnvironment(answer=answer, verifier=FakeVerifier(rate=right_answer))
    return await fork(
        a_stage(environment, engine), record, a_problem(reference="done"), edit, **more
    )


async def test_an_unchanged_fork_is_the_record() -> None:
    record = await a_record(FakeEnvironment(answer=echo))
    for turn in range(3):
        group = await forked(record, Edit(turn=turn), FixedEngine(CALL, CALL, "done"))
        assert group.trajectories[0].token_ids == record.trajectory.token_ids
        assert group.rewards == (1.0,)


async def test_only_what_follows_the_edit_is_sampled() -> None:
    record = await a_record(FakeEnvironment(answer=echo))
    engine = FixedEngine("never", "never", "other")
    (trajectory,) = (await forked(record, Edit(turn=2), engine)).trajectories
    assert sum(map(len, engine.requests.values())) == 1
    assert trajectory.turns[:2] == tuple(
        replace(t, seen=trajectory.turns[n].seen) for n, t in enumerate(record.trajectory.turns[:2])
    )
    assert trajectory.answer == "other"


async def test_an_edited_action_is_written_not_sampled() -> None:
    record = await a_record(FakeEnvironment(answer=echo))
    edit = Edit(turn=1, action='@f {"b": 2}')
    (trajectory,) = (await forked(record, edit, FixedEngine("x", "x", "done"))).trajectories
    assert trajectory.turns[1].reply[0].content == '{"b": 2}'
    assert set(trajectory.turns[1].action.versions) == {SCRIPT_VERSION}
    assert trajectory.turns[1].action.logprobs is None
    assert trajectory.turns[2].action.logprobs is not None


@pytest.mark.parametrize("turn", [0, 1, 2])
async def test_an_edited_observation_is_what_the_policy_reads(turn: int) -> None:
    record = await a_record(FakeEnvironment(answer=echo))
    edit = Edit(turn=turn, observation="EDITED")
    (trajectory,) = (await forked(record, edit, FixedEngine(CALL, CALL, "done"))).trajectories
    shown = [CHARS.text(t.observation.token_ids) for t in trajectory.turns]
    assert ["EDITED" in text for text in shown] == [n == turn for n in range(3)]


async def test_further_samples_have_seeds_of_their_own() -> None:
    seeds: list[int] = []

    def choose(prompt: Any, sampling: Any) -> Any:
        seeds.append(sampling.seed)
        return CHARS.write(Message(role="assistant", content="done"))

    record = await a_record(FakeEnvironment(answer=echo))
    group = await forked(record, Edit(turn=2), ScriptedEngine(choose=choose), samples=3)
    assert len(group.trajectories) == 3 and len(set(seeds)) == 3


async def test_a_turn_that_is_not_there_or_not_reached_is_one_line() -> None:
    record = await a_record(FakeEnvironment(answer=echo))
    with pytest.raises(RecordError, match="has turns 0 to 2, no turn 3"):
        await forked(record, Edit(turn=3), FixedEngine("x"))
    changed = answering(lambda a, t: "something else")
    with pytest.raises(RecordError, match=r"turn 2 is not reached any more, .* before turn 1"):
        await forked(record, Edit(turn=2), FixedEngine("x"), answer=changed)


# ---------------------------------------------------------------- diff


async def test_two_trajectories_are_aligned_by_turn() -> None:
    left = (await a_record(FakeEnvironment(answer=echo))).trajectory
    right = (await a_record(FakeEnvironment(answer=echo), FixedEngine(CALL, "done"))).trajectory
    assert diff(left, left).parts_at is None
    found = diff(left, right)
    assert found.parts_at == 1 and len(found.turns) == 3
    turn = found.turns[1]
    assert turn.token == 0 and turn.same_observation
    assert (turn.left, turn.right) == ('f({"a": 1})', "done")
    assert turn.left_reply == '{"a": 1}' and turn.logprobs == (-0.5, -0.5)
    assert found.turns[2].right == ""


# ---------------------------------------------------------------- finding records


async def test_records_are_found_in_runs_folders_and_files(tmp_path: Path) -> None:
    record = await a_record(FakeEnvironment(answer=echo))
    store = ParquetStore(tmp_path / "run" / "trajectories")
    for version in (0, 3):
        store.append([record.group], version=version)
    for source in (tmp_path / "run", tmp_path / "run" / "trajectories"):
        assert Records(source).steps == [0, 3]
    assert Records(store.path(3)).steps == [3]
    records = Records(tmp_path / "run")
    assert [one.name for one in records.episodes()][:2] == [
        "step 0, episode 0.0",
        "step 0, episode 0.1",
    ]
    assert records.episode(record.trajectory.id).step == 0
    assert records.episode("0.1").step == 3
    assert records.episode("0.1").trajectory.member == 1


async def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such file or folder"):
        Records(tmp_path / "nowhere")
    with pytest.raises(RecordError, match="holds no trajectories"):
        Records(tmp_path)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(RecordError, match=r"end in \.parquet"):
        Records(tmp_path / "x.txt")
    record = await a_record(FakeEnvironment(answer=echo))
    ParquetStore(tmp_path / "run").append([record.group], version=2)
    with pytest.raises(RecordError, match="has no step 5: steps 2 to 2"):
        Records(tmp_path / "run", step=5)
    with pytest.raises(RecordError, match=r"has no episode 7\.7"):
        Records(tmp_path / "run").episode("7.7")
    with pytest.raises(ConfigError, match="holds no configuration"):
        Records(tmp_path / "run").config()
