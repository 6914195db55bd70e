"""From logits to sampled ids and their logprobs, for many rows with settings of their own."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROUNDING = 1e-6
"""How far fp32 log-probabilities may push a cumulative mass past top_p."""


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """The first `count` draws in [0, 1) of a request's own stream: a function of the seed alone."""
    return np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count)


def processed_logprobs(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor | None, top_p_B: Tensor | None
) -> Tensor:
    """Log-probabilities (nats, fp32) of the distribution that is sampled from.

    log_softmax(logits / temperature); a temperature of 0 (greedy) is scored at temperature 1.
    Then top_k and top_p cut the support and the rest is renormalised, -inf outside. Give None
    when no row has them on; 0 and 1 switch them off for a row.
    """
    scale_B = torch.where(temperature_B > 0, temperature_B, 1.0)
    logp_BV = torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    if top_k_B is None and top_p_B is None:
        return logp_BV
    sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True, stable=True)
    kept_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    if top_k_B is not None:
        rank_V = torch.arange(logp_BV.shape[-1], device=logp_BV.device)
        kept_BV &= (rank_V < top_k_B[:, None]) | (top_k_B[:, None] == 0)
        sorted_BV = torch.log_softmax(sorted_BV.masked_fill(~kept_BV, -torch.inf), dim=-1)
    if top_p_B is not None:
        probs_BV = sorted_BV.double().exp()
        # A token stays while the mass before it is below top_p: the smallest set that reaches it.
        before_BV = probs_BV.cumsum(-1) - probs_BV
        kept_BV &= (before_BV < top_p_B[:, None] - ROUNDING) | (top_p_B[:, None] >= 1)
        kept_BV[:, 0] = True
    support_BV = torch.zeros_like(kept_BV).scatter(-1, order_BV, kept_BV)
    return torch.log_softmax(logp_BV.masked_fill(~support_BV, -torch.inf), dim=-1)


def draw(logp_BV: Tensor, uniform_B: Tensor, greedy_B: Tensor | None) -> Tensor:
    """One id per row by inversion of the cumulative distribution in fp64; argmax where greedy.

    `uniform_B` is fp64 in [0, 1). A token outside the support has probability 0 and is never
    drawn. `greedy_B` (bool) is None when no row is greedy.
    """
    cdf_BV = logp_BV.double().exp().cumsum(-1)
    target_B1 = (uniform_B * cdf_BV[:, -1])[:, None]
    ids_B = torch.searchsorted(cdf_BV, target_B1, right=True).squeeze(-1)
    # NaN logits end up past the vocabulary; their logprob is NaN, and the caller refuses it.
    ids_B = ids_B.clamp(max=logp_BV.shape[-1] - 1)
    return ids_B if greedy_B is None else torch.where(greedy_B, logp_BV.argmax(-1), ids_B)


def longest_common_prefix(a: NDArray[np.int64], b: NDArray[np.int64] | Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    n = min(len(a), len(b))
    differ = np.asarray(a[:n]) != np.asarray(b[:n])
    return int(differ.argmax()) if differ.any() else n
