"""Verdicts that can't be had are invalid and counted; they never become a reward."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import EngineFault, EnvironmentFault, Fault, SandboxFault
from agentrl.grading import grade_group, statistics
from agentrl.protocols import SandboxProvider
from agentrl.testing.fakes import FakeSandboxes, FakeVerifier, a_problem
from agentrl.types import (
    ActionTokens,
    Ending,
    Episode,
    Group,
    Message,
    ObservationTokens,
    Problem,
    SandboxSpec,
    ToolEvent,
    Trajectory,
    Turn,
    Verdict,
)


def episode(member: int = 0, *, turns: int = 1, ending: Ending = Ending.ANSWERED) -> Episode:
    turn = Turn(
        observation=ObservationTokens(token_ids=(1, 2, 3)),
        action=ActionTokens(
            token_ids=(4, 5), logprobs=(-1.0, -1.0), versions=(0, 0), finish="stop"
        ),
        message=Message(role="assistant", content=str(member)),
    )
    event = ToolEvent(
        turn=0, call_id="c", name="f", status="ok", at_s=0.0, seconds=0.0, output_bytes=0
    )
    return Episode(
        trajectory=Trajectory(
            id=f"task/{member}",
            task_id="task",
            member=member,
            seed=0,
            prompt=(),
            turns=(turn,) * turns,
            ending=ending,
            events=(event,) * turns,
        )
    )


class Gives:
    """A verifier that gives whatever it is told to."""

    def __init__(self, give: Callable[[Sequence[Episode]], Any]) -> None:
        self.give = give

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Any:
        return self.give(episodes)


async def graded(verifier: Any, *outcomes: Episode | Fault, timeout_s: float = 5.0) -> Group:
    return await grade_group(a_problem(), outcomes, verifier, timeout_s=timeout_s)


async def test_members_keep_their_order_and_get_their_own_verdicts() -> None:
    verifier = FakeVerifier(rate=lambda problem, e: e.trajectory.member / 4)
    group = await graded(verifier, episode(2), EngineFault("gone"), episode(0), episode(3))
    assert [t.member for t in group.trajectories] == [2, 0, 3]
    assert group.rewards == (0.5, 0.0, 0.75)
    assert group.faults == ("EngineFault: gone",)


async def test_verifier_sees_the_reference_and_the_artifacts() -> None:
    seen: list[tuple[Any, Any]] = []

    def rate(problem: Problem, e: Episode) -> float:
        seen.append((problem.reference, e.artifacts))
        return 1.0

    kept = Episode(trajectory=episode().trajectory, artifacts={"out": b"x"})
    await grade_group(a_problem(reference="gold"), [kept], FakeVerifier(rate=rate), timeout_s=1)
    assert seen == [("gold", {"out": b"x"})]


class Opens:
    """A verifier that passes an episode if it can open the problem's sandbox."""

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Any:
        if sandboxes is None or problem.grading is None:
            return [Verdict(reward=0.0)] * len(episodes)
        async with sandboxes.session(problem.grading):
            return [Verdict(reward=1.0)] * len(episodes)


async def test_only_a_problem_that_asks_for_it_is_graded_in_sandboxes() -> None:
    for grading, reward, log in ((None, 0.0, []), (SandboxSpec(), 1.0, ["open", "close"])):
        sandboxes = FakeSandboxes()
        asked = replace(a_problem(), grading=grading)
        group = await grade_group(asked, [episode()], Opens(), sandboxes=sandboxes, timeout_s=1)
        assert (group.rewards, sandboxes.log) == ((reward,), log)


async def test_group_without_episodes_is_not_graded() -> None:
    verifier = FakeVerifier()
    group = await graded(verifier, SandboxFault("a"), EnvironmentFault("b"))
    assert (group.trajectories, group.verdicts, verifier.log) == ((), (), [])
    assert group.faults == ("SandboxFault: a", "EnvironmentFault: b")


def raises(_: Any) -> Any:
    raise ValueError("bad\nthing")


REJECTED = {
    "raises": (raises, "ValueError: bad thing"),
    "nan": (lambda es: [Verdict(reward=float("nan")) for _ in es], "finite"),
    "infinite": (lambda es: [Verdict(reward=float("inf")) for _ in es], "finite"),
    "nan component": (
        lambda es: [Verdict(reward=1.0, components={"a": float("nan")}) for _ in es],
        "finite",
    ),
    "too few": (lambda es: [Verdict(reward=1.0)], "1 verdicts for 2 episodes"),
    "too many": (lambda es: [Verdict(reward=1.0)] * 3, "3 verdicts for 2 episodes"),
    "none": (lambda es: None, "TypeError"),
    "numbers": (lambda es: [1.0, True], "is not a Verdict"),
    "step rewards": (
        lambda es: [Verdict(reward=1.0, step_rewards=(1.0, 1.0))] * 2,
        "2 step rewards for 1 turns",
    ),
}


@pytest.mark.parametrize("kind", REJECTED)
async def test_what_is_not_a_verdict_is_invalid_with_a_reason(kind: str) -> None:
    give, reason = REJECTED[kind]
    group = await graded(Gives(give), episode(0), episode(1))
    assert len(group.trajectories) == 2 and group.rewards == ()
    for verdict in group.verdicts:
        assert verdict.invalid is not None
        assert verdict.invalid.startswith("VerifierFault: ") and reason in verdict.invalid
        assert "\n" not in verdict.invalid and not verdict.passed


async def test_one_bad_entry_spoils_only_itself() -> None:
    group = await graded(Gives(lambda es: [Verdict(reward=1.0), None]), episode(0), episode(1))
    assert group.rewards == (1.0,)
    assert group.verdicts[1].invalid == "VerifierFault: a NoneType is not a Verdict"


async def test_verifier_may_call_a_verdict_invalid_itself() -> None:
    group = await graded(Gives(lambda es: [Verdict(invalid="gold is unreadable")]), episode())
    assert group.verdicts == (Verdict(invalid="gold is unreadable"),)
    assert statistics([group]).faults == 1


async def test_late_verifier_is_invalid_within_the_limit() -> None:
    begun = time.monotonic()
    group = await graded(FakeVerifier(delay_s=9), episode(), timeout_s=0.1)
    assert time.monotonic() - begun < 1
    assert group.verdicts[0].invalid == "VerifierFault: no verdict within 0.1 s"


async def test_verifier_that_swallows_its_cancellation_does_not_hold_the_run() -> None:
    class Deaf:
        async def grade(
            self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
        ) -> Any:
            for _ in range(6):
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    continue
            return [Verdict(reward=1.0)]

    group = await graded(Deaf(), episode(), timeout_s=0.1)
    assert group.verdicts[0].invalid == "VerifierFault: no verdict within 0.1 s"


async def test_verifiers_own_timeout_is_told_from_the_limit() -> None:
    def late(_: Any) -> Any:
        raise TimeoutError("judge did not answer")

    group = await graded(Gives(late), episode())
    assert group.verdicts[0].invalid == "VerifierFault: grading: TimeoutError: judge did not answer"


async def test_cancelling_the_run_is_not_a_verdict() -> None:
    running = asyncio.create_task(graded(FakeVerifier(delay_s=9), episode()))
    await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


# ---------------------------------------------------------------- statistics


def group_of(*rewards: float | None, faults: Sequence[str] = (), turns: int = 1) -> Group:
    verdicts = [
        Verdict(invalid="VerifierFault: x") if r is None else Verdict(reward=r, passed=r > 0.5)
        for r in rewards
    ]
    return Group(
        task_id="task",
        trajectories=tuple(episode(i, turns=turns).trajectory for i in range(len(rewards))),
        verdicts=tuple(verdicts),
        faults=tuple(faults),
    )


def test_faults_are_outside_reward_and_success() -> None:
    report = statistics(
        [group_of(1.0, 0.0, None), group_of(1.0, faults=["EngineFault: a", "EngineFault: b: c"])]
    )
    assert (report.episodes, report.faults) == (6, 3)
    assert report.reward_mean == report.success_rate == pytest.approx(2 / 3)
    assert report.fault_kinds == {"EngineFault": 2, "VerifierFault": 1}
    assert report.fault_example == "EngineFault: a"
    assert report.groups_with_signal == 1


def test_tokens_turns_endings_and_calls_are_counted() -> None:
    report = statistics([group_of(1.0, 0.0), group_of(1.0, turns=3)])
    assert (report.action_tokens, report.observation_tokens) == (10, 15)
    assert report.turns == pytest.approx(5 / 3)
    assert report.endings == {"answered": 3}
    assert report.tool_calls == {"ok": 5}


def test_groups_by_kind() -> None:
    solved, failed, mixed, lost = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (None, None)
    report = statistics([group_of(*kind) for kind in (solved, solved, failed, mixed, lost)])
    assert report.group_kinds == {"failed": 1, "faulted": 1, "mixed": 1, "solved": 2}
    assert report.groups == 5 == sum(report.group_kinds.values())


def test_lengths_by_outcome() -> None:
    report = statistics([group_of(1.0, 1.0, turns=3), group_of(0.0, None, turns=1)])
    one = statistics([group_of(1.0, turns=1)]).length_passed
    assert (report.length_passed, report.length_failed) == (3 * one, one)
    assert statistics([group_of(0.0)]).length_passed == 0


def test_nothing_gives_zeros_not_nan() -> None:
    report = statistics([])
    assert (report.episodes, report.reward_mean, report.reward_stderr, report.turns) == (0, 0, 0, 0)
    assert report.fault_example == ""
    lost = statistics([group_of(faults=["SandboxFault: x"])])
    assert (lost.episodes, lost.success_rate, lost.faults) == (1, 0.0, 1)


def test_row_is_json_with_all_fields() -> None:
    row = json.loads(json.dumps(statistics([group_of(1.0, None)]).as_row()))
    wanted = {"reward_mean", "reward_stderr", "success_rate", "groups_with_signal", "endings"}
    assert wanted | {"faults", "action_tokens", "observation_tokens"} <= set(row)


def test_stderr_of_equal_groups_is_that_of_their_means() -> None:
    means = [0.5, 0.0, 1.0]
    report = statistics([group_of(1.0, 0.0), group_of(0.0, 0.0), group_of(1.0, 1.0)])
    assert report.reward_stderr == pytest.approx(stdev(means) / sqrt(3))


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=1, max_size=6))
def test_mean_and_stderr(rewards: list[list[float]]) -> None:
    report = statistics([group_of(*group) for group in rewards])
    flat = [r for group in rewards for r in group]
    assert report.reward_mean == pytest.approx(mean(flat), abs=1e-9)
    assert 0 <= report.reward_stderr <= 10
    if len(rewards) == 1 or len(set(flat)) == 1:
        assert report.reward_stderr == pytest.approx(0, abs=1e-9)
    doubled = statistics([group_of(*group, *group) for group in rewards])
    # Members of a group are not independent: repeating them makes nothing more certain.
    assert doubled.reward_stderr == pytest.approx(report.reward_stderr, abs=1e-9)


async def test_segments_get_the_verdict_of_their_episode() -> None:
    first = episode(0)
    whole = replace(first, segments=(replace(first.trajectory, id="task/0.1"),))
    step_wise = FakeVerifier(rate=lambda p, e: Verdict(reward=1.0, step_rewards=(1.0,)))
    group = await graded(step_wise, whole, episode(1))
    assert [t.id for t in group.trajectories] == ["task/0", "task/0.1", "task/1"]
    assert [v.step_rewards for v in group.verdicts] == [(1.0,), (), (1.0,)]
    assert statistics([group]).episodes == 2
    assert statistics([group]).turns == 1.5
