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
    engine's, NaN if missing), `reference` (None without a KL) and `advantages` don't. `rows` and
    `turns` int64 number the trajectory and the turn that a token belongs to, `weights` is what it
    counts.
    """

    logprobs: Tensor
    entropy: Tensor
    proximal: Tensor
    behavior: Tensor
    reference: Tensor | None
    advantages: Tensor
    rows: Tensor
    turns: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The weighted loss (a scalar to minimise), and what is worth knowing of each token, detached.

    `clipped` is 1 where the clip stopped or cut a gradient, `kl` the estimate of the reference KL,
    `mismatch` log learner - log engine, `cut` is 1 where its weight was cut or the token dropped.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor
    mismatch: Tensor
    cut: Tensor


def token_weights(episodes: Tensor, groups: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """The weight of each trained token in the loss, from the counts of the whole batch.

    `episodes` and `groups` int64 [N] are each token's episode (of all its segments) and group; R
    counts the episodes that have a trained token, P such groups. `token_mean` (2503.14476): 1 / N;
    `sequence_mean` (2402.03300): 1 / (R * length); `prompt_mean` (2510.13786): 1 / (P * tokens of
    the group); `constant` (2503.20783): 1 / (R * L); `sequence_sum` (2402.14740): 1 / R. A
    preference is taken of whole episodes and counts its pairs itself: 1.
    """
    ones = torch.ones(len(episodes), dtype=torch.float32, device=episodes.device)
    if not len(episodes) or algorithm.objective == "preference":
        return ones
    lengths = _sizes(episodes)
    match algorithm.aggregation:
        case "token_mean":
            return ones / len(episodes)
        case "sequence_mean":
            return ones / (lengths.count_nonzero() * lengths[episodes])
        case "prompt_mean":
            sizes = _sizes(groups)
            return ones / (sizes.count_nonzero() * sizes[groups])
        case "constant":
            return ones / (lengths.count_nonzero() * algorithm.length_tokens[0])
        case "sequence_sum":
            return ones / lengths.count_nonzero()


def policy_loss(scores: Scores, algorithm: AlgorithmConfig) -> TokenLoss:
    """The weighted sum of token losses: objective, mismatch weight, KL, entropy.

    Objective `policy` is the clipped one; the others are A log p (2402.03300 appendix A.1).
    """
    log_ratio = scores.logprobs - scores.proximal
    ratio = bounded_exp(level_of(log_ratio, scores, algorithm.ratio))
    if algorithm.objective == "policy":
        objective, clipped = clipped_objective(ratio, scores, algorithm)
    else:
        objective = scores.advantages * scores.logprobs
        clipped = torch.zeros_like(objective, dtype=torch.bool)
    weight, cut = mismatch_weight(scores.proximal - scores.behavior, scores, algorithm)
    per_token = -objective * weight
    kl = torch.zeros_like(per_token)
    if scores.reference is not None and has_kl_term(algorithm):
        distance = scores.logprobs - scores.reference
        kl = kl_estimate(distance, algorithm.kl_form)
        if algorithm.kl_form == "k3_corrected":
            # Always the token's own ratio, whatever the level of the policy's.
            kl = kl * bounded_exp(log_ratio)
        per_token = per_token + algorithm.kl_coef * kl
    if algorithm.entropy_coef:
        per_token = per_token - algorithm.entropy_coef * scores.entropy
    return TokenLoss(
        loss=(per_token * scores.weights).sum(),
        ratio=ratio.detach(),
        clipped=clipped.float(),
        kl=kl.detach(),
        mismatch=(scores.logprobs.detach() if algorithm.proximal == "behavior" else scores.proximal)
        - scores.behavior,
        cut=cut.float(),
    )


def has_kl_term(algorithm: AlgorithmConfig) -> bool:
    """Whether the KL is a term of the loss: not in the reward, and not inside a preference."""
    return (
        algorithm.kl_coef > 0
        and algorithm.kl_form != "k1_reward"
        and algorithm.objective != "preference"
    )


def level_of(log_ratio: Tensor, scores: Scores, level: str) -> Tensor:
    """The log importance ratio at a level: of the token, or the mean over turn or sequence.

    `sequence` is 2507.18071 equation 7; `sequence_token` equation 14: the sequence's value, the
    token's own gradient. `turn` is the same mean over one action.
    """
    if level == "token":
        return log_ratio
    if level == "turn":
        return segment_mean(log_ratio, scores.turns)[scores.turns]
    mean = segment_mean(log_ratio, scores.rows)[scores.rows]
    return mean if level == "sequence" else mean.detach() + log_ratio - log_ratio.detach()


def clipped_objective(
    ratio: Tensor, scores: Scores, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """The objective of each token (to maximise), and where the clip stopped or cut its gradient.

    `ratio`: min(r A, clip(r) A), 1707.06347 equation 7; with `dual_clip` c at least c A where A < 0
    (1912.09729 equation 5). `cispo`: sg(clip(r)) A log p (2506.13585). `sapo`: 4/t sigmoid(t (r -
    1)) A. `difference`: r A unless the probability already moved too far in the direction of A.
    """
    advantages = scores.advantages
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.clip:
        case "none":
            return ratio * advantages, torch.zeros_like(advantages, dtype=torch.bool)
        case "cispo":
            weight = ratio.detach()
            cut = weight.clamp(1 - low, 1 + high)
            return cut * advantages * scores.logprobs, cut != weight
        case "sapo":
            heat = torch.where(advantages > 0, high, low)
            gate = 4 / heat * torch.sigmoid(heat * (ratio - 1))
            return gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)
        case "difference":
            moved = (scores.logprobs.exp() - scores.proximal.exp()).detach()
            stop = ((advantages > 0) & (moved > high)) | ((advantages < 0) & (moved < -low))
            return torch.where(stop, 0.0, ratio * advantages), stop
        case "ratio":
            free, held = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
            objective, stop = torch.minimum(free, held), held < free
            if algorithm.dual_clip is not None:
                floor = algorithm.dual_clip * advantages
                beyond = (advantages < 0) & (floor > objective)
                objective, stop = torch.where(beyond, floor, objective), stop | beyond
            return objective, stop


def mismatch_weight(
    log_difference: Tensor, scores: Scores, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """How much a token that the engine sampled counts, and where that was cut; no gradient flows.

    With d = log learner - log engine: `truncate` min(exp d, cap) (2508.09128); `mask` exp d inside
    the bounds, else 0; `sequence_truncate` and `sequence_mask` the same of the product over the
    trajectory; `geometric_mask` 1 if the geometric mean over the turn is inside the bounds, else
    0, `sequence_geometric_mask` over the trajectory: a mean doesn't grow with length as a product.
    `negative_geometric_mask` drops only what has A < 0 and is below the floor, by the policy as it
    is: bad samples that it has come to find unlikely teach noise, good ones may be as far away
    (2512.02556, whose delta is -log floor).
    """
    if algorithm.mismatch == "none":
        ones = torch.ones_like(log_difference)
        return ones, torch.zeros_like(ones, dtype=torch.bool)
    floor, cap = algorithm.mismatch_bounds
    match algorithm.mismatch:
        case "sequence_truncate" | "sequence_mask":
            log_difference = _segment_sum(log_difference, scores.rows)[scores.rows]
        case "geometric_mask":
            log_difference = segment_mean(log_difference, scores.turns)[scores.turns]
        case "negative_geometric_mask":
            away = scores.logprobs.detach() - scores.behavior
            log_difference = segment_mean(away, scores.rows)[scores.rows]
        case "sequence_geometric_mask":
            log_difference = segment_mean(log_difference, scores.rows)[scores.rows]
        case _:
            pass
    weight = bounded_exp(log_difference.detach())
    if algorithm.mismatch.endswith("truncate"):
        return weight.clamp(max=cap), weight > cap
    dropped = (weight < floor) | (weight > cap)
    if algorithm.mismatch == "negative_geometric_mask":
        dropped = (weight < floor) & (scores.advantages < 0)
    kept = torch.ones_like(weight) if "geometric" in algorithm.mismatch else weight
    return torch.where(dropped, 0.0, kept), dropped


def kl_estimate(log_difference: Tensor, form: str) -> Tensor:
    """KL(policy || reference) of a sampled token from d = log policy - log reference.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1 (never negative; 2402.03300 equation 4).
    """
    if form == "k1":
        return log_difference
    if form == "k2":
        return log_difference.square() / 2
    bounded = log_difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(-bounded) + bounded).clamp(min=0.0)


def entropy_of(logprobs: Tensor) -> Tensor:
    """The entropy (nats) of log-probabilities over the last dimension; p = 0 adds exactly 0.

    The -inf of an impossible token is replaced before the product: 0 * -inf has no gradient.
    """
    possible = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    return -(logprobs.exp() * possible).sum(-1)


def segment_mean(values: Tensor, segments: Tensor) -> Tensor:
    """The mean over the tokens of each segment, fp32 [S]."""
    return _segment_sum(values, segments) / _sizes(segments).clamp(min=1)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp without overflow."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _segment_sum(values: Tensor, segments: Tensor) -> Tensor:
    return values.new_zeros(len(_sizes(segments))).index_add(0, segments, values)


def _sizes(segments: Tensor) -> Tensor:
    return torch.bincount(segments)
