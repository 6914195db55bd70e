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
    """What the k1 KL of whole episodes takes from their centred rewards, fp32 [T].

    A KL in the reward goes through the baseline like the reward does; centring is linear, so
    its part can be centred alone.
    """
    episodes, mask = batch.episode_of_rows[batch.rows], batch.action_mask
    count = len(batch.episode_of_rows) and int(batch.episode_of_rows.max()) + 1
    sums = torch.zeros(count).index_add(0, episodes[mask], distance_T[mask])
    trained = torch.bincount(episodes[mask], minlength=count) > 0
    groups = torch.full((count,), -1).index_put((batch.episode_of_rows,), batch.groups)
    penalty = torch.zeros_like(sums)
    for group in batch.groups.unique():
        members = (groups == group) & trained
        penalty[members] = torch.tensor(centre(sums[members].tolist(), algorithm.baseline))
    return algorithm.kl_coef * penalty[episodes]
