"""Worked values of turn-level credit, reward parts and group selection; names say the row."""

from math import comb, exp, log

import pytest
import torch

from agentrl.algorithms import AlgorithmConfig
from agentrl.learning.advantage import group_advantages, has_signal, part_advantages
from agentrl.learning.credit import discounted, state_advantages, turn_reward_advantages
from agentrl.learning.loss import kl_estimate
from agentrl.train import Pace, admitted
from agentrl.types import (
    ActionTokens,
    Ending,
    Group,
    ObservationTokens,
    Trajectory,
    Turn,
    Verdict,
    assistant,
    user,
)

CLOSE = pytest.approx


def answers(correct: int, size: int) -> Group:
    """A group of one-turn episodes, the first `correct` of which are right."""
    turn = Turn(
        observation=ObservationTokens(token_ids=(1,)),
        action=ActionTokens(token_ids=(2,), logprobs=(-1.0,), versions=(0,), finish="stop"),
        message=assistant(""),
    )
    members = tuple(
        Trajectory(
            id=f"m{m}", task_id="t", member=m, seed=0, prompt=(user("?"),), turns=(turn,),
            ending=Ending.ANSWERED,
        )
        for m in range(size)
    )  # fmt: skip
    verdicts = tuple(Verdict(reward=float(m < correct)) for m in range(size))
    return Group(task_id="t", trajectories=members, verdicts=verdicts)


# --- GiGPO ------------------------------------------------------------------------------------

# Four members reach state "s"; two of them succeed, 2 and 4 turns later.
STATES = (("a", "b", "s", "c", "d"), ("s", "e", "f", "g", "h"), ("s", "i"), ("j", "s"))
STEP_REWARDS = ((0, 0, 0, 0, 1), (0, 0, 0, 0, 1), (0, 0), (0, 0))
AT_S = ((0, 2), (1, 0), (2, 0), (3, 1))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, (0.473248, 0.385255, -0.429252, -0.429252)),
        ({"scale": "group", "ddof": 1}, (0.952292, 0.775227, -0.863760, -0.863760)),
        ({"scale": "group"}, (1.099612, 0.895155, -0.997384, -0.997384)),
    ],
)
def test_gigpo_returns_at_an_anchor_state(fields, wanted) -> None:
    config = AlgorithmConfig.model_validate({"preset": "gigpo", **fields})
    got = state_advantages(STATES, STEP_REWARDS, config)
    assert [got[m][t] for m, t in AT_S] == CLOSE(wanted, abs=1e-6)
    assert got[0][0] == got[0][4] == got[3][0] == 0, "a state seen once gets exactly 0"
    (outcome,) = group_advantages([[1, 1, 0, 0]], config)
    if not fields:
        total = [outcome[m] + got[m][t] for m, t in AT_S]
        assert total == CLOSE((0.973248, 0.885255, -0.929252, -0.929252), abs=1e-6)


def test_gigpo_discounted_returns() -> None:
    assert discounted((0, 0, 1), 0.95)[0] == CLOSE(0.9025)
    assert discounted((0, 0, 0, 0, 1), 0.95)[0] == CLOSE(0.81450625)


def test_discount_of_a_final_reward_over_four_turns() -> None:
    assert discounted((0, 0, 0, 1), 0.9) == CLOSE((0.729, 0.81, 0.9, 1))


# --- MT-GRPO ----------------------------------------------------------------------------------


def test_mt_grpo_turn_reward_before_the_tool_result_outcome_after() -> None:
    config = AlgorithmConfig(preset="mt-grpo")
    turns = turn_reward_advantages([(1, 9), (1, 9), (0, 9), (0, 9)], config)
    (outcome,) = group_advantages([[1, 0, 0, 0]], config)
    rows = [[o + config.turn_coef * a for a in row] for o, row in zip(outcome, turns, strict=True)]
    assert [row[0] for row in rows] == CLOSE((2.366025, 0.366025, -1.366025, -1.366025), abs=1e-6)
    assert [row[1] for row in rows] == CLOSE((1.5, -0.5, -0.5, -0.5), abs=1e-6)


def test_mt_grpo_compares_only_members_that_took_the_turn() -> None:
    config = AlgorithmConfig(preset="mt-grpo", scale="none")
    assert turn_reward_advantages([(1, 1, 0), (0, 0, 0), (5,)], config) == [
        (0.5, 0.5, 0.0), (-0.5, -0.5, 0.0), (0.0,),
    ]  # fmt: skip


# --- GDPO -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "total", "summed"),
    [
        (((0, 0), (1, 0)), 0.707107, 0.707107),
        (((0, 0), (1, 1)), 0.707107, 1.414214),
    ],
    ids=["sum 0 1", "sum 0 2"],
)
def test_gdpo_normalises_each_reward_in_its_own_group(parts, total, summed) -> None:
    config = AlgorithmConfig(preset="gdpo")
    (on_the_sum,) = group_advantages([[sum(p) for p in parts]], config)
    assert on_the_sum == CLOSE((-total, total), abs=1e-6)
    (decoupled,) = part_advantages([parts], (1, 1), config)
    assert decoupled == CLOSE((-summed, summed), abs=1e-6)


# --- which groups teach -----------------------------------------------------------------------


def test_dynamic_sampling_keeps_the_mixed_groups() -> None:
    config = AlgorithmConfig(preset="dapo")
    kept = [n for n in (0, 3, 8, 8, 1) if has_signal(answers(n, 8), config)]
    assert kept == [3, 1]


USEFUL = {
    0.02: (0.078, 0.149, 0.276, 0.476, 0.726),
    0.05: (0.186, 0.337, 0.560, 0.806, 0.963),
    0.1: (0.344, 0.570, 0.815, 0.966, 0.999),
    0.2: (0.589, 0.832, 0.972, 0.999, 1),
    0.5: (0.875, 0.992, 1, 1, 1),
}


def mixed(p: float, size: int) -> dict[int, float]:
    """The probability of each number of right answers, of groups with signal alone."""
    config = AlgorithmConfig(preset="dapo")
    return {
        n: comb(size, n) * p**n * (1 - p) ** (size - n)
        for n in range(size + 1)
        if has_signal(answers(n, size), config)
    }


@pytest.mark.parametrize("p", USEFUL)
def test_share_of_useful_groups(p: float) -> None:
    got = [sum(mixed(p, size).values()) for size in (4, 8, 16, 32, 64)]
    assert got == CLOSE(USEFUL[p], abs=6e-4)


def test_oversampling_factor_is_the_inverse() -> None:
    assert 1 / sum(mixed(0.05, 8).values()) == CLOSE(2.97, abs=5e-3)


@pytest.mark.parametrize(
    ("p", "size", "wanted"), [(0.1, 8, 0.176), (0.1, 16, 0.123), (0.9, 8, 0.824)]
)
def test_zero_variance_bias_of_the_pass_rate(p: float, size: int, wanted: float) -> None:
    share = mixed(p, size)
    mean = sum(n / size * q for n, q in share.items()) / sum(share.values())
    assert mean == CLOSE(wanted, abs=6e-4)


def test_areal_admission() -> None:
    pace = Pace(
        steps=1000, groups=512, group_size=1, concurrency=1, max_lag=8, eval_every=0,
        checkpoint_every=0, max_fault_share=1.0, max_silent_steps=0, seed=0,
    )  # fmt: skip
    assert admitted(100 * 512, pace) == 55_808


# --- KL of a known shift ----------------------------------------------------------------------


@pytest.mark.parametrize(("n", "wanted"), [(8, 1.204442), (64, 3.174508)])
def test_best_of_n_kl_by_either_estimator(n: int, wanted: float) -> None:
    """The best of N draws has density n u^(n - 1) on the base policy's quantiles u.

    k3 is held where the log-ratio is below -20, at quantiles under `held`: there its part
    exp(-d), whose mean is the base policy's mass, counts exp(20) at most.
    """
    points = 400_000
    u = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    d, density = log(n) + (n - 1) * u.log(), n * u ** (n - 1)
    assert (kl_estimate(d, "k1") * density).mean().item() == CLOSE(wanted, abs=1e-5)
    held = exp((-20 - log(n)) / (n - 1))
    lost = held - exp(20) * held**n
    assert (kl_estimate(d, "k3") * density).mean().item() == CLOSE(wanted - lost, abs=1e-5)
