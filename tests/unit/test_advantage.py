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


def test_segments_share_one_weight_in_the_baseline_and_one_advantage() -> None:
    first, retry = trajectory(turn([1], [2])), trajectory(*[turn([1], [2])] * 2)
    other = trajectory(turn([1], [2]), member=1)
    got = turn_advantages([group([first, retry, other], [1.0, 1.0, 0.0])], AlgorithmConfig())
    assert got == [[(0.5,), (0.5, 0.5), (-0.5,)]]


def test_credit_for_turns_refuses_segments() -> None:
    parts = [trajectory(turn([1], [2])), trajectory(turn([1], [2]))]
    other = trajectory(turn([1], [2]), member=1)
    verdicts = [Verdict(reward=r, step_rewards=(r,)) for r in (1.0, 1.0, 0.0)]
    with pytest.raises(RecordError, match="has 2 segments"):
        turn_advantages([group([*parts, other], verdicts)], AlgorithmConfig(preset="grpo-process"))


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


# --- turn-level credit, parts -----------------------------------------------------------------


def test_a_state_is_what_the_observation_showed() -> None:
    """Both come to observation [9]; the prompt [1] is shared too. No step rewards: the outcome."""
    short = trajectory(turn([1], [2]), turn([9], [3]), member=0)
    long = trajectory(turn([1], [2]), turn([8], [2]), turn([9], [3]), member=1)
    config = AlgorithmConfig(preset="gigpo", discount=0.5)
    (rows,) = turn_advantages([group([short, long], [1.0, 0.0])], config)
    assert rows == [(0.5 + 0.25, 0.5 + 0.5), (-0.5 - 0.25, -0.5, -0.5 - 0.5)]


def test_shared_states_teach_where_outcomes_are_equal() -> None:
    short = trajectory(turn([1], [2]), member=0)
    long = trajectory(turn([1], [2]), turn([9], [3]), member=1)
    solved = group([short, long], [1.0, 1.0])
    assert has_signal(solved, AlgorithmConfig(preset="gigpo", discount=0.5))
    assert not has_signal(solved, AlgorithmConfig(preset="gigpo", discount=1.0))


@pytest.mark.parametrize("preset", ["gigpo", "mt-grpo", "gdpo", "grpo-process"])
def test_turn_credit_follows_its_member_whatever_the_order(preset: str) -> None:
    draw = Random(3)
    members, verdicts = [], []
    for m in range(6):
        turns = [turn([draw.randint(1, 2)], [3]) for _ in range(draw.randint(1, 4))]
        members.append(trajectory(*turns, member=m))
        steps = tuple(draw.random() for _ in turns)
        verdicts.append(
            Verdict(reward=draw.random(), step_rewards=steps,
                    components={"a": draw.random(), "b": float(m % 2)})
        )  # fmt: skip
    verdicts[2] = Verdict(invalid="gone")
    order = draw.sample(range(6), 6)
    config = AlgorithmConfig(preset=preset)
    (plain,) = turn_advantages([group(members, verdicts)], config)
    shuffled = group([members[i] for i in order], [verdicts[i] for i in order])
    (got,) = turn_advantages([shuffled], config)
    assert got == [plain[i] for i in order]
    assert plain[2] is None and any(plain[0])


def test_parts_are_normalised_over_the_batch_at_last() -> None:
    members = [trajectory(turn([1], [2]), member=m) for m in range(2)]

    def pair(*parts: dict[str, float]):
        return group(members, [Verdict(reward=sum(p.values()), components=p) for p in parts])

    one = pair({"right": 0, "form": 0}, {"right": 1, "form": 0})
    two = pair({"right": 0, "form": 0}, {"right": 1, "form": 1})
    got = turn_advantages([one, two], AlgorithmConfig(preset="gdpo"))
    deviation = ((2 * 0.5 + 2 * 2) / 3) ** 0.5
    flat = [value for rows in got for row in rows for value in row]
    wanted = [-(0.5**0.5), 0.5**0.5, -(2**0.5), 2**0.5]
    assert flat == pytest.approx([w / deviation for w in wanted])


def test_the_weight_of_a_part_is_the_configurations() -> None:
    members = [trajectory(turn([1], [2]), member=m) for m in range(2)]
    parts = [{"right": 0.0, "form": 1.0}, {"right": 1.0, "form": 0.0}]
    both = group(members, [Verdict(reward=1.0, components=p) for p in parts])
    even = AlgorithmConfig(preset="gdpo", scale="none")
    assert turn_advantages([both], even) == [[(0.0,), (0.0,)]]
    assert has_signal(both, even), "the parts differ, though the total does not"
    uneven = AlgorithmConfig(preset="gdpo", part_weights={"form": 0.1})
    first, second = turn_advantages([both], uneven)[0]
    assert second[0] > 0 > first[0]


@pytest.mark.parametrize("parts", [{}, {"other": 1.0}, {"right": 1.0, "more": 0.0}])
def test_parts_must_be_the_same_everywhere(parts: dict) -> None:
    members = [trajectory(turn([1], [2]), member=m) for m in range(2)]
    verdicts = [Verdict(reward=1.0, components={"right": 1.0}), Verdict(reward=0, components=parts)]
    with pytest.raises(RecordError, match="m1: its verdict has the parts"):
        turn_advantages([group(members, verdicts)], AlgorithmConfig(preset="gdpo"))


def test_a_pass_is_all_that_counts_with_reward_passed() -> None:
    members = [trajectory(turn([1], [2]), member=m) for m in range(2)]
    verdicts = [Verdict(reward=0.9), Verdict(reward=0.1, passed=True)]
    config = AlgorithmConfig(reward="passed")
    assert turn_advantages([group(members, verdicts)], config) == [[(-0.5,), (0.5,)]]
