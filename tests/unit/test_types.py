"""What the data types promise, for any content."""

import dataclasses
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import types
from agentrl.types import (
    ActionTokens,
    Ending,
    Episode,
    ExecResult,
    Group,
    Message,
    ObservationTokens,
    Problem,
    Sampling,
    SandboxSpec,
    Task,
    Trajectory,
    Turn,
    Verdict,
    assistant,
    system,
    user,
)

IDS = st.lists(st.integers(0, 200_000), min_size=1, max_size=8).map(tuple)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    ids = draw(IDS)
    logprobs = st.lists(st.floats(-50, 0), min_size=len(ids), max_size=len(ids)).map(tuple)
    return Turn(
        observation=ObservationTokens(token_ids=draw(IDS)),
        action=ActionTokens(
            token_ids=ids,
            logprobs=draw(logprobs),
            versions=(draw(st.integers(0, 9)),) * len(ids),
            finish=draw(st.sampled_from(["stop", "length"])),
        ),
        message=assistant(draw(st.text(max_size=5))),
        reply=tuple(draw(st.lists(st.builds(user, st.text(max_size=5)), max_size=2))),
    )


def a_trajectory(*made: Turn, task_id: str = "t", prompt: tuple[Message, ...] = ()) -> Trajectory:
    return Trajectory(
        id="x",
        task_id=task_id,
        member=0,
        seed=0,
        prompt=prompt,
        turns=made,
        ending=Ending.ANSWERED,
    )


def a_turn(observation: int, action: int, **changes: Any) -> Turn:
    fields = {"logprobs": (-1.0,) * action, "versions": (0,) * action} | changes
    return Turn(
        observation=ObservationTokens(token_ids=(7,) * observation),
        action=ActionTokens(token_ids=(9,) * action, finish="stop", **fields),
        message=assistant("a"),
    )


# ---------------------------------------------------------------- trajectories


@given(st.lists(turns(), max_size=5))
def test_every_per_token_field_has_the_length_of_the_ids(made: list[Turn]) -> None:
    trajectory = a_trajectory(*made)
    length = len(trajectory.token_ids)
    per_token = [trajectory.action_mask, trajectory.behavior_logprobs, trajectory.versions]
    assert {len(field) for field in per_token} == {length}


@given(st.lists(turns(), max_size=5))
def test_mask_marks_exactly_the_sampled_ids(made: list[Turn]) -> None:
    trajectory = a_trajectory(*made)
    under = [i for i, m in zip(trajectory.token_ids, trajectory.action_mask, strict=True) if m]
    assert under == [i for turn in made for i in turn.action.token_ids]
    assert trajectory.action_tokens == len(under) == sum(trajectory.action_mask)
    for values in (trajectory.behavior_logprobs, trajectory.versions):
        assert tuple(v is not None for v in values) == trajectory.action_mask


@given(st.lists(turns(), min_size=1, max_size=5))
def test_observation_and_action_alternate_and_an_action_is_last(made: list[Turn]) -> None:
    mask = a_trajectory(*made).action_mask
    changes = [mask[0], *(b for a, b in pairwise(mask) if a != b)]
    assert changes == [False, True] * len(made)


@given(st.lists(turns(), min_size=1, max_size=5))
def test_what_was_seen_at_a_turn_begins_what_was_seen_later(made: list[Turn]) -> None:
    whole = a_trajectory(*made).token_ids
    for count in range(1, len(made)):
        part = a_trajectory(*made[:count]).token_ids
        assert whole[: len(part)] == part


def test_mask_of_a_worked_example() -> None:
    trajectory = a_trajectory(a_turn(3, 2), a_turn(4, 1))
    assert "".join(str(int(m)) for m in trajectory.action_mask) == "0001100001"
    assert trajectory.behavior_logprobs == (None,) * 3 + (-1.0,) * 2 + (None,) * 4 + (-1.0,)


def test_missing_logprobs_name_their_turn() -> None:
    trajectory = a_trajectory(a_turn(1, 1), a_turn(1, 2, logprobs=None))
    with pytest.raises(ValueError, match="trajectory x: turn 1 has no logprobs"):
        _ = trajectory.behavior_logprobs


def test_messages_are_the_whole_talk_in_order() -> None:
    turn = dataclasses.replace(a_turn(1, 1), reply=(user("r"),))
    trajectory = a_trajectory(turn, turn, prompt=(system("s"), user("q")))
    assert "".join(m.content for m in trajectory.messages) == "sqarar"
    assert (trajectory.answer, a_trajectory().answer) == ("a", "")


def test_nothing_per_token_is_stored_beside_the_tokens() -> None:
    names = {field.name for field in dataclasses.fields(Trajectory)}
    assert not names & {"token_ids", "action_mask", "behavior_logprobs", "versions"}
    assert [f.name for f in dataclasses.fields(ObservationTokens)] == ["token_ids"]


RECORDS = [kind for kind in vars(types).values() if dataclasses.is_dataclass(kind)]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_records_are_frozen_and_closed(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen
    assert "__slots__" in vars(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))


# ---------------------------------------------------------------- actions


@given(ids=st.integers(0, 4), logprobs=st.none() | st.integers(0, 4), versions=st.integers(0, 4))
def test_action_with_unequal_lengths_is_refused(
    ids: int, logprobs: int | None, versions: int
) -> None:
    def build() -> ActionTokens:
        return ActionTokens(
            token_ids=(1,) * ids,
            logprobs=None if logprobs is None else (-1.0,) * logprobs,
            versions=(0,) * versions,
            finish="stop",
        )

    if ids and versions == ids and logprobs in (None, ids):
        assert len(build().token_ids) == ids
        return
    with pytest.raises(ValueError, match=r"at least one|the three must agree") as caught:
        build()
    if ids:
        scored = "no" if logprobs is None else logprobs
        assert f"{ids} ids, {scored} logprobs and {versions} versions" in str(caught.value)


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 0.01, 1.0])
def test_action_with_an_impossible_logprob_is_refused(logprob: float) -> None:
    with pytest.raises(ValueError, match="finite and at most 0"):
        a_turn(1, 2, logprobs=(-1.0, logprob))


def test_rounding_slightly_above_zero_is_no_error() -> None:
    assert a_turn(1, 1, logprobs=(1e-7,)).action.logprobs == (1e-7,)


def test_empty_observation_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        ObservationTokens(token_ids=())


# ---------------------------------------------------------------- problems, verdicts, groups


def test_reference_is_hidden_from_every_repr() -> None:
    problem = Problem(task=Task(id="t", prompt=(user("q"),)), reference="the-gold")
    assert "the-gold" not in repr(problem) + str(problem) + f"{problem}" + repr([problem])
    assert problem.reference == "the-gold"


def test_task_has_no_room_for_a_reference() -> None:
    names = {field.name for field in dataclasses.fields(Task)}
    assert names == {"id", "prompt", "sandbox", "artifacts", "setup", "family"}
    assert "problem" not in {field.name for field in dataclasses.fields(Episode)}
    with pytest.raises(ValueError, match="needs an id"):
        Task(id="", prompt=())


@given(reward=st.none() | st.floats(), invalid=st.none() | st.text())
def test_verdict_is_a_finite_reward_or_a_reason(reward: float | None, invalid: str | None) -> None:
    whole = (reward is None) != (invalid is None) and math.isfinite(reward or 0.0)
    if whole:
        verdict = Verdict(reward=reward, invalid=invalid)
        assert (verdict.reward, verdict.invalid) == (reward, invalid)
    else:
        with pytest.raises(ValueError, match=r"not both|finite"):
            Verdict(reward=reward, invalid=invalid)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_parts_of_a_verdict_are_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Verdict(reward=0.0, components={"a": bad})
    with pytest.raises(ValueError, match="finite"):
        Verdict(reward=0.0, step_rewards=(0.0, bad))


def test_group_needs_a_verdict_for_each_member_of_its_task() -> None:
    member = a_trajectory(a_turn(1, 1))
    with pytest.raises(ValueError, match="group t: 1 trajectories, 2 verdicts"):
        Group(task_id="t", trajectories=(member,), verdicts=(Verdict(reward=0.0),) * 2)
    with pytest.raises(ValueError, match="another task"):
        Group(task_id="u", trajectories=(member,), verdicts=(Verdict(reward=0.0),))


@given(st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), max_size=5))
def test_signal_needs_two_different_rewards(rewards: list[float | None]) -> None:
    verdicts = [Verdict(invalid="x") if r is None else Verdict(reward=r) for r in rewards]
    members = [replace(a_trajectory(a_turn(1, 1)), member=m) for m in range(len(rewards))]
    group = Group(task_id="t", trajectories=tuple(members), verdicts=tuple(verdicts))
    valid = [r for r in rewards if r is not None]
    assert group.rewards == tuple(valid)
    assert group.has_signal == (len(valid) > 1 and min(valid) != max(valid))


def test_segments_of_a_member_count_once() -> None:
    one, other = a_trajectory(a_turn(1, 1)), replace(a_trajectory(a_turn(1, 1)), member=1)
    won, lost = Verdict(reward=1.0), Verdict(reward=0.0)
    group = Group(task_id="t", trajectories=(one, one, other), verdicts=(won, won, lost))
    assert group.members == ((0, 1), (2,))
    assert group.rewards == (1.0, 0.0)


@pytest.mark.parametrize(
    ("members", "rewards", "why"),
    [((0, 0), (1.0, 0.0), "several verdicts"), ((0, 1, 0), (1.0, 0.0, 1.0), "side by side")],
)
def test_segments_that_disagree_are_refused(
    members: tuple[int, ...], rewards: tuple[float, ...], why: str
) -> None:
    made = tuple(replace(a_trajectory(a_turn(1, 1)), member=m) for m in members)
    with pytest.raises(ValueError, match=why):
        Group(task_id="t", trajectories=made, verdicts=tuple(Verdict(reward=r) for r in rewards))


# ---------------------------------------------------------------- sandboxes, sampling


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b"])
def test_files_stay_inside_the_workspace(path: str) -> None:
    with pytest.raises(ValueError, match="inside the workspace"):
        SandboxSpec(files={path: b""})


def test_ordinary_files_are_fine() -> None:
    assert SandboxSpec(files={"a/b.py": b"", "ü 1.txt": b"x"}).files["ü 1.txt"] == b"x"


LIMITS = ["memory_mb", "cpus", "processes", "workspace_mb", "max_file_mb", "max_output_bytes"]


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [0, -1])
def test_sandbox_limits_are_above_zero(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        SandboxSpec(**{name: value})


@given(kept=st.integers(0, 9), whole=st.integers(0, 9), errors=st.booleans())
def test_output_is_cut_when_some_is_missing(kept: int, whole: int, errors: bool) -> None:
    whole += kept
    out, err = (b"", b"x" * kept) if errors else (b"x" * kept, b"")
    result = ExecResult(
        stdout=out,
        stderr=err,
        exit_code=0,
        seconds=0.0,
        stdout_bytes=0 if errors else whole,
        stderr_bytes=whole if errors else 0,
    )
    assert result.cut == (whole > kept)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_impossible_sampling_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Sampling(**({"max_tokens": 1, "stop_ids": frozenset({0})} | changes))
