"""PPO: the value head, and advantages over action tokens alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learning_cases import (
    batch_of,
    gradients,
    group,
    make_learner,
    random_groups,
    tiny_model,
    trajectory,
    turn,
    weights_of,
)
from pydantic import ValidationError

from agentrl.algorithms import AlgorithmConfig
from agentrl.learning.checkpoint import Progress, load_checkpoint, save_checkpoint
from agentrl.learning.values import critic_targets, gae, value_head_for, whitened

PPO = AlgorithmConfig(preset="ppo", kl_coef=0.0, kl_form="k1", scale="none")


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-5, atol=1e-6 * float(left.abs().max()))


@pytest.mark.parametrize(
    ("discount", "decay", "wanted"),
    [
        (1.0, 1.0, (0.5, 0.8, 0.3)),  # the outcome minus the value
        (1.0, 0.0, (-0.3, 0.5, 0.3)),  # one step ahead
        (1.0, 0.5, (0.025, 0.65, 0.3)),
        (0.9, 1.0, (0.31, 0.7, 0.3)),
        (0.9, 0.5, (-0.06575, 0.565, 0.3)),
    ],
)
def test_gae_of_three_tokens(discount: float, decay: float, wanted: tuple[float, ...]) -> None:
    """Rewards 0, 0, 1; values .5, .2, .7 (1506.02438 equation 16)."""
    rewards, values = torch.tensor([0.0, 0, 1]), torch.tensor([0.5, 0.2, 0.7])
    got, targets = gae(
        rewards, values, torch.zeros(3, dtype=torch.int64), discount=discount, decay=decay
    )
    assert got.tolist() == pytest.approx(wanted, abs=1e-6)
    assert targets.tolist() == pytest.approx(
        [a + v for a, v in zip(wanted, values.tolist(), strict=True)]
    )


def test_rows_do_not_see_each_other() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.tensor([0] * 4 + [2] + [3] * 7)
    rewards, values = torch.rand(12, generator=draw), torch.rand(12, generator=draw)
    every = gae(rewards, values, rows, discount=0.9, decay=0.8)
    for row in (0, 2, 3):
        mine = rows == row
        alone = gae(rewards[mine], values[mine], rows[mine] * 0, discount=0.9, decay=0.8)
        assert all(torch.equal(a[mine], b) for a, b in zip(every, alone, strict=True))


def test_observations_are_no_states() -> None:
    """Two turns with a long observation between: as if the four sampled tokens were adjacent."""
    member = trajectory(turn([1, 2], [3, 4]), turn([5, 6, 7, 8], [9, 10]), member=0)
    batch = batch_of([group([member, trajectory(turn([1], [2]), member=1)], [1.0, 0.0])], PPO)
    values = torch.where(batch.action_mask, 0.25, torch.nan)
    advantages, targets = critic_targets(batch, values, None, PPO)
    rows = torch.zeros(4, dtype=torch.int64)
    wanted, _ = gae(
        torch.tensor([0.0, 0, 0, 1]), torch.full((4,), 0.25), rows, discount=1.0, decay=0.95
    )
    mask = batch.action_mask & (batch.rows == 0)
    assert torch.equal(advantages[mask], wanted)
    assert advantages.isfinite().all() and targets.isfinite().all()
    assert (advantages[~batch.action_mask] == 0).all()


def test_the_kl_is_taken_from_each_token() -> None:
    batch = batch_of([group([trajectory(turn([1], [2, 3, 4]))], [1.0])], PPO)
    values, distance = torch.zeros(4), torch.tensor([9.0, 0.2, 0.4, 0.6])
    undecayed = PPO.model_copy(update={"gae_decay": 1.0, "kl_coef": 0.5})
    advantages, _ = critic_targets(batch, values, distance, undecayed)
    assert advantages.tolist() == pytest.approx([0, 0.4, 0.5, 0.7], abs=1e-6)


def test_whitened() -> None:
    sample = AlgorithmConfig(preset="ppo", eps=0.0)
    got = whitened(torch.tensor([0.0, 0, 1, 1]), sample)
    assert got.tolist() == pytest.approx([-0.866025] * 2 + [0.866025] * 2, abs=1e-6)
    assert whitened(torch.full((12,), 0.9), sample).tolist() == [0.0] * 12
    assert whitened(torch.tensor([0.7]), sample).tolist() == [0.0]


def test_the_gradient_is_that_of_the_formula() -> None:
    """Values are 0 at first: A is GAE of the outcome, and the head learns from the targets."""
    batch = batch_of(random_groups(groups=2), PPO)
    learner = make_learner(PPO, max_grad_norm=1e9)
    got = gradients(learner, batch)
    model, head = tiny_model(), value_head_for(tiny_model())
    tokens = int(batch.action_mask.sum())
    advantages, targets = critic_targets(batch, torch.zeros_like(batch.advantages), None, PPO)
    total = torch.zeros(())
    for row in range(len(batch.lengths)):
        columns = batch.columns([row])
        ids, mask = batch.input_ids[columns], batch.action_mask[columns][1:]
        out = model(input_ids=ids[None], output_hidden_states=True)
        logp = out.logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        values = head(out.hidden_states[-1][0, :-1])[:, 0]
        policy = -(advantages[columns][1:] * (logp - logp.detach()).exp())[mask].sum()
        error = (values - targets[columns][1:])[mask].square().sum() / 2
        total = total + (policy + 0.1 * error) / tokens
    total.backward()
    assert close(torch.cat([p.grad.flatten() for p in model.parameters()]), got)
    state = learner.optimizer.state[learner.value_head.weight]
    assert close(head.weight.grad, state["exp_avg"] / (1 - 0.9))


@pytest.mark.parametrize("budget", [1, 30])
def test_the_micro_batch_plan_changes_no_gradient(budget: int) -> None:
    config = AlgorithmConfig(preset="ppo")
    batch = batch_of(random_groups(), config)

    def grad(tokens: int) -> torch.Tensor:
        learner = make_learner(config, reference=tiny_model(1), micro_batch_tokens=tokens)
        learner.update(batch_of(random_groups(5), config))  # so that the values are not 0
        first = {p: s["exp_avg"].clone() for p, s in learner.optimizer.state.items()}
        learner.update(batch)
        return torch.cat(
            [(s["exp_avg"] - 0.9 * first[p]).flatten() for p, s in learner.optimizer.state.items()]
        )

    whole = grad(10_000)
    assert torch.allclose(whole, grad(budget), rtol=1e-3, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize("garbage", [7.0, float("nan"), float("inf")])
def test_garbage_at_observations_changes_no_bit(garbage: float) -> None:
    batch = batch_of(random_groups(), PPO)
    dirty = replace(batch, advantages=torch.where(batch.action_mask, batch.advantages, garbage))
    first, second = make_learner(PPO), make_learner(PPO)
    assert torch.equal(gradients(first, batch), gradients(second, dirty))


def test_the_value_learns_what_an_episode_earns() -> None:
    good, bad = trajectory(turn([1], [2, 3]), member=0), trajectory(turn([4], [5, 6]), member=1)
    config = PPO.model_copy(update={"value_coef": 1.0})
    batch = batch_of([group([good, bad], [1.0, 0.0])], config)
    learner = make_learner(config, lr=3e-2)
    losses = [learner.update(batch)["value_loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(0.25, abs=0.02) and losses[-1] < 0.02


def test_a_critic_comes_back_with_the_checkpoint(tmp_path: Path) -> None:
    def learner(seed: int):
        return make_learner(PPO, model=tiny_model(seed), lr=1e-2)

    unbroken = learner(0)
    for seed in (0, 1):
        unbroken.update(batch_of(random_groups(seed), PPO))
    folder = save_checkpoint(tmp_path, unbroken, Progress(version=2, cursor=0))
    resumed = learner(5)
    load_checkpoint(folder, resumed)
    for one in (unbroken, resumed):
        one.update(batch_of(random_groups(2), PPO))
    assert torch.equal(weights_of(unbroken), weights_of(resumed))
    assert torch.equal(unbroken.value_head.weight, resumed.value_head.weight)
    assert unbroken.value_head.weight.abs().sum() > 0
    assert len(list(resumed.weights())) == len(list(tiny_model().parameters())), "not published"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scale": "group"}, "baseline value"),
        ({"reward": "parts"}, "baseline value"),
        ({"turn_credit": "states"}, "turn_credit"),
        ({"zero_variance": "drop"}, "zero_variance keep"),
        ({"gae_decay": 1.5}, "gae_decay"),
    ],
)
def test_what_a_value_does_not_go_with(fields: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AlgorithmConfig.model_validate({"preset": "ppo", **fields})
