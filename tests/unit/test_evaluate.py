from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.evaluate import pass_at, summarise
from agentrl.types import Ending, Group, Trajectory, Verdict


def group(task: str, outcomes: list[bool | None]) -> Group:
    graded = [o for o in outcomes if o is not None]
    trajectories = tuple(
        Trajectory(
            id=f"{task}-{i}", task_id=task, member=i, seed=i, prompt=(), turns=(),
            ending=Ending.ANSWERED,
        )
        for i in range(len(graded))
    )  # fmt: skip
    verdicts = tuple(Verdict(reward=float(o), passed=o) for o in graded)
    faults = tuple("engine" for o in outcomes if o is None)
    return Group(task_id=task, trajectories=trajectories, verdicts=verdicts, faults=faults)


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_passing_sample(n: int, data) -> None:
    from itertools import combinations

    passed = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    samples = [i < passed for i in range(n)]
    hits = sum(any(subset) for subset in combinations(samples, k))
    assert pass_at(k, passed=passed, of=n) == pytest.approx(hits / comb(n, k))


def test_faults_are_outside_of_every_figure_and_counted() -> None:
    result = summarise(
        [group("a", [True, None]), group("b", [False, False]), group("c", [None, None])], samples=2
    )
    assert result.success == pytest.approx(0.5)
    assert result.problems == 2
    assert result.faults == 3
    assert result.pass_at_k[1] == pytest.approx(0.5)
    assert result.pass_at_k[2] == 0.0  # only b has two graded samples


def test_uncertainty_is_over_problems_not_samples() -> None:
    few = summarise([group("a", [True] * 50), group("b", [False] * 50)], samples=50)
    assert few.stderr == pytest.approx(0.5)
    low, high = few.ci95
    assert low < 0.1 and high > 0.9


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_the_interval_holds_the_estimate_and_stays_in_range(outcomes: list[bool]) -> None:
    result = summarise([group(str(i), [o]) for i, o in enumerate(outcomes)], samples=1)
    low, high = result.ci95
    assert 0 <= low <= result.success + 1e-9 and result.success <= high + 1e-9 <= 1 + 1e-8
    assert high > low


def test_wilson_golden_value() -> None:
    # No variance to estimate an effective size from: 10 independent tries, all passed. The lower
    # end is 1 / (1 + z^2 / 10), the upper end 1.
    result = summarise([group(str(i), [True]) for i in range(10)], samples=1)
    assert result.ci95[0] == pytest.approx(1 / (1 + 1.959963984540054**2 / 10))
    assert result.ci95[1] == pytest.approx(1.0)


def test_no_problem_at_all_is_no_crash() -> None:
    result = summarise([], samples=4)
    assert (result.success, result.problems, result.ci95) == (0.0, 0, (0.0, 1.0))
