"""Preferences within a group: DPO as coefficients on the logprobs of whole episodes.

The gradient of DPO at the weights as they are is a fixed number for each episode times the
gradient of its logprob. So a preference is learned through the same packed micro-batches as every
other algorithm, and the rows of a pair need not meet in one of them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.learning.batch import Batch


def pairs_of(groups: Sequence[int], rewards: Sequence[float]) -> list[tuple[int, int]]:
    """Every (better, worse) pair of episodes that are in the same group, by their rewards."""
    rows = range(len(groups))
    return [
        (a, b) for a in rows for b in rows if groups[a] == groups[b] and rewards[a] > rewards[b]
    ]


def preference_coefficients(
    gains: Tensor, pairs: Sequence[tuple[int, int]], beta: float
) -> tuple[Tensor, float]:
    """How much each episode's logprob is to rise, fp32 [E], and the loss (2305.18290 equation 7).

    `gains` [E] is log policy - log reference of each whole episode. The loss is the mean
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
    """The coefficient of each token, fp32 [T], where advantages rank the episodes; the loss.

    `policy_T` and `reference_T` are logprobs; what stands outside the mask is never read. Segments
    of an episode add up. Episodes without a trained token are in no pair.
    """
    owners, mask = batch.episode_of_rows, batch.action_mask
    of_tokens = owners[batch.rows]
    count = int(owners.max()) + 1
    gains = torch.zeros(count).index_add(0, of_tokens[mask], (policy_T - reference_T)[mask])
    trained = torch.bincount(of_tokens[mask], minlength=count) > 0
    last = torch.zeros(count).index_put((of_tokens[mask],), batch.advantages[mask])
    rewards = torch.where(trained, last, torch.nan)  # nothing is above or below it
    groups = torch.full((count,), -1).index_put((owners,), batch.groups)
    pairs = pairs_of(groups.tolist(), rewards.tolist())
    coefficients, loss = preference_coefficients(gains, pairs, beta)
    return coefficients[of_tokens], loss
