"""What the numbers of an update say: one line of flat metrics."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from agentrl.learning.loss import LOG_RATIO_LIMIT, Scores, TokenLoss

MISMATCH = (
    "mismatch_k3",
    "mismatch_mean",
    "mismatch_max",
    "mismatch_exp",
    "mismatch_early",
    "mismatch_middle",
    "mismatch_late",
)
METRICS = (
    "loss",
    "value_loss",
    "entropy",
    "kl_ref",
    *MISMATCH,
    "mismatch_cut",
    "effective_share",
    "clip_share",
    "clip_share_up",
    "clip_share_down",
    "ratio_mean",
    "ratio_max",
    "grad_norm",
    "lr",
    "action_tokens",
    "advantage_mean",
    "advantage_abs",
)


def statistics(done: Sequence[tuple[Scores, TokenLoss]]) -> Mapping[str, float]:
    """Means and extremes over the trained tokens of an optimiser step.

    `clip_share` is the share of tokens whose gradient the clip stopped or cut, `_up` and `_down`
    the same among those with A > 0 and A < 0; `effective_share` is (sum w)^2 / (N sum w^2) of the
    weights of policy against engine: 1 when all tokens count alike. `mismatch_cut` is the share of
    those whose weight against the engine was cut, or that were dropped for it.
    """

    def joined(values: Iterator[Tensor]) -> Tensor:
        return torch.cat(list(values)).double().cpu()

    ratio = joined(token_loss.ratio for _, token_loss in done)
    mismatch = joined(token_loss.mismatch for _, token_loss in done)
    clipped = joined(token_loss.clipped for _, token_loss in done)
    advantages = joined(scores.advantages for scores, _ in done)
    return {
        **mismatch_panel(
            mismatch,
            joined(place_in_row(scores.rows) for scores, _ in done),
        ),
        "mismatch_cut": float(joined(token_loss.cut for _, token_loss in done).mean()),
        "entropy": float(joined(scores.entropy for scores, _ in done).mean()),
        "kl_ref": float(joined(token_loss.kl for _, token_loss in done).mean()),
        "effective_share": effective_share(mismatch),
        "clip_share": float(clipped.mean()),
        "clip_share_up": _share(clipped[advantages > 0]),
        "clip_share_down": _share(clipped[advantages < 0]),
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "advantage_mean": float(advantages.mean()),
        "advantage_abs": float(advantages.abs().mean()),
        "action_tokens": float(len(ratio)),
    }


def summary(stats: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Each metric over the optimiser steps: mean, or maximum of maxima; 0 if there was none."""
    if not stats:
        return dict.fromkeys(METRICS, 0.0)
    return {
        name: (max if name.endswith("_max") else fmean)(row[name] for row in stats)
        for name in METRICS
    }


def effective_share(log_difference: Tensor) -> float:
    """Effective samples over samples, of weights exp(d); missing ones (NaN) are left out.

    0 of nothing.
    """
    known = log_difference[~log_difference.isnan()]
    if not len(known):
        return 0.0
    weights = known.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))


def _share(marks: Tensor) -> float:
    return float(marks.mean()) if len(marks) else 0.0


def mismatch_panel(log_difference: Tensor, place: Tensor) -> dict[str, float]:
    """How far the engine's logprobs are from the learner's: d = learner - engine, nats, fp64 [N].

    `mismatch_k3` is mean(exp(d) - d - 1), the estimate of KL(engine || learner) from samples of
    the engine; `mismatch_exp` is mean exp|d|, which one token far away is enough to raise; early,
    middle and late are mean |d| by thirds of `place`, where in its trajectory (0 to 1) a token is:
    what grows along it is a cache or position fault. Missing ones (NaN) are left out.
    """
    known = ~log_difference.isnan()
    d, place = log_difference[known], place[known]
    if not len(d):
        return dict.fromkeys(MISMATCH, 0.0)
    bounded, size = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), d.abs()
    thirds = [size[(place >= low / 3) & (place < (low + 1) / 3)] for low in range(3)]
    early, middle, late = (float(third.mean()) if len(third) else 0.0 for third in thirds)
    return {
        "mismatch_k3": float((torch.expm1(bounded) - bounded).mean()),
        "mismatch_mean": float(size.mean()),
        "mismatch_max": float(size.max()),
        "mismatch_exp": float(bounded.abs().exp().mean()),
        "mismatch_early": early,
        "mismatch_middle": middle,
        "mismatch_late": late,
    }


def place_in_row(rows: Tensor) -> Tensor:
    """Where in its row's trained tokens each one is, from 0 to below 1; `rows` is sorted."""
    sizes = torch.bincount(rows)
    starts = sizes.cumsum(0) - sizes
    return (torch.arange(len(rows), device=rows.device) - starts[rows]) / sizes[rows]
