"""Preferences within a group: DPO as coefficients on the logprobs of whole trajectories.

The gradient of DPO at the weights as they are is a fixed number for each trajectory times the
gradient of its logprob. So a preference is learned through the same packed micro-batches as every
other algorithm, and the rows of a pair need not meet in one of them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.learning.batch import Batch


def pairs_of(groups: Sequence[int], rewards: Sequence[float]) -> list[tuple[int, int]]:
    """Every (better, worse) pair of rows that are in the same group, by their rewards."""
    rows = range(len(groups))
    return [
        (a, b) for a in rows for b in rows if groups[a] == groups[b] and rewards[a] > rewards[b]
    ]


def preference_coefficients(
    gains: Tensor, pairs: Sequence[tuple[int, int]], beta: float
) -> tuple[Tensor, float]:
    """How much each row's logprob is to rise, fp32 [B], and the loss (2305.18290 equation 7).

    `gains` [B] is log policy - log reference of each row's whole trajectory. The loss is the mean
    over the pairs of -log sigmoid(beta (gain of the better - gain of the worse)); the coefficient
    of a pair is beta sigmoid(-beta (...)), up for the better and down for the worse. No pairs: 0.
    """
    coefficients = torch.zeros_like(gains)
    if not pairs:
        return coefficients, 0.0
    better, worse = torch.tensor(pairs, device=gains.device).T
    margins = beta * (gains[better] - gains[worse])
    pulls = beta * torch.sigmoid(-margins) / len(pairs)
    coefficients.index_add_(0, better, pulls).index_add_(0, worse, -pulls)
    return coefficients, float(-F.logsigmoid(margins).mean())


def preferred(
    batch: Batch, policy_T: Tensor, reference_T: Tensor, beta: float
) -> tuple[Tensor, float]:
    """The coefficient of each token of a batch whose advantages rank its rows, fp32 [T]; the loss.

    `policy_T` and `reference_T` are logprobs; what stands outside the mask is never read. Rows
    without a trained token are in no pair.
    """
    rows, mask = batch.rows, batch.action_mask
    gains = torch.zeros(len(batch.lengths)).index_add(0, rows[mask], (policy_T - reference_T)[mask])
    trained = torch.bincount(rows[mask], minlength=len(gains)) > 0
    last = torch.zeros(len(gains)).index_put((rows[mask],), batch.advantages[mask])
    rewards = torch.where(trained, last, torch.nan)  # nothing is above or below it
    pairs = pairs_of(batch.groups.tolist(), rewards.tolist())
    coefficients, loss = preference_coefficients(gains, pairs, beta)
    return coefficients[rows], loss
