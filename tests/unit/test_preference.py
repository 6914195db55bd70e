"""Rejection fine-tuning and DPO: against the losses written out by hand."""

from dataclasses import replace
from math import log
from random import Random

import pytest
import torch
import torch.nn.functional as F
from learning_cases import (
    gradients,
    group,
    make_learner,
    random_groups,
    random_trajectory,
    tiny_model,
    trajectory,
    turn,
    weights_of,
)
from pydantic import ValidationError

from agentrl.algorithms import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.learning.batch import Batch, collate
from agentrl.learning.preference import pairs_of, preference_coefficients
from agentrl.types import Verdict

DPO = AlgorithmConfig(preset="dpo")


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-5, atol=1e-6 * float(left.abs().max()))


def sums(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """log p of the sampled tokens of each row, by a plain forward of that row alone."""
    out = []
    for row in range(len(batch.lengths)):
        part = batch.select([row])
        logits = model(input_ids=part.input_ids[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, part.input_ids[1:, None])[:, 0]
        out.append(logprobs[part.action_mask[1:]].sum())
    return torch.stack(out)


def of(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def graded(seed: int = 0) -> list:
    return [
        replace(g, verdicts=tuple(Verdict(reward=r, passed=r > 0.5) for r in rewards))
        for g, rewards in zip(
            random_groups(seed, groups=2), [(0.0, 1.0, 0.5, 1.0), (1.0, 0.0, 0.0, 0.0)], strict=True
        )
    ]


# --- rejection fine-tuning --------------------------------------------------------------------


def test_rft_is_the_likelihood_of_what_passed() -> None:
    """1[correct] / length on each token's log p, over all outputs (2402.03300 A.1.3)."""
    config = AlgorithmConfig(preset="rft")
    batch = collate(graded(), config)
    got = gradients(make_learner(config, max_grad_norm=1e9), batch)
    model = tiny_model()
    lengths = torch.bincount(batch.rows[batch.action_mask])
    passed = torch.tensor([0.0, 1, 0, 1, 1, 0, 0, 0])
    loss = -(passed * sums(model, batch) / lengths).sum() / len(lengths)
    assert close(of(model, loss), got)


def test_rft_of_groups_that_all_failed_moves_nothing() -> None:
    config = AlgorithmConfig(preset="rft")
    failed = [replace(g, verdicts=(Verdict(reward=0.4),) * 4) for g in random_groups(groups=2)]
    learner = make_learner(config, weight_decay=0.1)
    before = weights_of(learner)
    learner.update(collate(failed, config))
    assert torch.equal(before, weights_of(learner))


def test_rft_has_no_ratio_after_the_first_of_several_steps() -> None:
    """The gradient of a likelihood doesn't depend on who sampled: far from the proximal policy."""
    config = AlgorithmConfig(preset="rft")
    batch = collate(graded(), config)
    old = replace(batch, behavior_logprobs=torch.full_like(batch.behavior_logprobs, -9.0))
    assert torch.equal(gradients(make_learner(config), batch), gradients(make_learner(config), old))


# --- preferences ------------------------------------------------------------------------------


def test_pairs_are_within_a_group_and_of_unequal_rewards() -> None:
    nan = float("nan")
    assert pairs_of([0, 0, 0, 1, 1], [1.0, 0.0, 1.0, 0.5, 2.0]) == [(0, 1), (2, 1), (4, 3)]
    assert pairs_of([0, 0, 0], [1.0, 1.0, nan]) == []


@pytest.mark.parametrize(
    ("gains", "coefficient", "loss"),
    [((0.0, 0.0), 0.05, log(2)), ((2.0, 0.0), 0.045016600, 0.598138869),
     ((0.0, 2.0), 0.054983400, 0.798138869)],
)  # fmt: skip
def test_dpo_gradient_coefficient(gains, coefficient, loss) -> None:
    """beta sigmoid(beta (gain of the worse - gain of the better)), beta .1 (2402.03300 A.1.5)."""
    got, value = preference_coefficients(torch.tensor(gains), [(0, 1)], 0.1)
    assert got.tolist() == pytest.approx([coefficient, -coefficient], abs=1e-8)
    assert value == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_dpo_is_its_loss_over_all_pairs(budget: int) -> None:
    """Whatever micro-batch the rows of a pair fall into."""
    batch = collate(graded(), DPO)
    learner = make_learner(
        DPO, reference=tiny_model(1), max_grad_norm=1e9, micro_batch_tokens=budget
    )
    got = gradients(learner, batch)
    model, reference = tiny_model(), tiny_model(1)
    gains = sums(model, batch) - sums(reference, batch).detach()
    pairs = [(1, 0), (2, 0), (3, 0), (1, 2), (3, 2), (4, 5), (4, 6), (4, 7)]
    losses = [-F.logsigmoid(0.1 * (gains[a] - gains[b])) for a, b in pairs]
    loss = torch.stack(losses).mean()
    assert close(of(model, loss), got)
    again = make_learner(DPO, reference=tiny_model(1)).update(batch)
    assert again["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_dpo_starts_at_ln_2_and_widens_the_gap() -> None:
    good, bad = trajectory(turn([1], [2, 3]), member=0), trajectory(turn([1], [4]), member=1)
    batch = collate([group([good, bad], [1.0, 0.0])], DPO)
    learner = make_learner(DPO, reference=tiny_model(), lr=1e-2)

    def gap() -> float:
        return sum(learner.logprobs(good.token_ids, 1.0)) - sum(learner.logprobs(bad.token_ids, 1))

    before = gap()
    losses = [learner.update(batch)["loss"] for _ in range(4)]
    assert losses[0] == pytest.approx(log(2), abs=1e-6)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.65
    assert gap() > before


def test_a_group_without_a_pair_adds_nothing() -> None:

    draw = Random(3)
    flat = group([random_trajectory(draw, m) for m in range(3)], [1.0] * 3)
    keep = AlgorithmConfig(preset="dpo", zero_variance="keep")
    first, second = (
        gradients(make_learner(keep, reference=tiny_model(1)), collate(groups, keep))
        for groups in (graded(), [*graded(), flat])
    )
    assert close(first, second)
    learner = make_learner(keep, reference=tiny_model(1), weight_decay=0.1)
    before = weights_of(learner)
    assert learner.update(collate([flat], keep))["loss"] == 0
    assert torch.equal(before, weights_of(learner))


def test_pulls_of_a_preference_are_its_coefficients() -> None:
    batch = collate(graded(), DPO)
    pulls = make_learner(DPO, reference=tiny_model()).pulls(batch)
    wanted = torch.tensor([-0.15, 0.1, -0.05, 0.1, 0.15, -0.05, -0.05, -0.05]) / 8
    mask = batch.action_mask
    assert torch.allclose(-pulls[mask], wanted[batch.rows[mask]], atol=1e-7)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"preset": "dpo", "kl_coef": 0.0}, "its beta"),
        ({"preset": "dpo", "baseline": "leave_one_out"}, "ranks by reward"),
        ({"preset": "dpo", "turn_credit": "states"}, "ranks by reward"),
        ({"preset": "dpo", "mismatch": "truncate"}, "reads no engine"),
        ({"preset": "dpo", "clip": "ratio"}, "no ratio"),
        ({"preset": "rft", "ratio": "sequence"}, "no ratio"),
    ],
)
def test_what_an_objective_does_not_go_with(fields: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AlgorithmConfig.model_validate(fields)


def test_preferences_take_the_whole_batch() -> None:
    with pytest.raises(ConfigError, match=r"learner\.minibatches 1"):
        make_learner(DPO, reference=tiny_model(), minibatches=2)
