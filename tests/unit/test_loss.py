"""How the loss as a whole behaves; the worked values are in tests/golden."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_cases import batch_of, gradients, group, make_learner, random_groups, trajectory, turn

from agentrl.algorithms import PRESETS, AlgorithmConfig
from agentrl.learning.loss import Scores, policy_loss, token_weights
from agentrl.types import Ending


def token_scores(**fields: torch.Tensor) -> Scores:
    n = 4
    rows = torch.tensor([0, 0, 1, 1])
    given = {
        "logprobs": torch.tensor([-1.0, -0.5, -2.0, -0.1], requires_grad=True),
        "entropy": torch.ones(n),
        "proximal": torch.tensor([-1.1, -0.5, -1.8, -0.2]),
        "behavior": torch.tensor([-1.0, -0.6, -1.9, -0.3]),
        "reference": torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0]),
        "rows": rows,
        "turns": rows,
        "weights": torch.full((n,), 0.25),
    }
    return Scores(**{**given, **fields})


@pytest.mark.parametrize("preset", PRESETS)
def test_loss_and_gradient_are_finite_and_live(preset: str) -> None:
    scores = token_scores(advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    out = policy_loss(scores, AlgorithmConfig(preset=preset))
    out.loss.backward()
    assert out.loss.isfinite()
    assert scores.logprobs.grad.isfinite().all()
    assert scores.logprobs.grad.abs().sum() > 0


@pytest.mark.parametrize("preset", ["default", "grpo", "gspo", "cispo", "sapo", "dppo"])
def test_the_loss_reads_the_stored_logprob(preset: str) -> None:
    config = AlgorithmConfig(preset=preset)
    field = "behavior" if config.mismatch != "none" or config.proximal == "behavior" else "proximal"
    moved = getattr(token_scores(), field) + 0.05
    others = {"proximal": moved} if config.proximal == "behavior" else {}
    before = policy_loss(token_scores(), config)
    after = policy_loss(token_scores(**{field: moved}, **others), config)
    assert before.loss.item() != after.loss.item()


def test_a_token_mean_over_sampled_tokens_alone() -> None:
    rows = torch.zeros(4, dtype=torch.int64)
    weights = token_weights(rows, rows, AlgorithmConfig())
    assert (torch.ones(4) * weights).sum().item() == 1.0


def test_masked_rows_leave_numerator_and_denominator() -> None:
    """A trains 3 tokens; B, truncated, would add 9: the gradient is that of A alone."""
    a = trajectory(turn([1, 2], [3, 4, 5]), member=0)
    b = trajectory(turn([1, 2], [6] * 9), member=1, ending=Ending.CUT_OFF)
    config = AlgorithmConfig(mask_truncated=True, mismatch="none")
    both = gradients(make_learner(config), batch_of([group([a, b], [1.0, 0.0])], config))
    batch = batch_of([group([a, b], [1.0, 0.0])], config).select([0])
    assert torch.allclose(both, gradients(make_learner(config), batch), atol=1e-7)
    assert both.abs().sum() > 0


def test_dropped_groups_are_as_if_never_sampled() -> None:
    silent = group([trajectory(turn([1], [2, 3]), member=m) for m in range(3)], [1.0] * 3)
    config = AlgorithmConfig(zero_variance="drop")
    groups = random_groups(groups=1)
    both = gradients(make_learner(config), batch_of([silent, *groups], config))
    assert torch.equal(both, gradients(make_learner(config), batch_of(groups, config)))


def test_the_mean_over_sequences_is_kind_to_long_ones_and_others_are_not() -> None:
    rows = torch.tensor([0] * 2 + [1] * 20)
    for aggregation, factor in (
        ("sequence_mean", 10), ("token_mean", 1), ("constant", 1), ("sequence_sum", 1),
    ):  # fmt: skip
        config = AlgorithmConfig.model_validate({"aggregation": aggregation})
        weights = token_weights(rows, torch.zeros_like(rows), config)
        assert (weights[0] / weights[-1]).item() == pytest.approx(factor)


def test_a_reference_equal_to_the_policy_costs_exactly_nothing() -> None:
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -0.1], requires_grad=True)
    for form in ("k1", "k2", "k3", "k3_corrected"):
        config = AlgorithmConfig(kl_coef=1.0, kl_form=form, mismatch="none")
        scores = token_scores(
            logprobs=logprobs, proximal=logprobs.detach(), reference=logprobs.detach(),
            advantages=torch.zeros(4),
        )  # fmt: skip
        out = policy_loss(scores, config)
        assert out.loss.item() == 0 and (out.kl == 0).all()


def test_the_entropy_bonus_lowers_the_loss() -> None:
    config = AlgorithmConfig(entropy_coef=0.1)
    gap = (
        policy_loss(token_scores(), config).loss
        - policy_loss(token_scores(), AlgorithmConfig()).loss
    )
    assert gap.item() == pytest.approx(-0.1)


@settings(max_examples=60, deadline=None)
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    logprobs=st.lists(st.floats(-80, 0), min_size=4, max_size=4),
    proximal=st.lists(st.floats(-80, 0), min_size=4, max_size=4),
    behavior=st.lists(st.floats(-80, 0), min_size=4, max_size=4),
)
def test_no_logprobs_whatever_make_it_overflow(preset, logprobs, proximal, behavior) -> None:
    own = torch.tensor(logprobs, requires_grad=True)
    scores = token_scores(
        logprobs=own, proximal=torch.tensor(proximal), behavior=torch.tensor(behavior)
    )
    out = policy_loss(scores, AlgorithmConfig(preset=preset))
    out.loss.backward()
    assert out.loss.isfinite() and own.grad.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"aggregation": "sequence_mean"}, [1 / 4, 1 / 4, 1 / 2]),
        ({"aggregation": "sequence_sum"}, [1 / 2] * 3),
        ({"aggregation": "constant", "length_tokens": (10, 0)}, [1 / 20] * 3),
        ({"aggregation": "prompt_mean"}, [1 / 4, 1 / 4, 1 / 2]),
        ({"aggregation": "token_mean"}, [1 / 3] * 3),
    ],
)
def test_a_masked_row_or_group_is_in_no_denominator(fields: dict, wanted: list[float]) -> None:
    """Row 1 and group 1 have no trained token."""
    rows, groups = torch.tensor([0, 0, 2]), torch.tensor([0, 0, 2])
    weights = token_weights(rows, groups, AlgorithmConfig(**fields))
    assert weights.tolist() == pytest.approx(wanted)
