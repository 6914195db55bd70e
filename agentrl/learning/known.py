"""What an update knows of a batch before its first optimiser step, and holds on to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms import AlgorithmConfig
from agentrl.learning.advantage import centre
from agentrl.learning.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is fixed before the first optimiser step of an update, fp32 [T]."""

    proximal: Tensor
    """The ratio's denominator; NaN: the policy's own logprobs, taken when they are computed."""
    reference: Tensor | None
    advantages: Tensor
    targets: Tensor | None = None
    """What the value of each token should be."""

    def at(self, columns: Tensor) -> "Known":
        """Some of its columns, in that order."""
        return Known(
            proximal=self.proximal[columns],
            reference=None if self.reference is None else self.reference[columns],
            advantages=self.advantages[columns],
            targets=None if self.targets is None else self.targets[columns],
        )


def kl_penalty(batch: Batch, distance_T: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """What the k1 KL of whole trajectories takes from their centred rewards, fp32 [T].

    A KL in the reward goes through the baseline like the reward does; centring is linear, so
    its part can be centred alone.
    """
    rows, mask = batch.rows, batch.action_mask
    sums = torch.zeros(len(batch.lengths)).index_add(0, rows[mask], distance_T[mask])
    trained = torch.bincount(rows[mask], minlength=len(batch.lengths)) > 0
    penalty = torch.zeros_like(sums)
    for group in batch.groups.unique():
        members = (batch.groups == group) & trained
        penalty[members] = torch.tensor(centre(sums[members].tolist(), algorithm.baseline))
    return algorithm.kl_coef * penalty[rows]
