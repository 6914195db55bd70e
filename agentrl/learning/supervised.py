"""Supervised warm start: imitate recorded actions, under the same masks and packing."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.errors import ConfigError, NonFiniteLoss
from agentrl.learning.batch import Batch, supervised_batch
from agentrl.learning.packing import packed, token_logprobs
from agentrl.learning.plan import by_tokens, lr_factor
from agentrl.types import Trajectory

_WARMUP_SHARE = 0.05
_MAX_GRAD_NORM = 1.0


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
    loss (nats a token). Raises ConfigError without trajectories, NonFiniteLoss before the weights
    change.
    """
    data = supervised_batch(trajectories)
    if not len(data.lengths):
        raise ConfigError("a warm start needs at least one trace with an action")

    def backward(rows: Sequence[int]) -> float:
        return _backward(model, data.select(rows), micro_batch_tokens)

    with packed(model):
        descend(
            model,
            backward,
            size=len(data.lengths),
            steps=steps,
            batch=batch,
            lr=lr,
            seed=seed,
            report=report,
            what="warm start",
        )


def descend(
    model: PreTrainedModel,
    backward: Callable[[Sequence[int]], float],
    *,
    size: int,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
    report: Callable[[float], None],
    what: str,
) -> None:
    """Update `model` in place `steps` times: AdamW, 5 % warm-up, cosine to 0.

    `backward` leaves the gradients of `batch` of the `size` rows, by number, drawn as `fit` does,
    and returns their loss, which `report` gets after the update. Raises NonFiniteLoss, which names
    `what`, before the weights change.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = int(steps * _WARMUP_SHARE)
    model.train()
    for step, rows in zip(range(steps), _draws(size, min(batch, size), seed), strict=False):
        factor = lr_factor(step, schedule="cosine", warmup=warmup, total=steps)
        for group in optimizer.param_groups:
            group["lr"] = lr * factor
        loss = backward(rows)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM))
        if not (isfinite(loss) and isfinite(norm)):
            raise NonFiniteLoss(
                f"{what}, step {step}: loss {loss}, gradient norm {norm}; lower the learning rate"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(loss)


def _backward(model: PreTrainedModel, batch: Batch, micro_batch_tokens: int) -> float:
    """Gradients of the mean loss over all action tokens of the batch; returns that mean."""
    tokens = int(batch.action_mask.sum())
    losses: list[Tensor] = []
    for rows in by_tokens(batch.lengths.tolist(), micro_batch_tokens):
        part = batch.select(rows)
        scores = token_logprobs(
            model, part.input_ids, part.lengths, part.action_mask, temperature=1.0
        )
        loss = -scores.logprobs.sum() / tokens
        loss.backward()
        losses.append(loss.detach())
    return float(torch.stack(losses).sum())


def _draws(size: int, batch: int, seed: int) -> Iterator[list[int]]:
    """Endless minibatches of row numbers; every row once an epoch, no global generator touched."""
    generator, order = torch.Generator().manual_seed(seed), list[int]()
    while True:
        while len(order) < batch:
            order += torch.randperm(size, generator=generator).tolist()
        yield order[:batch]
        order = order[batch:]
