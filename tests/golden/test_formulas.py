"""Worked values of the published formulas. Every test name says the row it holds."""

from math import e, exp, log

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import AlgorithmConfig
from agentrl.learning.advantage import (
    group_advantages,
    overlong_penalty,
    process_advantages,
)
from agentrl.learning.loss import (
    Scores,
    clipped_objective,
    entropy_of,
    kl_estimate,
    level_of,
    mismatch_weight,
    policy_loss,
    token_weights,
)
from agentrl.learning.panel import effective_share, mismatch_panel, place_in_row, statistics

CLOSE = pytest.approx


def algorithm(**fields: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"mismatch": "none", "zero_variance": "keep", **fields})


def scores(log_ratio: Tensor, advantages: Tensor, **fields: Tensor) -> Scores:
    n = len(log_ratio)
    zeros, numbers = torch.zeros(n), torch.zeros(n, dtype=torch.int64)
    given = {
        "logprobs": log_ratio, "entropy": zeros, "proximal": zeros, "behavior": zeros,
        "reference": None, "rows": numbers, "turns": numbers, "weights": torch.ones(n),
    }  # fmt: skip
    return Scores(advantages=advantages, **{**given, **fields})


# --- advantages -----------------------------------------------------------------------------

ONE_OF_8, TWO_OF_8, FOUR_OF_8 = (1, *[0] * 7), (1, 1, *[0] * 6), (1, 1, 1, 1, 0, 0, 0, 0)
ADVANTAGES = [
    ((0, 0, 1, 1), "pop", (-1, -1, 1, 1)),
    ((0, 0, 1, 1), "sample", (-0.866025, -0.866025, 0.866025, 0.866025)),
    ((0, 0, 1, 1), "centred", (-0.5, -0.5, 0.5, 0.5)),
    ((0, 0, 1, 1), "loo", (-0.666667, -0.666667, 0.666667, 0.666667)),
    ((1, 0, 0, 0), "pop", (1.732051, *[-0.577350] * 3)),
    ((1, 0, 0, 0), "sample", (1.5, -0.5, -0.5, -0.5)),
    ((1, 0, 0, 0), "centred", (0.75, -0.25, -0.25, -0.25)),
    ((1, 0, 0, 0), "loo", (1, *[-0.333333] * 3)),
    ((1, 1, 1, 0), "pop", (*[0.577350] * 3, -1.732051)),
    ((1, 1, 1, 0), "sample", (0.5, 0.5, 0.5, -1.5)),
    ((1, 1, 1, 0), "centred", (0.25, 0.25, 0.25, -0.75)),
    ((1, 1, 1, 0), "loo", (*[0.333333] * 3, -1)),
    (ONE_OF_8, "pop", (2.645751, *[-0.377964] * 7)),
    (ONE_OF_8, "sample", (2.474874, *[-0.353553] * 7)),
    (ONE_OF_8, "centred", (0.875, *[-0.125] * 7)),
    (ONE_OF_8, "loo", (1, *[-0.142857] * 7)),
    (TWO_OF_8, "pop", (*[1.732051] * 2, *[-0.577350] * 6)),
    (TWO_OF_8, "sample", (*[1.620185] * 2, *[-0.540062] * 6)),
    (TWO_OF_8, "centred", (*[0.75] * 2, *[-0.25] * 6)),
    (TWO_OF_8, "loo", (*[0.857143] * 2, *[-0.285714] * 6)),
    (FOUR_OF_8, "pop", (*[1.0] * 4, *[-1.0] * 4)),
    (FOUR_OF_8, "sample", (*[0.935414] * 4, *[-0.935414] * 4)),
    (FOUR_OF_8, "centred", (*[0.5] * 4, *[-0.5] * 4)),
    (FOUR_OF_8, "loo", (*[0.571429] * 4, *[-0.571429] * 4)),
    ((0.1, 0.7, 0.4, 1), "pop", (-1.341641, 0.447214, -0.447214, 1.341641)),
    ((0.1, 0.7, 0.4, 1), "sample", (-1.161895, 0.387298, -0.387298, 1.161895)),
    ((0.1, 0.7, 0.4, 1), "centred", (-0.45, 0.15, -0.15, 0.45)),
    ((0.1, 0.7, 0.4, 1), "loo", (-0.6, 0.2, -0.2, 0.6)),
]  # fmt: skip
KINDS = {
    "pop": {"scale": "group"},
    "sample": {"scale": "group", "ddof": 1},
    "centred": {},
    "loo": {"baseline": "leave_one_out"},
}


@pytest.mark.parametrize(("rewards", "kind", "wanted"), ADVANTAGES)
def test_advantages_of_one_group(rewards, kind, wanted) -> None:
    (got,) = group_advantages([rewards], algorithm(**KINDS[kind]))
    assert got == CLOSE(wanted, abs=1e-6)


@pytest.mark.parametrize("kind", [*KINDS, "trl", "verl", "openrlhf", "nemo", "grpo", "rloo"])
@pytest.mark.parametrize(("reward", "size"), [(0.9, 12), (0.7, 64), (0.1, 3), (-2.5, 8), (1.0, 1)])
def test_a_constant_or_singleton_group_is_exactly_zero(kind, reward, size) -> None:
    config = algorithm(**KINDS[kind]) if kind in KINDS else AlgorithmConfig(preset=kind)
    assert group_advantages([[reward] * size], config) == [(0.0,) * size]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"preset": "trl"}, 0.86587543),
        ({"preset": "verl"}, 0.8660239),
        ({"preset": "openrlhf"}, 0.8660254),
        ({"preset": "nemo"}, 1.154698),
        ({"scale": "group", "eps": 1e-8}, 0.99999998),
        ({"scale": "group", "eps": 1e-6}, 0.999998),
    ],
)
def test_0011_through_each_code_base(fields, wanted) -> None:
    (got,) = group_advantages([[0, 0, 1, 1]], algorithm(**fields))
    assert got == CLOSE((-wanted, -wanted, wanted, wanted), abs=1e-7 if wanted < 1 else 1e-6)


@pytest.mark.parametrize(
    ("fields", "low", "high"),
    [
        ({"scale": "batch"}, -0.5, 1.5),
        ({"scale": "batch", "ddof": 1}, -0.467707, 1.403122),
        ({"scale": "centred", "ddof": 1}, -0.540062, 1.620185),
    ],
)
def test_two_groups_over_a_deviation_of_the_batch(fields, low, high) -> None:
    first, second = group_advantages([[0, 0, 0, 1], [0, 1, 1, 1]], algorithm(**fields))
    assert first == CLOSE((low, low, low, high), abs=1e-6)
    assert second == CLOSE((-high, -low, -low, -low), abs=1e-6)


@pytest.mark.parametrize(
    ("steps", "ddof", "wanted"),
    [
        (([1, 1, 1], [1, 0, 0]), 0,
         ((2.121320, 1.414214, 0.707107), (-2.121320, -2.828427, -1.414214))),
        (([1, 1, 1], [1, 0, 0]), 1,
         ((1.936492, 1.290994, 0.645497), (-1.936492, -2.581989, -1.290994))),
        (([0.2, 0.6, 1], [0, 0.4]), 0,
         ((1.394972, 2.092457, 1.627467), (-1.394972, -0.116248))),
        (([0.2, 0.6, 1], [0, 0.4]), 1,
         ((1.247701, 1.871551, 1.455651), (-1.247701, -0.103975))),
    ],
)  # fmt: skip
def test_process_supervision(steps, ddof, wanted) -> None:
    got = process_advantages(steps, AlgorithmConfig(preset="grpo-process", ddof=ddof))
    for row, want in zip(got, wanted, strict=True):
        assert row == CLOSE(want, abs=1e-6)


def test_process_supervision_with_one_step_is_outcome_supervision() -> None:
    rewards = [0.1, 0.7, 0.4, 1.0]
    process = process_advantages([[r] for r in rewards], AlgorithmConfig(preset="grpo-process"))
    (outcome,) = group_advantages([rewards], AlgorithmConfig(preset="grpo"))
    assert [row[0] for row in process] == list(outcome)


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [(0, 0), (16384, 0), (16385, -0.000244140625), (17408, -0.25), (18432, -0.5), (20480, -1),
     (20481, -1), (99999, -1)],
)  # fmt: skip
def test_dapo_overlong(tokens, wanted) -> None:
    assert overlong_penalty(tokens, (20480, 4096)) == wanted


# --- KL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "k2", "k3", "gradient"),
    [
        (0.1, 0.005, 0.004837418, 0.095163), (-0.1, 0.005, 0.005170918, -0.105171),
        (0.5, 0.125, 0.106530660, 0.393469), (-0.5, 0.125, 0.148721271, -0.648721),
        (log(2), 0.240227, 0.193147181, 0.5), (-log(2), 0.240227, 0.306852819, -1.0),
        (1.0, 0.5, 0.367879441, 0.632121), (-1.0, 0.5, 0.718281828, -1.718282),
        (2.0, 2.0, 1.135335283, 0.864665),
    ],
)  # fmt: skip
def test_kl_estimators(d, k2, k3, gradient) -> None:
    x = torch.tensor([d], dtype=torch.float64, requires_grad=True)
    assert kl_estimate(x, "k1").item() == d
    assert kl_estimate(x, "k2").item() == CLOSE(k2, abs=1e-6)
    value = kl_estimate(x, "k3")
    value.backward()
    assert value.item() == CLOSE(k3, abs=1e-8)
    assert x.grad.item() == CLOSE(gradient, abs=1e-6)


def test_k3_of_a_reference_far_above_is_held() -> None:
    """d = -25: k2 312.5, k3 exp(25) - 26 by the formula; here as at the log-ratio limit of 20."""
    x = torch.tensor([-25.0], dtype=torch.float64)
    assert kl_estimate(x, "k2").item() == 312.5
    assert exp(25) - 26 == CLOSE(7.2005e10, rel=1e-4)
    assert kl_estimate(x, "k3").item() == CLOSE(exp(20) - 21)


@pytest.mark.parametrize("d", [0.0, 1.0, -1.0, 100.0, -100.0, -25.0, 1e-4, -3e38])
def test_k3_neither_overflows_nor_goes_below_zero(d) -> None:
    x = torch.tensor([d], requires_grad=True)
    value = kl_estimate(x, "k3")
    value.backward()
    assert 0 <= value.item() < float("inf")
    assert x.grad.isfinite().all()


def test_ratio_corrected_k3_has_the_gradient_of_the_kl_whatever_the_level_of_the_ratio() -> None:
    """d/dtheta of r * k3 at r = 1 is d * grad log p: the estimator of the KL's own gradient."""
    for level in ("token", "sequence"):
        logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
        given = scores(
            logprobs, torch.zeros(3), proximal=logprobs.detach(),
            reference=torch.tensor([-1.3, -1.0, -0.5]),
        )  # fmt: skip
        config = algorithm(kl_coef=1.0, kl_form="k3_corrected", ratio=level)
        policy_loss(given, config).loss.backward()
        assert logprobs.grad.tolist() == CLOSE([0.3, -1.0, 0.0], abs=1e-6)


# --- clipped objectives -----------------------------------------------------------------------

NARROW, WIDE = {"clip_high": 0.2}, {"clip_high": 0.28}
DUAL, BOUND = {"clip_high": 0.2, "dual_clip": 3.0}, {"clip_high": 0.2, "dual_clip": 4.0}


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted"),
    [
        (1.5, 1, (1.2, 1.28, 1.2, 1.2)), (1.5, -1, (-1.5,) * 4),
        (0.5, 1, (0.5,) * 4), (0.5, -1, (-0.8,) * 4),
        (1.25, 1, (1.2, 1.25, 1.2, 1.2)), (1.3, 1, (1.2, 1.28, 1.2, 1.2)),
        (5, 1, (1.2, 1.28, 1.2, 1.2)), (5, -1, (-5, -5, -3, -4)),
        (0.79, -1, (-0.8,) * 4), (0.81, -1, (-0.81,) * 4),
    ],
)  # fmt: skip
def test_clipped_objective(ratio, advantage, wanted) -> None:
    for fields, want in zip((NARROW, WIDE, DUAL, BOUND), wanted, strict=True):
        r = torch.tensor([float(ratio)], requires_grad=True)
        given = scores(r.detach().log(), torch.tensor([float(advantage)]))
        value, stopped = clipped_objective(r, given, algorithm(**fields))
        value.sum().backward()
        assert value.item() == CLOSE(want, abs=1e-6)
        # The gradient is 0 exactly where another branch than r A decides.
        free = abs(want - ratio * advantage) < 1e-6
        assert bool(stopped) is not free
        assert (r.grad.item() == 0) is not free


@pytest.mark.parametrize(
    ("high", "old", "reached"), [(0.2, 0.01, 0.012), (0.28, 0.01, 0.0128), (0.2, 0.9, 1.08)]
)
def test_the_clip_bounds_how_far_one_update_raises_a_probability(high, old, reached) -> None:
    """The gradient lives just below the bound and is 0 above; for p .9 it lies beyond 1."""
    for new, live in ((reached * 0.999, True), (reached * 1.001, False)):
        r = torch.tensor([new / old], requires_grad=True)
        given = scores(r.detach().log(), torch.ones(1))
        value, _ = clipped_objective(r, given, algorithm(clip_high=high))
        value.sum().backward()
        assert (r.grad.item() != 0) is live


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
def test_gradient_coefficient_of_grpo_in_a_single_update(kl_coef: float) -> None:
    """A + beta (pi_ref / pi - 1) on each token's log pi (2402.03300 equation 21)."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    given = scores(
        logprobs, torch.tensor([0.7, -1.3]), proximal=logprobs.detach(),
        reference=torch.tensor([-1.5, -1.8]),
    )  # fmt: skip
    policy_loss(given, AlgorithmConfig(preset="grpo", kl_coef=kl_coef)).loss.backward()
    wanted = [0.7 + kl_coef * (exp(-0.5) - 1), -1.3 + kl_coef * (exp(0.2) - 1)]
    assert (-logprobs.grad).tolist() == CLOSE(wanted, abs=1e-6)


@pytest.mark.parametrize(("token", "wanted"), [(0, 0.1), (1, 1.344619)])
def test_size_of_the_gradient_at_the_logits(token: int, wanted: float) -> None:
    """sqrt(1 - 2 p_c + sum p^2) for p .9 and a hundred of .001: unlikely tokens pull hardest."""
    probabilities = torch.tensor([0.9, *[0.001] * 100], dtype=torch.float64)
    logits = probabilities.log().requires_grad_()
    logprob = torch.log_softmax(logits, -1)[token, None]
    given = scores(logprob, torch.ones(1), proximal=logprob.detach())
    policy_loss(given, algorithm(clip="none")).loss.backward()
    assert logits.grad.norm().item() == CLOSE(wanted, abs=1e-3)


@pytest.mark.parametrize(
    ("log_ratio", "wanted"), [(2.0, 5.0), (1.0, 2.718282), (-1.0, 0.367879), (-9.0, exp(-9))]
)
def test_cispo_cuts_the_weight_at_5_and_keeps_the_gradient(log_ratio, wanted) -> None:
    logprob = torch.tensor([log_ratio], requires_grad=True)
    given = scores(logprob, torch.tensor([1.0]))
    policy_loss(given, AlgorithmConfig(preset="cispo")).loss.backward()
    assert -logprob.grad.item() == CLOSE(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("heat", "ratio", "wanted", "slope"),
    [
        (1.0, 0.5, 1.510163, 0.940015), (1.0, 1.0, 2.0, 1.0), (1.0, 1.5, 2.489837, 0.940015),
        (1.0, 3.0, 3.523188, 0.419974), (1.05, 1.0, 1.904762, 1.0), (1.05, 3.0, 3.393917, 0.388779),
    ],
)  # fmt: skip
def test_sapo_gate(heat, ratio, wanted, slope) -> None:
    config = AlgorithmConfig(preset="sapo")
    sign = 1.0 if heat == config.clip_high else -1.0
    r = torch.tensor([ratio], requires_grad=True)
    value, _ = clipped_objective(r, scores(r.detach().log(), torch.tensor([sign])), config)
    value.sum().backward()
    assert sign * value.item() == CLOSE(wanted, abs=1e-6)
    assert sign * r.grad.item() == CLOSE(slope, abs=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "kept"),
    [(0.3, 0.6, 1, False), (0.3, 0.45, 1, True), (0.5, 0.25, -1, False), (0.5, 0.25, 1, True),
     (0.3, 0.6, -1, True)],
)  # fmt: skip
def test_dppo_masks_by_the_difference_of_probabilities(old, new, advantage, kept) -> None:
    logprob = torch.tensor([log(new)], requires_grad=True)
    given = scores(
        logprob, torch.tensor([float(advantage)]),
        proximal=torch.tensor([log(old)]), behavior=torch.tensor([log(old)]),
    )  # fmt: skip
    policy_loss(given, AlgorithmConfig(preset="dppo")).loss.backward()
    wanted = -advantage * new / old if kept else 0.0
    assert logprob.grad.item() == CLOSE(wanted, abs=1e-6)


@pytest.mark.parametrize(("advantage", "wanted"), [(1.0, 1.0004), (-1.0, -1.105170918)])
def test_gspo_sequence_ratio(advantage, wanted) -> None:
    log_ratio = torch.tensor([0.1, -0.05, 0.2, 0.15])
    config = AlgorithmConfig(preset="gspo")
    given = scores(log_ratio, torch.full((4,), advantage))
    ratio = level_of(log_ratio, given, "sequence").exp()
    assert ratio.tolist() == CLOSE([1.105170918] * 4, abs=1e-6)
    assert clipped_objective(ratio, given, config)[0].tolist() == CLOSE([wanted] * 4, abs=1e-6)


def test_gspo_token_has_the_value_of_the_sequence_and_the_gradient_of_the_token() -> None:
    log_ratio = torch.tensor([0.1, -0.05, 0.2, 0.15], requires_grad=True)
    given = scores(log_ratio, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    ratio = level_of(log_ratio, given, "sequence_token").exp()
    assert ratio.tolist() == CLOSE([1.105170918] * 4, abs=1e-6)
    (ratio * given.advantages).sum().backward()
    assert log_ratio.grad.tolist() == CLOSE([1.105170918 * a for a in (1, 2, 3, 4)], abs=1e-5)


def test_turn_ratio_is_the_geometric_mean_of_each_turn() -> None:
    log_ratio = torch.tensor([0.1, -0.05, 0.2, 0.15])
    given = scores(log_ratio, torch.ones(4), turns=torch.tensor([0, 0, 1, 1]))
    got = level_of(log_ratio, given, "turn")
    assert got.tolist() == CLOSE([0.025, 0.025, 0.175, 0.175], abs=1e-6)


# --- aggregation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "weights", "loss"),
    [
        ({"aggregation": "sequence_mean"}, (0.25, 0.0625), 0.0),
        ({"aggregation": "token_mean"}, (0.1, 0.1), 0.6),
        ({"aggregation": "constant", "length_tokens": (10, 0)}, (0.05, 0.05), 0.3),
        ({"aggregation": "sequence_sum"}, (0.5, 0.5), 3.0),
        ({"aggregation": "prompt_mean"}, (0.1, 0.1), 0.6),
    ],
)
def test_aggregation_of_lengths_2_and_8(fields, weights, loss) -> None:
    rows, config = torch.tensor([0] * 2 + [1] * 8), algorithm(**fields)
    got = token_weights(rows, torch.zeros_like(rows), config)
    assert (got[0].item(), got[-1].item()) == CLOSE(weights, abs=1e-7)
    advantages = torch.where(rows == 0, 1.0, -1.0)
    given = scores(torch.zeros(10), advantages, weights=got, rows=rows)
    assert policy_loss(given, config).loss.item() == CLOSE(loss, abs=1e-6)


def test_masking_counts_the_policys_tokens_alone() -> None:
    """[policy, policy, tool, tool, policy]: the denominator is 3, not 5."""
    mask = torch.tensor([True, True, False, False, True])
    rows = torch.zeros(5, dtype=torch.int64)[mask]
    for aggregation in ("token_mean", "sequence_mean"):
        weights = token_weights(rows, rows, algorithm(aggregation=aggregation))
        assert weights.tolist() == CLOSE([1 / 3] * 3)


def test_prompt_mean_gives_every_prompt_the_same_weight() -> None:
    rows, groups = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([0, 0, 0, 1, 1, 1])
    got = token_weights(rows, groups, algorithm(aggregation="prompt_mean"))
    assert got.tolist() == CLOSE([1 / 6] * 6)
    got = token_weights(rows[:4], groups[:4], algorithm(aggregation="prompt_mean"))
    assert got.tolist() == CLOSE([1 / 6] * 3 + [1 / 2])


# --- engine against learner -------------------------------------------------------------------

LOG_DIFFERENCES = torch.tensor([0.0, 0.5, -0.5, 3.0])


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"mismatch": "none"}, [1, 1, 1, 1]),
        ({"mismatch": "truncate"}, [1, 1.648721, 0.606531, 2]),
        ({"mismatch": "mask", "mismatch_bounds": (0.5, 5)}, [1, 1.648721, 0.606531, 0]),
        ({"mismatch": "sequence_truncate", "mismatch_bounds": (0, 21)}, [20.085537] * 4),
        ({"mismatch": "sequence_truncate", "mismatch_bounds": (0, 5)}, [5] * 4),
        ({"mismatch": "sequence_mask", "mismatch_bounds": (0.5, 21)}, [20.085537] * 4),
        ({"mismatch": "sequence_mask", "mismatch_bounds": (0.5, 20)}, [0] * 4),
        ({"mismatch": "geometric_mask", "mismatch_bounds": (0.5, 2.12)}, [1] * 4),
        ({"mismatch": "geometric_mask", "mismatch_bounds": (0.5, 2.11)}, [0] * 4),
        ({"mismatch": "sequence_geometric_mask", "mismatch_bounds": (0.5, 2.1171)}, [1] * 4),
        ({"mismatch": "sequence_geometric_mask", "mismatch_bounds": (0.5, 2.1169)}, [0] * 4),
    ],
)
def test_mismatch_weights(fields, wanted) -> None:
    given = scores(torch.zeros(4), torch.ones(4))
    got, cut = mismatch_weight(LOG_DIFFERENCES, given, algorithm(**fields))
    assert got.tolist() == CLOSE(wanted, abs=1e-5)
    free = LOG_DIFFERENCES.exp() if fields["mismatch"] in ("truncate", "mask") else got
    if fields["mismatch"] == "none":
        assert not cut.any()
    elif 0 in wanted or fields["mismatch"] == "truncate":
        assert cut.tolist() == [w == 0 or f != w for w, f in zip(got, free, strict=True)]


@pytest.mark.parametrize(("advantage", "wanted"), [(1.0, 1.44), (-1.0, -1.56)])
def test_decoupled_ppo(advantage, wanted) -> None:
    """Engine to proximal 1.2, proximal to policy 1.3, clip .2."""
    given = scores(
        torch.tensor([log(1.2) + log(1.3)]), torch.tensor([advantage]),
        proximal=torch.tensor([log(1.2)]),
    )  # fmt: skip
    config = algorithm(mismatch="truncate", clip_high=0.2)
    assert -policy_loss(given, config).loss.item() == CLOSE(wanted, abs=1e-6)


MULT = torch.tensor([0.01, -0.02, 0.0, 0.05], dtype=torch.float64)


def test_k3_of_the_mismatch_is_taken_on_samples_of_the_engine() -> None:
    panel = mismatch_panel(MULT, torch.zeros(4))
    assert panel["mismatch_k3"] == CLOSE(3.79984e-4, abs=1e-9)
    assert mismatch_panel(-MULT, torch.zeros(4))["mismatch_k3"] == CLOSE(3.70150e-4, abs=1e-9)
    assert panel["mismatch_max"] == CLOSE(0.05)
    assert panel["mismatch_mean"] == CLOSE(0.02)


def test_mult_prob_error_is_the_mean_of_exp_of_the_distance() -> None:
    assert mismatch_panel(MULT, torch.zeros(4))["mismatch_exp"] == CLOSE(1.020381, abs=1e-6)


def test_mismatch_by_position_in_the_trajectory() -> None:
    rows = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 2])
    assert place_in_row(rows).tolist() == CLOSE(
        [0, 1 / 3, 2 / 3, 0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 0]
    )
    d = torch.tensor([1, 0, -3, 1, 1, 0, 0, 3, 3, 1], dtype=torch.float64)
    panel = mismatch_panel(d, place_in_row(rows))
    got = [panel[f"mismatch_{part}"] for part in ("early", "middle", "late")]
    assert got == [1.0, 0.0, 3.0]


@pytest.mark.parametrize(("gate", "dropped"), [(0.09, True), (0.11, False)])
def test_negative_trajectories_beyond_the_gate_are_dropped_whatever_their_length(
    gate: float, dropped: bool
) -> None:
    """Mean log(engine / policy) is .1 for 2 tokens as for 20; with A > 0 both are kept."""
    rows = torch.tensor([0] * 2 + [1] * 20 + [2] * 2)
    behavior = torch.tensor([0.3, -0.1, *[0.1] * 20, 0.3, -0.1])
    advantages = torch.where(rows == 2, 1.0, -1.0)
    logprobs = torch.zeros(24, requires_grad=True)
    given = scores(
        logprobs, advantages, proximal=torch.zeros(24), behavior=behavior, rows=rows, turns=rows
    )
    out = policy_loss(
        given, algorithm(mismatch="negative_geometric_mask", mismatch_bounds=(exp(-gate), 5))
    )
    out.loss.backward()
    live = (logprobs.grad != 0).tolist()
    assert live == [not dropped] * 22 + [True] * 2
    assert out.cut.tolist() == [float(dropped)] * 22 + [0.0] * 2


@pytest.mark.parametrize(
    ("weights", "share"), [((2, 2, 2, 2), 1), ((1, 0, 0, 0), 0.25), ((3, 1), 0.8), ((), 0)]
)
def test_effective_share_of_weights(weights: tuple[float, ...], share: float) -> None:
    logs = torch.tensor([log(w) if w else -20.0 for w in (*weights,)], dtype=torch.float64)
    assert effective_share(logs) == CLOSE(share, abs=1e-6)
    with_a_missing_one = torch.cat([logs, torch.tensor([torch.nan], dtype=torch.float64)])
    assert effective_share(with_a_missing_one) == CLOSE(share, abs=1e-6)


def test_clip_share_by_the_sign_of_the_advantage() -> None:
    """Ratios 1.5 and 1.5 up (one of A 0), .5 and 1 down: all of up, half of down are clipped."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 1.0])
    given = scores(ratio.log(), torch.tensor([1.0, 0.0, -1.0, -1.0]))
    found = statistics([(given, policy_loss(given, algorithm(preset="grpo", kl_coef=0.0)))])
    assert (found["clip_share_up"], found["clip_share_down"]) == (1.0, 0.5)
    assert found["clip_share"] == 0.5


# --- entropy ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "wanted"), [((0.0, 0.0, 0.0, -torch.inf), 1.098612), ((5.0, -torch.inf), 0.0)]
)
def test_entropy_of_impossible_tokens(logits, wanted) -> None:
    x = torch.tensor(logits, requires_grad=True)
    value = entropy_of(torch.log_softmax(x, -1))
    value.backward()
    assert value.item() == CLOSE(wanted, abs=1e-6)
    assert x.grad.isfinite().all()


def test_a_bounded_ratio_never_overflows() -> None:
    log_ratio = torch.tensor([100.0, -100.0, e], requires_grad=True)
    given = scores(log_ratio, torch.tensor([-1.0, 1.0, 1.0]))
    out = policy_loss(given, algorithm(clip="none"))
    out.loss.backward()
    assert out.loss.isfinite() and log_ratio.grad.isfinite().all()
