"""An episode counts once, however many conversations its agent held."""

from dataclasses import replace

import pytest
import torch
from learning_cases import batch_of, group, make_learner, tiny_model, trajectory, turn

from agentrl.algorithms import AlgorithmConfig
from agentrl.learning.batch import Batch
from agentrl.learning.known import kl_penalty
from agentrl.learning.layout import layout_of
from agentrl.learning.plan import PADDING
from agentrl.learning.preference import preferred
from agentrl.types import Group


def in_segments() -> Group:
    """Member 0 held two conversations, of 2 and 4 sampled tokens; the others one."""
    return group(
        [
            trajectory(turn([1, 2], [3, 4]), member=0),
            replace(trajectory(turn([5], [6, 7, 8, 9]), member=0), id="m0-2"),
            trajectory(turn([1, 2], [5, 6, 7]), member=1),
            trajectory(turn([1, 2], [9]), member=2),
        ],
        [1.0, 1.0, 0.0, 0.0],
    )


def weights(batch: Batch, algorithm: AlgorithmConfig) -> list[float]:
    """The sum of the weights of each row."""
    learner = make_learner(algorithm, reference=tiny_model(1) if algorithm.kl_coef else None)
    got = learner._weights(batch)
    return torch.zeros(len(batch.lengths)).index_add(0, batch.rows, got).tolist()


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [
        ("sequence_mean", [2 / 6 / 3, 4 / 6 / 3, 1 / 3, 1 / 3]),
        ("constant", [2 / 30, 4 / 30, 3 / 30, 1 / 30]),
        ("sequence_sum", [2 / 3, 4 / 3, 3 / 3, 1 / 3]),
        ("token_mean", [0.2, 0.4, 0.3, 0.1]),
    ],
)
def test_segments_share_the_weight_of_their_episode(aggregation: str, wanted: list) -> None:
    algorithm = AlgorithmConfig(aggregation=aggregation, length_tokens=(10, 0))
    assert weights(batch_of([in_segments()], algorithm), algorithm) == pytest.approx(wanted)


def test_the_value_loss_and_the_outcome_of_ppo_count_an_episode_once() -> None:
    """Both segments end in the episode's verdict; together they weigh as much as one member."""
    algorithm = AlgorithmConfig(preset="ppo", aggregation="sequence_mean", kl_coef=0.0)
    batch = batch_of([in_segments()], algorithm)
    first, second, *others = weights(batch, algorithm)
    assert first + second == pytest.approx(others[0]) == pytest.approx(others[1])
    assert batch.advantages[batch.action_mask].tolist() == [1.0] * 6 + [0.0] * 4


def test_a_preference_is_of_whole_episodes() -> None:
    """Two pairs: the segments' gains add up, and each has the coefficient of the episode."""
    batch = batch_of([in_segments()], AlgorithmConfig(preset="dpo"))
    policy = torch.linspace(-2, -1, len(batch.input_ids))
    reference = policy.flip(0)
    found, loss = preferred(batch, policy, reference, 0.1)
    gains = torch.zeros(4).index_add(
        0, batch.rows[batch.action_mask], (policy - reference)[batch.action_mask]
    )
    margins = 0.1 * (gains[0] + gains[1] - gains[2:])
    pulls = 0.1 * torch.sigmoid(-margins) / 2
    by_row = found[batch.starts]
    wanted = [float(pulls.sum())] * 2 + [-float(p) for p in pulls]
    assert by_row.tolist() == pytest.approx(wanted, rel=1e-5)
    assert loss == pytest.approx(float(-torch.nn.functional.logsigmoid(margins).mean()))


def test_the_kl_in_the_reward_is_of_the_whole_episode() -> None:
    algorithm = AlgorithmConfig(preset="rloo", kl_coef=0.5)
    batch = batch_of([in_segments()], algorithm)
    penalty = kl_penalty(batch, torch.ones(len(batch.input_ids)), algorithm)[batch.starts]
    sums = (6.0, 3.0, 1.0)
    of = [0.5 * (s - (sum(sums) - s) / 2) for s in sums]
    assert penalty.tolist() == pytest.approx([of[0], of[0], of[1], of[2]])


def test_episodes_travel_with_selected_and_saved_rows(tmp_path) -> None:
    batch = batch_of([in_segments()])
    assert batch.episode_of_rows.tolist() == [0, 0, 1, 2]
    assert batch.select([1, 3]).episode_of_rows.tolist() == [0, 2]
    batch.save(tmp_path / "batch")
    assert Batch.load(tmp_path / "batch").episode_of_rows.tolist() == [0, 0, 1, 2]


def test_continuations_of_a_prompt_are_padded_by_at_most_a_twentieth() -> None:
    members = [trajectory(turn(range(1, 21), [21 + m] * (5 + 17 * m)), member=m) for m in range(6)]
    batch = batch_of([group(members, [0.0, 1.0] * 3)])
    layout = layout_of(batch.input_ids, batch.lengths.tolist(), batch.groups.tolist())
    cells = sum(block.size[0] * block.size[1] for block in layout.blocks)
    tokens = sum(len(block.columns) for block in layout.blocks)
    assert tokens < int(batch.lengths.sum()) and 1 - tokens / cells <= PADDING
