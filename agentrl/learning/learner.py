"""One policy step from a batch: score, weigh, sum gradients over micro-batches, clip, step."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import isfinite, nan
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms import AlgorithmConfig
from agentrl.config import LearnerSection
from agentrl.errors import ConfigError, NonFiniteLoss, RecordError
from agentrl.learning.batch import Batch, needs_behavior
from agentrl.learning.known import Known, kl_penalty
from agentrl.learning.lora import add_adapters, merged_weights, without_adapters
from agentrl.learning.loss import Scores, TokenLoss, policy_loss, token_weights
from agentrl.learning.packing import TokenScores, pack, token_logprobs
from agentrl.learning.panel import statistics, summary
from agentrl.learning.plan import WORTH_SHARING, by_group, by_tokens, in_parts, lr_factor
from agentrl.learning.preference import preferred
from agentrl.learning.values import critic_targets, value_head_for, value_loss

log = logging.getLogger(__name__)


class PolicyLearner:
    """A `Learner` for any causal LM of transformers that reads packed rows.

    It owns `model` from now on and trains it in place; bfloat16 weights become float32 masters
    with bfloat16 compute. With `lora_rank` they stay as they are, adapters are trained, and the
    reference is the model without them. Else `reference` is a frozen copy, held only when the
    algorithm has a KL.
    `total_steps` (optimiser steps in the run) shapes the cosine and linear schedules. Scores are
    taken at `temperature`, that of the sampling distribution.

    Raises ConfigError when the model can't be packed, or a reference or `total_steps` is missing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learner: LearnerSection,
        algorithm: AlgorithmConfig,
        temperature: float = 1.0,
        reference: PreTrainedModel | None = None,
        total_steps: int | None = None,
    ) -> None:
        _refuse(learner, algorithm, total_steps)
        self.version = 0
        self._compute_dtype = model.dtype
        self.model = pack(model if learner.lora_rank else _with_master_weights(model)).train()
        if learner.lora_rank:
            # 8 bits of mantissa in the logits would move logprobs by 1e-2 nats.
            head: Any = self.model.get_output_embeddings()
            head.float()
            add_adapters(self.model, learner.lora_rank)
        self.reference = None
        if reference is not None and algorithm.kl_coef and not learner.lora_rank:
            self.reference = pack(reference).eval().requires_grad_(False)
        if learner.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.value_head = value_head_for(self.model) if algorithm.baseline == "value" else None
        self.optimizer = torch.optim.AdamW(
            _decay_groups(self._parameters(), learner.weight_decay),
            lr=learner.lr,
            betas=learner.betas,
        )
        self._learner, self._algorithm, self._temperature = learner, algorithm, temperature
        self._steps_per_update = learner.epochs * learner.minibatches
        self._total_steps = total_steps

    def update(self, batch: Batch) -> Mapping[str, float]:
        """Take one policy step: `epochs` x `minibatches` optimiser steps. Returns `panel.METRICS`.

        A batch without a trained token changes nothing but the version. Raises NonFiniteLoss
        before the weights change, RecordError when the batch lacks logprobs that are needed.
        """
        stats: list[Mapping[str, float]] = []
        self._renew_reference()
        if batch.action_mask.any():
            known = self._know(batch)
            steps = (
                rows
                for _ in range(self._learner.epochs)
                for rows in in_parts(batch.lengths.tolist(), self._learner.minibatches)
            )
            for number, rows in enumerate(steps):
                self._set_lr(self.version * self._steps_per_update + number)
                part = batch.select(rows)
                if part.action_mask.any():
                    stats.append(self._step(part, known.at(batch.columns(rows))))
        else:
            log.warning("update %d: no token to train on; the weights stay", self.version)
        self.version += 1
        return summary(stats)

    @property
    def moving_reference(self) -> PreTrainedModel | None:
        """The reference if it is renewed now and then: a checkpoint must hold it then."""
        return self.reference if self._algorithm.reference_every else None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights to serve, by the names of a plain model: adapters are merged in."""
        return merged_weights(self.model)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and not the model's own weights."""
        return self._learner.lora_rank > 0

    def trained(self) -> dict[str, Tensor]:
        """What training changes, by name: all weights, or those of the adapters."""
        return {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}

    def restore(self, trained: Mapping[str, Tensor]) -> None:
        """Take what another learner of the same kind has trained. Raises ValueError for others."""
        own = self.trained()
        if own.keys() != trained.keys():
            raise ValueError("other weights were trained there: was learner.lora_rank the same?")
        for name, value in trained.items():
            own[name].copy_(value)

    def save_model(self, folder: Path) -> None:
        """Write a plain model folder, adapters merged in. Raises OSError."""
        if not self.has_adapters:
            self.model.save_pretrained(folder)
            return
        with torch.device("meta"):
            bare = type(self.model)(copy.deepcopy(self.model.config))
        bare.save_pretrained(folder, state_dict=dict(self.weights()))

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], temperature: float) -> Sequence[float]:
        """Entry t - 1 is the logprob of token t given the ids before it (nats)."""
        wanted = torch.arange(len(token_ids)) > 0
        ids, lengths = torch.tensor(token_ids, dtype=torch.int64), torch.tensor([len(token_ids)])
        with self._autocast():
            scores = token_logprobs(self.model, ids, lengths, wanted, temperature=temperature)
        return scores.logprobs.tolist()

    @torch.no_grad()
    def _renew_reference(self) -> None:
        """The policy becomes the reference every so many steps (2402.03300 algorithm 1)."""
        every = self._algorithm.reference_every
        if self.reference is not None and every and self.version and not self.version % every:
            self.reference.load_state_dict(self.model.state_dict())

    def pulls(self, batch: Batch) -> Tensor:
        """d loss / d logprob of each token at the weights as they are, fp32 [T]; nothing moves.

        0 where nothing is trained, where the advantage is 0 and where the clip stops the gradient.
        With several minibatches it is what one over the whole batch would give.
        """
        out = torch.zeros_like(batch.advantages)
        if not batch.action_mask.any():
            return out
        known, weights = self._know(batch), self._weights(batch)
        if self._algorithm.objective == "preference":
            known, _ = self._prefer(batch, known)
        for rows in self._micro_batches(batch):
            part, columns = batch.select(rows), batch.columns(rows)
            if part.action_mask.any():
                with torch.no_grad():
                    scores, _ = self._scores(part, known.at(columns), weights[columns])
                scores = replace(scores, logprobs=scores.logprobs.detach().requires_grad_())
                loss = policy_loss(scores, self._algorithm).loss
                (pull,) = torch.autograd.grad(loss, scores.logprobs)
                out[columns[part.action_mask]] = pull.cpu()
        return out

    def _know(self, batch: Batch) -> Known:
        algorithm, mask = self._algorithm, batch.action_mask
        if needs_behavior(algorithm) and batch.behavior_logprobs[mask].isnan().any():
            raise RecordError(
                "the batch has trained tokens without the engine's logprobs; set "
                "algorithm.proximal recompute and algorithm.mismatch none"
            )
        reference = self._reference(batch)
        in_reward = reference is not None and algorithm.kl_form == "k1_reward"
        if algorithm.proximal == "behavior":
            proximal = batch.behavior_logprobs
        elif self._steps_per_update == 1 and not in_reward:
            proximal = torch.full_like(batch.behavior_logprobs, nan)
        else:
            proximal = self._score_all(self.model, batch)
        distance = proximal - reference if reference is not None and in_reward else None
        advantages, targets = batch.advantages, None
        if self.value_head is not None:
            values = self._score_all(self.model, batch, self._value_of)
            advantages, targets = critic_targets(batch, values, distance, algorithm)
        elif distance is not None:
            advantages = batch.advantages - kl_penalty(batch, distance, algorithm)
        return Known(proximal=proximal, reference=reference, advantages=advantages, targets=targets)

    def _value_of(self, scores: TokenScores) -> Tensor:
        assert self.value_head is not None
        return self.value_head(scores.hidden.float())[:, 0]

    def _reference(self, batch: Batch) -> Tensor | None:
        if not self._algorithm.kl_coef:
            return None
        if batch.ref_logprobs is not None:
            return batch.ref_logprobs
        if self.has_adapters:
            with without_adapters(self.model):
                return self._score_all(self.model, batch)
        if self.reference is None:
            raise ConfigError("algorithm.kl_coef is above 0 but there is no reference policy")
        return self._score_all(self.reference, batch)

    @torch.no_grad()
    def _score_all(
        self,
        model: PreTrainedModel,
        batch: Batch,
        read: Callable[[TokenScores], Tensor] = attrgetter("logprobs"),
    ) -> Tensor:
        """Logprobs (or what is read) of the trained tokens, fp32 [T]; NaN elsewhere."""
        out = torch.full_like(batch.behavior_logprobs, nan)
        for rows in self._micro_batches(batch):
            part, columns = batch.select(rows), batch.columns(rows)
            if part.action_mask.any():
                out[columns[part.action_mask]] = read(self._forward(model, part)).cpu()
        return out

    def _micro_batches(self, batch: Batch) -> list[list[int]]:
        """The rows of each forward pass; groups stay together where their prompts are worth it."""
        lengths, budget = batch.lengths.tolist(), self._learner.micro_batch_tokens
        if self._learner.share_prefixes:
            groups, prefixes = batch.groups.tolist(), batch.prefixes()
            spared = sum(prefixes[group] for group in groups) - sum(prefixes.values())
            if spared >= WORTH_SHARING * sum(lengths):
                return by_group(lengths, groups, prefixes, budget)
        return by_tokens(lengths, budget)

    def _forward(self, model: PreTrainedModel, part: Batch) -> TokenScores:
        with self._autocast():
            return token_logprobs(
                model,
                part.input_ids,
                part.lengths,
                part.action_mask,
                temperature=self._temperature,
                entropy_gradient=self._algorithm.entropy_coef != 0,
                groups_B=part.groups if self._learner.share_prefixes else None,
            )

    def _step(self, batch: Batch, known: Known) -> Mapping[str, float]:
        """One optimiser step: gradients of micro-batches add up, weights come from all of it."""
        weights, preference = self._weights(batch), None
        if self._algorithm.objective == "preference":
            known, preference = self._prefer(batch, known)
        values, done = 0.0, list[tuple[Scores, TokenLoss]]()
        for rows in self._micro_batches(batch):
            part, columns = batch.select(rows), batch.columns(rows)
            if part.action_mask.any():
                scores, policy = self._scores(part, known.at(columns), weights[columns])
                token_loss = policy_loss(scores, self._algorithm)
                value = self._value_loss(policy, part, known.at(columns), scores.weights)
                (token_loss.loss + value).backward()
                done.append((_detached(scores), token_loss))
                values += float(value.detach())
        losses = torch.stack([token_loss.loss.detach() for _, token_loss in done])
        loss = (float(losses.sum()) if preference is None else preference) + values
        return {
            **statistics(done),
            "loss": loss,
            "value_loss": values,
            "grad_norm": self._apply(loss),
            "lr": self._lr,
        }

    def _value_loss(
        self, policy: TokenScores, part: Batch, known: Known, weights: Tensor
    ) -> Tensor:
        """What the values of a micro-batch add to the loss; 0 without a value head."""
        if known.targets is None:
            return torch.zeros((), device=weights.device)
        targets = known.targets[part.action_mask].to(weights.device)
        return self._algorithm.value_coef * value_loss(self._value_of(policy), targets, weights)

    def _prefer(self, batch: Batch, known: Known) -> tuple[Known, float]:
        """The pull of each pair at the weights as they are, in place of advantages; the loss."""
        assert known.reference is not None
        policy = self._score_all(self.model, batch)
        advantages, loss = preferred(batch, policy, known.reference, self._algorithm.kl_coef)
        return replace(known, advantages=advantages), loss

    def _weights(self, batch: Batch) -> Tensor:
        """What each token counts, fp32 [T]."""
        weights, mask = torch.zeros_like(batch.advantages), batch.action_mask
        rows = batch.rows[mask]
        weights[mask] = token_weights(
            batch.episode_of_rows[rows], batch.groups[rows], self._algorithm
        )
        return weights

    def _scores(self, part: Batch, known: Known, weights: Tensor) -> tuple[Scores, TokenScores]:
        """What the loss reads of a micro-batch, and what the policy says of it."""
        policy, mask = self._forward(self.model, part), part.action_mask
        device, own = policy.logprobs.device, policy.logprobs.detach()
        proximal = known.proximal[mask].to(device)
        turns = (part.rows[mask] * (int(part.turns.max()) + 1) + part.turns[mask]).unique(
            return_inverse=True
        )[1]
        reference = None if known.reference is None else known.reference[mask].to(device)
        scores = Scores(
            logprobs=policy.logprobs,
            entropy=policy.entropy,
            proximal=torch.where(proximal.isnan(), own, proximal),
            behavior=part.behavior_logprobs[mask].to(device),
            reference=reference,
            advantages=known.advantages[mask].to(device),
            rows=part.rows[mask].to(device),
            turns=turns.to(device),
            weights=weights[mask].to(device),
        )
        return scores, policy

    def _apply(self, loss: float) -> float:
        """Clip and step, unless something is not finite; returns the norm before clipping."""
        norm = float(
            torch.nn.utils.clip_grad_norm_(self._parameters(), self._learner.max_grad_norm)
        )
        if not (isfinite(loss) and isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteLoss(
                f"update {self.version}: loss {loss}, gradient norm {norm}; the weights are as "
                "before this optimiser step. Lower learner.lr, or look at the step's trajectories"
            )
        # AdamW moves weights by momentum and decay even without a gradient.
        if norm > 0:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _parameters(self) -> list[torch.nn.Parameter]:
        """All that is trained."""
        head = [] if self.value_head is None else list(self.value_head.parameters())
        return [p for p in self.model.parameters() if p.requires_grad] + head

    @property
    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _set_lr(self, step: int) -> None:
        """The schedule is a function of the step alone, so a resumed run needs no state for it."""
        plan = self._learner
        factor = lr_factor(
            step, schedule=plan.schedule, warmup=plan.warmup_steps, total=self._total_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = plan.lr * factor

    def _autocast(self) -> AbstractContextManager[object]:
        if self._compute_dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.model.device.type, self._compute_dtype)


def _refuse(learner: LearnerSection, algorithm: AlgorithmConfig, total_steps: int | None) -> None:
    """Raises ConfigError for what does not go together."""
    if learner.schedule != "constant" and total_steps is None:
        raise ConfigError(f"learner.schedule {learner.schedule} needs total_steps")
    if learner.lora_rank and algorithm.reference_every:
        raise ConfigError(
            "algorithm.reference_every needs a reference of its own, but with "
            "learner.lora_rank it is the model without adapters: set one of them to 0"
        )
    if algorithm.objective == "preference" and learner.minibatches > 1:
        raise ConfigError(
            "algorithm.objective preference pairs the whole batch: set learner.minibatches 1"
        )


def _with_master_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Small steps vanish in 8 bits of mantissa, so the weights themselves are kept in float32."""
    if model.dtype is torch.float16:
        raise ConfigError("float16 gradients underflow: train with float32 or bfloat16")
    return model.float()


def _decay_groups(
    trained: Sequence[torch.nn.Parameter], weight_decay: float
) -> list[dict[str, object]]:
    """Matrices decay; biases and norms don't."""
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def _detached(scores: Scores) -> Scores:
    return replace(scores, logprobs=scores.logprobs.detach(), entropy=scores.entropy.detach())
