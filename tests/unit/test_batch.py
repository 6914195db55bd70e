from math import isnan
from pathlib import Path

import pytest
import torch
from learning_cases import batch_of, group, random_groups, trajectory, turn

from agentrl.algorithms import AlgorithmConfig
from agentrl.errors import RecordError
from agentrl.learning.batch import Batch, collate, supervised_batch
from agentrl.types import Ending, Verdict

FIELDS = (
    "input_ids", "lengths", "groups", "action_mask", "behavior_logprobs", "advantages", "versions",
    "turns",
)  # fmt: skip


def same(left: Batch, right: Batch) -> bool:
    return all(
        torch.equal(
            torch.nan_to_num(getattr(left, f), 9.0), torch.nan_to_num(getattr(right, f), 9.0)
        )
        if f == "behavior_logprobs"
        else torch.equal(getattr(left, f), getattr(right, f))
        for f in FIELDS
    )


def test_columns_speak_about_their_own_token() -> None:
    first = trajectory(turn([5, 6, 7], [8, 9], [-0.1, -0.2]), turn([3] * 4, [4], [-0.3]), member=0)
    second = trajectory(turn([5], [6], [-0.4]), member=1)
    batch = batch_of([group([first, second], [1.0, 0.0])])
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 3, 3, 3, 3, 4, 5, 6]
    assert batch.action_mask.int().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1]
    assert batch.lengths.tolist() == [10, 2]
    assert batch.turns.tolist() == [-1, -1, -1, 0, 0, -1, -1, -1, -1, 1, -1, 0]
    assert batch.rows.tolist() == [0] * 10 + [1] * 2
    mask = batch.action_mask
    assert batch.behavior_logprobs[mask].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert batch.behavior_logprobs[~mask].isnan().all()
    assert batch.advantages[mask].tolist() == [0.5, 0.5, 0.5, -0.5]
    assert batch.versions[mask].tolist() == [0] * 4
    assert (batch.versions[~mask] == -1).all()


def test_pad_and_end_tokens_are_known_by_position() -> None:
    batch = batch_of(
        [group([trajectory(turn([5, 0], [6, 0]), member=m) for m in range(2)], [1, 0])]
    )
    assert batch.action_mask.int().tolist() == [0, 0, 1, 1] * 2


def test_invalid_members_and_those_without_a_turn_have_no_row() -> None:
    members = [trajectory(turn([1], [2]), member=0), trajectory(turn([1], [3]), member=1),
               trajectory(member=2)]  # fmt: skip
    batch = batch_of([group(members, [1.0, Verdict(invalid="gold unreadable"), 0.0])])
    assert batch.input_ids.tolist() == [1, 2]
    assert batch.advantages.tolist() == [0.0, 0.5], "but the one without a turn is in the baseline"


@pytest.mark.parametrize("policy", ["drop", "keep"])
def test_groups_without_signal(policy: str) -> None:
    groups = [
        group([trajectory(turn([1], [2]), member=m) for m in range(8)], [1.0] * n + [0.0] * (8 - n))
        for n in (0, 3, 8, 8, 1)
    ]
    batch = batch_of(groups, AlgorithmConfig(zero_variance=policy))
    assert len(batch.groups.unique()) == (2 if policy == "drop" else 5)
    assert len(batch.lengths) == (16 if policy == "drop" else 40)
    assert batch.advantages.count_nonzero() == 16


def test_truncated_members_are_not_trained_but_counted() -> None:
    cut = trajectory(turn([1], [2]), ending=Ending.OUT_OF_TURNS, member=1)
    pair = group([trajectory(turn([1], [2])), cut], [1.0, 0.0])
    batch = batch_of([pair], AlgorithmConfig(mask_truncated=True))
    assert batch.action_mask.tolist() == [False, True, False, False]
    assert batch.advantages[batch.action_mask].tolist() == [0.5]


def test_missing_logprobs_are_refused_with_the_turn() -> None:
    bad = trajectory(turn([1], [2]), turn([1], [2], None), member=0)
    pair = group([bad, trajectory(turn([1], [2]), member=1)], [1.0, 0.0])
    for config in (AlgorithmConfig(), AlgorithmConfig(proximal="behavior", mismatch="none")):
        with pytest.raises(RecordError, match="m0: turn 1 has no logprobs"):
            collate([pair], config)
    batch = collate([pair], AlgorithmConfig(mismatch="none"))
    assert [isnan(x) for x in batch.behavior_logprobs[batch.action_mask].tolist()] == [0, 1, 0]


def test_process_rewards_reach_the_tokens_of_their_turn() -> None:
    both = [trajectory(turn([1], [2, 2]), turn([1], [3]), member=m) for m in range(2)]
    verdicts = [Verdict(reward=1, step_rewards=(1, 1)), Verdict(reward=0, step_rewards=(0, 0))]
    batch = batch_of([group(both, verdicts)], AlgorithmConfig(preset="grpo-process"))
    assert batch.advantages[batch.action_mask].tolist() == [2, 2, 1, -2, -2, -1]


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    batch = batch_of(random_groups())
    batch.save(tmp_path / "batch.safetensors")
    assert same(batch, Batch.load(tmp_path / "batch.safetensors"))


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100])
def test_a_foreign_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "batch.safetensors"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="is no batch"):
        Batch.load(path)
    with pytest.raises(RecordError, match="is no batch"):
        Batch.load(tmp_path / "missing")


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "batch.safetensors"
    batch_of(random_groups()).save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RecordError, match="is no batch"):
        Batch.load(path)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_another_length_or_type_is_refused(name: str) -> None:
    batch = batch_of(random_groups())
    given = {f: getattr(batch, f) for f in FIELDS}
    with pytest.raises(ValueError, match="must be"):
        Batch(**{**given, name: given[name][:-1]})
    with pytest.raises(ValueError, match="must be"):
        Batch(**{**given, name: given[name].double()})


def test_a_row_cannot_begin_with_an_action() -> None:
    batch = batch_of(random_groups())
    given = {f: getattr(batch, f) for f in FIELDS}
    mask = batch.action_mask.clone()
    mask[0] = True
    with pytest.raises(ValueError, match="no context"):
        Batch(**{**given, "action_mask": mask})


def test_selecting_rows_keeps_their_columns_together() -> None:
    batch = batch_of(random_groups())
    order = list(reversed(range(len(batch.lengths))))
    assert same(batch, batch.select(order).select(order))
    one = batch.select([2])
    assert one.input_ids.tolist() == batch.input_ids[batch.rows == 2].tolist()


def test_nothing_to_train_is_an_empty_batch() -> None:
    batch = batch_of([])
    assert (len(batch.lengths), len(batch.input_ids)) == (0, 0)


def test_a_supervised_batch_needs_no_logprobs() -> None:
    batch = supervised_batch([trajectory(turn([1, 2], [3], None)), trajectory()])
    assert batch.action_mask.tolist() == [False, False, True]
