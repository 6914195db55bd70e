"""Why a trajectory taught something or nothing, told as `collate` saw it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learning_cases import group, random_groups, trajectory, turn

from agentrl.algorithms import AlgorithmConfig
from agentrl.learning.batch import collate
from agentrl.learning.lessons import histogram, lessons
from agentrl.types import Ending, Group, Verdict

KEEP = AlgorithmConfig.model_validate({"zero_variance": "keep"})
DROP = AlgorithmConfig.model_validate({"zero_variance": "drop"})
MASKED = AlgorithmConfig.model_validate({"mask_truncated": True, "zero_variance": "keep"})


def a_group(*verdicts: Verdict | float) -> Group:
    members = [trajectory(turn([1, 2], [3, 4]), member=m) for m in range(len(verdicts))]
    return group(members, verdicts)


@pytest.mark.parametrize(
    ("algorithm", "verdicts", "reasons"),
    [
        (KEEP, (0.0, 1.0), [None, None]),
        (KEEP, (1.0, 1.0), ["every member earned the same"] * 2),
        (DROP, (1.0, 1.0), ["its group was dropped: every member earned the same"] * 2),
        (KEEP, (0.0, 0.5, 1.0), [None, "it earned the baseline", None]),
        (KEEP, (0.0, Verdict(invalid="E: x"), 1.0), [None, "no verdict: E: x", None]),
    ],
)
def test_every_silence_has_its_reason(algorithm, verdicts, reasons) -> None:
    assert [lesson.silent for lesson in lessons([a_group(*verdicts)], algorithm)] == reasons


def test_masked_and_empty_members_are_named() -> None:
    cut = trajectory(turn([1], [2]), member=0, ending=Ending.CUT_OFF)
    empty, fine = trajectory(member=1), trajectory(turn([1], [2]), member=2)
    found = lessons([group([cut, empty, fine], [0.0, 0.0, 1.0])], MASKED)
    assert [lesson.silent for lesson in found] == [
        "it ended as cut_off, and algorithm.mask_truncated is on",
        "it ended before the first action",
        None,
    ]
    assert [lesson.trained_tokens for lesson in found] == [0, 0, 1]


def test_a_kl_gives_a_gradient_without_an_advantage() -> None:
    algorithm = AlgorithmConfig.model_validate({"kl_coef": 0.1, "zero_variance": "keep"})
    assert [lesson.silent for lesson in lessons([a_group(1.0, 1.0)], algorithm)] == [None, None]


@given(seed=st.integers(0, 50), policy=st.sampled_from([KEEP, DROP, MASKED]))
def test_lessons_say_what_the_batch_holds(seed: int, policy: AlgorithmConfig) -> None:
    groups = [*random_groups(seed, groups=2), a_group(1.0, 1.0)]
    groups[0] = replace(groups[0], verdicts=(Verdict(invalid="x"), *groups[0].verdicts[1:]))
    batch = collate(groups, policy)
    found = lessons(groups, policy)
    assert sum(lesson.trained_tokens for lesson in found) == int(batch.action_mask.sum())
    rows = [lesson for lesson in found if lesson.advantages]
    assert len(rows) == len(batch.lengths)
    for row, lesson in enumerate(rows):
        columns = batch.columns([row])
        turns = batch.turns[columns]
        for number, advantage in enumerate(lesson.advantages):
            seen = batch.advantages[columns][turns == number]
            assert seen.tolist() == pytest.approx([advantage] * len(seen))


def test_advantages_by_size() -> None:
    found = histogram([0.0, 0.0, 0.3, 1.0, 1.5, 2.0, 9.0, -0.1, -1.0, -3.0])
    assert list(found.values()) == [1, 1, 1, 2, 1, 2, 2]
    assert found["0"] == 2 and found["< -2"] == 1
