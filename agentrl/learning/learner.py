"""One policy step from a batch: score, weigh, sum gradients over micro-batches, clip, step."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import ceil, cos, isfinite, nan, pi
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms import AlgorithmConfig
from agentrl.config import LearnerSection
from agentrl.errors import NonFiniteLoss
from agentrl.learning.batch import Batch
from agentrl.learning.loss import Scores, mismatch_statistics, policy_loss, token_weights
from agentrl.learning.packing import TokenScores, pack, token_logprobs


class PolicyLearner:
    """A `Learner` for any causal LM of transformers.

    It owns `model` from now on and trains it in place; `reference` is a frozen copy for the KL.
    `total_steps` (optimiser steps in the run) shapes the cosine and linear schedules. Scores are
    taken at `temperature`, that of the sampling distribution.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learner: LearnerSection,
        algorithm: AlgorithmConfig,
        temperature: float = 1.0,
        reference: PreTrainedModel | None = None,
        total_steps: int = 1,
    ) -> None:
        self.version = 0
        self.model = pack(model).train()
        self.reference = None if reference is None else pack(reference).eval().requires_grad_(False)
        if learner.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=learner.lr,
            betas=learner.betas,
            weight_decay=learner.weight_decay,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: lr_factor(step, learner, total_steps)
        )
        self._learner, self._algorithm, self._temperature = learner, algorithm, temperature

    def update(self, batch: Batch) -> Mapping[str, float]:
        """Take one policy step: `epochs` x `minibatches` optimiser steps.

        A batch without a trained token changes nothing but the version. Raises NonFiniteLoss
        before weights change.
        """
        stats: list[Mapping[str, float]] = []
        if batch.action_mask.any():
            proximal, reference = self._proximal(batch), self._reference(batch)
            for _ in range(self._learner.epochs):
                for rows in in_parts(batch.lengths.tolist(), self._learner.minibatches):
                    part, columns = batch.select(rows), batch.columns(rows)
                    if part.action_mask.any():
                        known = (proximal[columns], reference[columns])
                        stats.append(self._step(part, *known))
        self.version += 1
        return mean_of(stats)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters by name, as they stand in the model."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def logprobs(self, token_ids: Sequence[int], temperature: float) -> Sequence[float]:
        """Entry t - 1 is the logprob of token t given the ids before it (nats)."""
        wanted = torch.ones(len(token_ids), dtype=torch.bool)
        wanted[0] = False
        ids, lengths = torch.tensor(token_ids), torch.tensor([len(token_ids)])
        with torch.no_grad():
            return token_logprobs(
                self.model, ids, lengths, wanted, temperature=temperature
            ).logprobs.tolist()

    def state(self) -> dict[str, Any]:
        """Everything but the weights that the next step depends on."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "cpu_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all(),
        }

    def load_state(self, state: Mapping[str, Any], *, version: int) -> None:
        """Go on from what `state` gave."""
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        self.schedule.load_state_dict(dict(state["schedule"]))
        torch.set_rng_state(state["cpu_rng"])
        torch.cuda.set_rng_state_all(state["cuda_rng"])
        self.version = version

    def _proximal(self, batch: Batch) -> Tensor:
        """The ratio's denominator, fp32 [T]; NaN where it is the policy's own, just computed."""
        if self._algorithm.proximal == "behavior":
            return batch.behavior_logprobs
        if self._learner.epochs * self._learner.minibatches == 1:
            return torch.full_like(batch.behavior_logprobs, nan)
        return self._score_all(self.model, batch)

    def _reference(self, batch: Batch) -> Tensor:
        """The reference policy's logprobs, fp32 [T]; NaN without one."""
        if self.reference is None:
            return torch.full_like(batch.behavior_logprobs, nan)
        return self._score_all(self.reference, batch)

    @torch.no_grad()
    def _score_all(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        out = torch.full_like(batch.behavior_logprobs, nan)
        for rows in by_tokens(batch.lengths.tolist(), self._learner.micro_batch_tokens):
            part, columns = batch.select(rows), batch.columns(rows)
            out[columns[part.action_mask]] = self._forward(model, part).logprobs.cpu()
        return out

    def _forward(self, model: PreTrainedModel, part: Batch) -> TokenScores:
        return token_logprobs(
            model,
            part.input_ids,
            part.lengths,
            part.action_mask,
            temperature=self._temperature,
        )

    def _step(self, batch: Batch, proximal: Tensor, reference: Tensor) -> Mapping[str, float]:
        """One optimiser step: gradients of micro-batches add up, weights come from all of it."""
        weights = self._weights(batch)
        sums, differences, loss = Counter[str](), list[Tensor](), 0.0
        for rows in by_tokens(batch.lengths.tolist(), self._learner.micro_batch_tokens):
            part, columns = batch.select(rows), batch.columns(rows)
            columns = columns[part.action_mask]
            if not len(columns):
                continue
            scores = self._scores(part, proximal[columns], reference[columns], weights[columns])
            part_loss, part_sums = policy_loss(scores, self._algorithm)
            part_loss.backward()
            loss += float(part_loss.detach())
            sums.update({name: float(value) for name, value in part_sums.items()})
            differences.append((scores.logprobs.detach() - scores.behavior).cpu())
        grad_norm = self._apply(loss)
        tokens = int(batch.action_mask.sum())
        return {
            "loss": loss,
            **{name: value / tokens for name, value in sums.items()},
            **mismatch_statistics(torch.cat(differences)),
            "grad_norm": grad_norm,
            "lr": self.optimizer.param_groups[0]["lr"],
            "trained_tokens": float(tokens),
        }

    def _weights(self, batch: Batch) -> Tensor:
        """The weight of every column in this optimiser step, fp32 [T]; 0 where it isn't trained."""
        weights = torch.zeros_like(batch.advantages)
        weights[batch.action_mask] = token_weights(
            batch.rows[batch.action_mask],
            algorithm=self._algorithm,
            trajectories=len(batch.lengths),
        )
        return weights

    def _scores(self, part: Batch, proximal: Tensor, reference: Tensor, weights: Tensor) -> Scores:
        policy, mask = self._forward(self.model, part), part.action_mask
        device, own = policy.logprobs.device, policy.logprobs.detach()
        proximal = proximal.to(device)
        return Scores(
            logprobs=policy.logprobs,
            entropy=policy.entropy,
            proximal=torch.where(proximal.isnan(), own, proximal),
            behavior=part.behavior_logprobs[mask].to(device),
            reference=None if self.reference is None else reference.to(device),
            advantages=part.advantages[mask].to(device),
            rows=part.rows[mask].to(device),
            weights=weights.to(device),
        )

    def _apply(self, loss: float) -> float:
        """Clip and step, unless something is not finite; returns the norm before clipping."""
        norm = float(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._learner.max_grad_norm)
        )
        if not (isfinite(loss) and isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteLoss(
                f"update {self.version}: loss {loss}, gradient norm {norm}; weights are as before. "
                "Lower learner.lr, or look at the step's trajectories"
            )
        # AdamW moves weights by momentum and decay even without a gradient.
        if norm > 0:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return norm


def lr_factor(step: int, learner: LearnerSection, total_steps: int) -> float:
    """The share of the peak learning rate at an optimiser step: warm-up, then the schedule."""
    if step < learner.warmup_steps:
        return (step + 1) / learner.warmup_steps
    if learner.schedule == "constant":
        return 1.0
    left = max(1, total_steps - learner.warmup_steps)
    done = min(1.0, (step - learner.warmup_steps) / left)
    return 1 - done if learner.schedule == "linear" else (1 + cos(pi * done)) / 2


def in_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Rows dealt into `parts` of near-equal token counts; every row once."""
    bins: list[list[int]] = [[] for _ in range(min(parts, len(lengths)))]
    heap = [(0, i) for i in range(len(bins))]
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        filled, i = heappop(heap)
        bins[i].append(row)
        heappush(heap, (filled + lengths[row], i))
    return bins


def by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows dealt into as many parts as the token budget asks for (a longer row is a part)."""
    parts = max(1, ceil(sum(lengths) / budget))
    while True:
        dealt = in_parts(lengths, parts)
        fits = all(sum(lengths[r] for r in rows) <= budget or len(rows) == 1 for rows in dealt)
        if fits or parts >= len(lengths):
            return dealt
        parts += 1


def mean_of(stats: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The mean of each statistic over optimiser steps."""
    names = dict.fromkeys(name for row in stats for name in row)
    return {name: fmean(row[name] for row in stats) for name in names}
