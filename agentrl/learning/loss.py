"""The policy-gradient loss, token by token; pure functions of flat tensors.

All arguments are fp32 [N], one entry for each trained token, unless said otherwise. What an
aggregation does to a token is one number, its weight, computed from the whole batch: so losses of
micro-batches only add up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms import AlgorithmConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before exp, so that neither value nor gradient overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What is known of each trained token.

    `logprobs` and `entropy` carry gradients; `proximal` (the ratio's denominator), `behavior` (the
    engine's, NaN if missing), `reference` (None without a KL) and `advantages` don't. `rows` int64
    says which trajectory a token belongs to (0 … R - 1), `weights` what it counts.
    """

    logprobs: Tensor
    entropy: Tensor
    proximal: Tensor
    behavior: Tensor
    reference: Tensor | None
    advantages: Tensor
    rows: Tensor
    weights: Tensor


def token_weights(rows: Tensor, *, algorithm: AlgorithmConfig, trajectories: int) -> Tensor:
    """The weight of each trained token in the loss, from the counts of the whole batch.

    `rows` int64 [N] is each token's trajectory. `token_mean` (2503.14476): 1 / N; `sequence_mean`
    (2402.03300): 1 / (R * length); `constant` (2503.20783): 1 / (R * constant_tokens);
    `sequence_sum` (2402.14740): 1 / R, where R counts the trajectories with a trained token.
    """
    if not len(rows):
        return torch.zeros(0)
    lengths = torch.bincount(rows, minlength=trajectories)
    present = float((lengths > 0).sum())
    match algorithm.aggregation:
        case "token_mean":
            return torch.full((len(rows),), 1.0 / len(rows))
        case "sequence_mean":
            return 1.0 / (present * lengths[rows].float())
        case "constant":
            return torch.full((len(rows),), 1.0 / (present * algorithm.constant_tokens))
        case "sequence_sum":
            return torch.full((len(rows),), 1.0 / present)


def policy_loss(scores: Scores, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted loss (a scalar to minimise), and detached sums for metrics.

    The sums are weighted by nothing: divide by the number of tokens for a mean.
    """
    log_ratio = scores.logprobs - scores.proximal
    if algorithm.ratio == "sequence":
        log_ratio = row_mean(log_ratio, scores.rows)[scores.rows]
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    surrogate, clipped = clipped_objective(ratio, scores.logprobs, scores.advantages, algorithm)
    trusted = mismatch_weight(scores.proximal - scores.behavior, algorithm)
    per_token = -surrogate * trusted
    kl = torch.zeros_like(per_token)
    if scores.reference is not None:
        kl = kl_estimate(scores.logprobs - scores.reference, algorithm.kl_estimator)
        per_token = per_token + algorithm.kl_coef * kl
    if algorithm.entropy_coef:
        per_token = per_token - algorithm.entropy_coef * scores.entropy
    sums = {
        "entropy": scores.entropy.detach().sum(),
        "kl_ref": kl.detach().sum(),
        "clip_share": clipped.sum(),
        "ratio_mean": ratio.detach().sum(),
    }
    return (per_token * scores.weights).sum(), sums


def clipped_objective(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """The objective of each token (to maximise), and 1.0 where the clip stopped its gradient."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    if algorithm.clip == "none":
        return ratio * advantages, torch.zeros_like(advantages)
    if algorithm.clip == "cispo":
        capped = ratio.detach().clamp(max=high)
        return capped * advantages * logprobs, (ratio.detach() > high).float()
    free, bounded = ratio * advantages, ratio.clamp(low, high) * advantages
    objective = torch.minimum(free, bounded)
    clipped = bounded < free
    if algorithm.dual_clip is not None:
        floor = algorithm.dual_clip * advantages
        clipped = clipped | ((advantages < 0) & (floor > objective))
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return objective, clipped.float()


def mismatch_weight(log_difference: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """How much a token that the engine sampled counts for the learner: exp(learner - engine).

    `truncate` cuts the weight at the cap (truncated importance sampling), `mask` drops the token.
    """
    if algorithm.mismatch == "none":
        return torch.ones_like(log_difference)
    weight = log_difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    cap = algorithm.mismatch_cap
    if algorithm.mismatch == "truncate":
        return weight.clamp(max=cap)
    return torch.where(weight <= cap, weight, 0.0)


def kl_estimate(log_difference: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) of a sampled token from d = log policy - log reference.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1 (never negative).
    """
    if estimator == "k1":
        return log_difference
    if estimator == "k2":
        return log_difference.square() / 2
    bounded = log_difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(-bounded) + bounded).clamp(min=0.0)


def row_mean(values: Tensor, rows: Tensor) -> Tensor:
    """The mean over each row's tokens, fp32 [R]; 0 for a row without tokens."""
    size = int(rows.max()) + 1 if len(rows) else 0
    sums = values.new_zeros(size).index_add(0, rows, values)
    return sums / torch.bincount(rows, minlength=size).clamp(min=1)


def mismatch_statistics(log_difference: Tensor) -> dict[str, float]:
    """How far the engine's logprobs are from the learner's: d = learner - engine, nats.

    `mismatch_k3` is mean(exp(d) - d - 1), the estimate of KL(engine || learner) from samples of
    the engine; missing ones (NaN) are left out.
    """
    known = log_difference[~log_difference.isnan()].double()
    if not len(known):
        return {"mismatch_k3": 0.0, "mismatch_mean": 0.0, "mismatch_max": 0.0}
    bounded = known.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "mismatch_k3": float((torch.expm1(bounded) - bounded).mean()),
        "mismatch_mean": float(known.abs().mean()),
        "mismatch_max": float(known.abs().max()),
    }
