"""PPO's critic: a value head on the policy's hidden states, and advantages from its values.

The value of token t is read off the state that token t was sampled from, so column t speaks about
token t here too. Only action tokens are states: an observation is part of the transition.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.algorithms import AlgorithmConfig
from agentrl.learning.batch import Batch
from agentrl.learning.panel import place_in_row


def value_head_for(model: PreTrainedModel) -> nn.Linear:
    """One number for each hidden state, fp32; 0 everywhere at first."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1).to(model.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def gae(
    rewards: Tensor, values: Tensor, rows: Tensor, *, discount: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets, fp32 [N], over the action tokens of each row in order.

    d_t = r_t + discount V_{t+1} - V_t and A_t = sum_k (discount decay)^k d_{t+k} (1506.02438
    equation 16); the target is A_t + V_t. What follows a row's last token is worth 0, also where
    the episode was truncated. `rows` int64 [N] is sorted.
    """
    if not len(rows):
        return rewards, values
    sizes = torch.bincount(rows)
    place = (place_in_row(rows) * sizes[rows]).round().long()
    table = torch.zeros(2, len(sizes), int(sizes.max()) + 1, dtype=torch.float64)
    table[0, rows, place], table[1, rows, place] = rewards.double(), values.double()
    (reward_BT, value_BT), out = table, torch.zeros_like(table[0])
    for t in range(table.shape[2] - 2, -1, -1):
        surprise = reward_BT[:, t] + discount * value_BT[:, t + 1] - value_BT[:, t]
        out[:, t] = surprise + discount * decay * out[:, t + 1]
    advantages = out[rows, place]
    return advantages.float(), (advantages + values).float()


def critic_targets(
    batch: Batch, values_T: Tensor, distance_T: Tensor | None, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets of a batch whose advantages are outcomes, fp32 [T].

    The outcome is the reward of a row's last trained token; the KL, from `distance_T` = log policy
    - log reference, is taken from every token's own (2402.03300 equation 2). `scale batch` whitens
    the advantages over the trained tokens.
    """
    mask, rows = batch.action_mask, batch.rows[batch.action_mask]
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:-1] = rows[1:] != rows[:-1]
    rewards = torch.where(last, batch.advantages[mask], 0.0)
    if distance_T is not None:
        rewards = rewards - algorithm.kl_coef * distance_T[mask]
    found, targets = gae(
        rewards, values_T[mask], rows, discount=algorithm.discount, decay=algorithm.gae_decay
    )
    if algorithm.scale == "batch":
        found = whitened(found, algorithm)
    advantages_T, targets_T = torch.zeros_like(values_T), torch.zeros_like(values_T)
    advantages_T[mask], targets_T[mask] = found, targets
    return advantages_T, targets_T


def whitened(values: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Minus the mean, over the deviation; exactly 0 where all are equal. fp32 [N]."""
    if len(values) < 2 or values.min() == values.max():
        return torch.zeros_like(values)
    exact = values.double()
    spread = exact.std(correction=algorithm.ddof) + algorithm.eps
    return ((exact - exact.mean()) / spread).float()


def value_loss(values: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of (V - target)^2 / 2 over the trained tokens."""
    return (weights * (values - targets).square() / 2).sum()
