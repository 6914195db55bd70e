from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_cases import group, trajectory, turn

from agentrl.algorithms import AlgorithmConfig
from agentrl.errors import RecordError
from agentrl.learning.advantage import group_advantages, has_signal, turn_advantages
from agentrl.types import Ending, Verdict

REWARDS = st.lists(st.floats(-100, 100), min_size=1, max_size=12)
GROUP_LEVEL = [
    AlgorithmConfig(),
    AlgorithmConfig(preset="grpo"),
    AlgorithmConfig(preset="verl"),
    AlgorithmConfig(preset="rloo"),
    AlgorithmConfig(preset="nemo"),
]
BATCH_LEVEL = [
    AlgorithmConfig(preset="reinforce++"),
    AlgorithmConfig(preset="reinforce++-baseline"),
]


@pytest.mark.parametrize("config", GROUP_LEVEL + BATCH_LEVEL, ids=lambda c: c.preset)
@settings(max_examples=40, deadline=None)
@given(groups=st.lists(REWARDS, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_permutation_permutes_the_result_and_changes_no_bit(config, groups, seed) -> None:
    plain = group_advantages(groups, config)
    draw = Random(seed)
    orders = [draw.sample(range(len(g)), len(g)) for g in groups]
    outer = draw.sample(range(len(groups)), len(groups))
    shuffled = [[groups[g][m] for m in orders[g]] for g in outer]
    got = group_advantages(shuffled, config)
    assert got == [tuple(plain[g][m] for m in orders[g]) for g in outer]


@pytest.mark.parametrize("config", GROUP_LEVEL, ids=lambda c: c.preset)
@settings(max_examples=40, deadline=None)
@given(groups=st.lists(REWARDS, min_size=2, max_size=5))
def test_a_group_does_not_see_the_others(config, groups) -> None:
    alone = [group_advantages([g], config)[0] for g in groups]
    assert group_advantages(groups, config) == alone


@pytest.mark.parametrize("config", GROUP_LEVEL, ids=lambda c: c.preset)
@settings(max_examples=40, deadline=None)
@given(rewards=REWARDS)
def test_order_of_rewards_is_the_order_of_advantages(config, rewards) -> None:
    (got,) = group_advantages([rewards], config)
    if config.scale == "others":  # each member has a deviation of its own
        return
    pairs = sorted(zip(rewards, got, strict=True))
    assert [a for _, a in pairs] == sorted(a for _, a in pairs)


@settings(max_examples=40, deadline=None)
@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=9), shift=st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_shift(rewards, shift) -> None:
    (plain,) = group_advantages([rewards], AlgorithmConfig())
    (moved,) = group_advantages([[r + shift for r in rewards]], AlgorithmConfig())
    assert sum(plain) == pytest.approx(0, abs=1e-9)
    assert moved == pytest.approx(plain, abs=1e-9)


def test_nearly_equal_rewards_follow_the_formula() -> None:
    config = AlgorithmConfig(preset="verl")
    (got,) = group_advantages([[1.0, 1.0001]], config)
    assert got == pytest.approx((-0.6972, 0.6972), abs=2e-4)


def test_members_of_a_group_are_trajectories_whatever_their_turns() -> None:
    one = trajectory(turn([1], [2]), member=0)
    three = trajectory(*[turn([1], [2])] * 3, member=1)
    got = turn_advantages([group([one, three], [1.0, 0.0])], AlgorithmConfig())
    assert got == [[(0.5,), (-0.5,) * 3]]


def test_an_invalid_member_is_outside_of_everything() -> None:
    members = [trajectory(turn([1], [2]), member=m) for m in range(3)]
    mixed = group(members, [1.0, Verdict(invalid="sandbox died"), 0.0])
    assert turn_advantages([mixed], AlgorithmConfig()) == [[(0.5,), None, (-0.5,)]]
    process = group(
        members,
        [Verdict(reward=1, step_rewards=(1,)), Verdict(invalid="x"),
         Verdict(reward=0, step_rewards=(0,))],
    )  # fmt: skip
    got = turn_advantages([process], AlgorithmConfig(preset="grpo-process"))
    assert got == [[(1.0,), None, (-1.0,)]]


def test_a_truncated_member_stays_in_the_baseline() -> None:
    cut = trajectory(turn([1], [2]), ending=Ending.CUT_OFF, member=1)
    pair = group([trajectory(turn([1], [2])), cut], [1.0, 0.0])
    assert turn_advantages([pair], AlgorithmConfig(mask_truncated=True)) == [[(0.5,), (-0.5,)]]


def test_two_tasks_with_the_same_text_are_two_groups() -> None:
    pairs = [group([trajectory(turn([1], [2]), member=m) for m in range(2)], [1.0, 0.0])] * 2
    assert turn_advantages(pairs, AlgorithmConfig()) == [[(0.5,), (-0.5,)]] * 2


def test_process_supervision_wants_a_reward_for_each_turn() -> None:
    config = AlgorithmConfig(preset="grpo-process")
    both = [trajectory(turn([1], [2]), turn([1], [2]), member=m) for m in range(2)]
    good = group(
        both,
        [Verdict(reward=1, step_rewards=(1, 1)), Verdict(reward=0, step_rewards=(0, 0))],
    )
    assert turn_advantages([good], config) == [[(2.0, 1.0), (-2.0, -1.0)]]
    assert has_signal(good, config)
    bad = group(both, [Verdict(reward=1, step_rewards=(1,)), Verdict(reward=0)])
    with pytest.raises(RecordError, match="m0: 2 turns and 1 step rewards"):
        turn_advantages([bad], config)


def test_overlong_length_counts_sampled_tokens_alone() -> None:
    long = trajectory(turn([1] * 50, [2] * 3), turn([1] * 50, [2] * 2), member=0)
    short = trajectory(turn([1], [2]), member=1)
    config = AlgorithmConfig(length_tokens=(6, 4))
    got = turn_advantages([group([long, short], [1.0, 1.0])], config)
    assert got == [[(-0.375, -0.375), (0.375,)]]  # 5 of 6 tokens: -0.75
