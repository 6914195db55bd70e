import random
from random import Random

import numpy as np
import pytest
import torch
from learning_cases import VOCAB, random_trajectory, tiny_model, trajectory, turn

from agentrl.errors import ConfigError, NonFiniteLoss
from agentrl.learning.supervised import fit


def traces(count: int = 12) -> list:
    draw = Random(0)
    return [random_trajectory(draw, m) for m in range(count)]


def fitted(model, data, **options) -> list[float]:
    losses: list[float] = []
    given = {"steps": 5, "batch": 4, "lr": 1e-2, "seed": 0, "report": losses.append, **options}
    fit(model, data, **given)
    return losses


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_it_learns_what_was_shown() -> None:
    shown = [trajectory(turn([1, 2], [3, 4, 0], None), turn([5], [6, 0], None))]
    model = tiny_model()
    losses = fitted(model, shown, steps=60, batch=1)
    assert losses[-1] < 0.05 < losses[0]
    logits = model(input_ids=torch.tensor([[1, 2, 3, 4, 0, 5, 6]])).logits[0]
    assert logits.argmax(-1)[[1, 2, 3, 5, 6]].tolist() == [3, 4, 0, 6, 0]


def test_the_first_loss_is_the_mean_over_action_tokens() -> None:
    data, model = traces(4), tiny_model()
    total, count = 0.0, 0
    for t in data:
        ids = torch.tensor(t.token_ids)
        logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        logp = logp.gather(-1, ids[1:, None])[:, 0]
        mask = torch.tensor(t.action_mask[1:])
        total, count = total - logp[mask].sum().item(), count + int(mask.sum())
    assert fitted(model, data, steps=1)[0] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_the_micro_batch_plan_changes_nothing_but_rounding(budget: int) -> None:
    whole, parts = tiny_model(), tiny_model()
    first = fitted(whole, traces(), steps=2)
    assert fitted(parts, traces(), steps=2, micro_batch_tokens=budget) == pytest.approx(first)


def test_its_shuffle_is_its_own() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    one, two, three = tiny_model(), tiny_model(), tiny_model()
    torch.manual_seed(1)
    fitted(one, traces(), seed=3)
    torch.manual_seed(2)
    fitted(two, traces(), seed=3)
    fitted(three, traces(), seed=4)
    assert torch.equal(flat(one), flat(two))
    assert not torch.equal(flat(one), flat(three))
    torch.manual_seed(1)
    fitted(one, traces())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]


def test_every_trace_is_seen_once_an_epoch() -> None:
    data = [trajectory(turn([1], [2 + m], None), member=m) for m in range(6)]
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    before = model.lm_head.weight.detach().clone()
    fitted(model, data, steps=3, batch=2, lr=1e-2)
    moved = (model.lm_head.weight.detach() - before).abs().sum(-1)
    assert (moved[2:8] > 0).all()


def test_the_model_reads_plain_input_afterwards() -> None:
    model = tiny_model()
    fitted(model, traces(), steps=1)
    assert model(input_ids=torch.arange(VOCAB)[None]).logits.isfinite().all()


def test_nothing_to_imitate_is_an_error() -> None:
    for data in ([], [trajectory()]):
        with pytest.raises(ConfigError, match="at least one trace"):
            fitted(tiny_model(), data)


def test_what_is_not_finite_stops_before_the_weights_change() -> None:
    model, seen = tiny_model(), []

    def report(loss: float) -> None:
        seen.append(flat(model).clone())

    with pytest.raises(NonFiniteLoss, match="warm start, step 1"):
        fitted(model, traces(), lr=1e30, report=report)
    assert len(seen) == 1 and torch.equal(flat(model), seen[0])


def test_damaged_weights_are_named_at_the_start() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("nan")
    with pytest.raises(ConfigError, match="not finite"):
        fitted(model, traces())
