"""Supervised warm start: imitate recorded actions, under the same masks and packing."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from agentrl.config import LearnerSection
from agentrl.errors import ConfigError, NonFiniteLoss
from agentrl.learning.batch import supervised_batch
from agentrl.learning.learner import by_tokens, lr_factor
from agentrl.learning.packing import pack, token_logprobs
from agentrl.types import Trajectory


def fit(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    *,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
    report: Callable[[float], None],
    micro_batch_tokens: int = 16_384,
) -> None:
    """Train `model` in place by cross-entropy over action tokens alone.

    Each of `steps` updates takes `batch` trajectories, drawn without replacement epoch by epoch
    from a generator of its own; AdamW, 5 % warm-up, cosine to 0. `report` gets each update's mean
    loss (nats a token). Raises ConfigError without trajectories, NonFiniteLoss.
    """
    if not trajectories:
        raise ConfigError("a warm start needs traces: warm_start.traces gave none with an action")
    data, generator = supervised_batch(trajectories), torch.Generator().manual_seed(seed)
    pack(model).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    shape = LearnerSection(schedule="cosine", warmup_steps=max(1, steps // 20))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: lr_factor(s, shape, steps))
    order: list[int] = []
    for _ in range(steps):
        while len(order) < batch:
            order += torch.randperm(len(data.lengths), generator=generator).tolist()
        chosen, order = data.select(order[:batch]), order[batch:]
        tokens, loss = int(chosen.action_mask.sum()), 0.0
        for rows in by_tokens(chosen.lengths.tolist(), micro_batch_tokens):
            part = chosen.select(rows)
            scores = token_logprobs(
                model, part.input_ids, part.lengths, part.action_mask, temperature=1.0
            )
            part_loss = -scores.logprobs.sum() / tokens
            part_loss.backward()
            loss += float(part_loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if not norm < float("inf"):
            raise NonFiniteLoss(f"warm start: gradient norm {norm}; lower warm_start.lr")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        report(loss)
