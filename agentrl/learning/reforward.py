"""Replay, fifth rung: what do other weights say of the recorded tokens?

The recorded ids are forced through a model, and the logprob of each sampled token is compared with
the engine's. With the weights that sampled them the drift is rounding; more means that engine and
learner disagree, or that these are other weights.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import expm1
from statistics import fmean

import torch
from transformers import PreTrainedModel

from agentrl.errors import RecordError
from agentrl.learning.packing import packed, token_logprobs
from agentrl.store.redaction import REDACTED_TOKENS
from agentrl.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanDrift:
    """The drift of one action: d = model - record, in nats.

    `k3` is mean(exp(d) - d - 1), the estimate of KL(record || model); `worst` the token with the
    largest |d|, counted from the action's first.
    """

    turn: int
    tokens: int
    mean: float
    mean_abs: float
    max_abs: float
    worst: int
    k3: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One trajectory: `tokens` has d of each sampled token, in order; `spans` sums them up."""

    trajectory_id: str
    tokens: tuple[float, ...]
    spans: tuple[SpanDrift, ...]

    @property
    def max_abs(self) -> float:
        """The largest |d| of all tokens (nats); 0 without any."""
        return max((span.max_abs for span in self.spans), default=0.0)

    @property
    def mean_abs(self) -> float:
        """The mean |d| (nats); 0 without tokens."""
        return fmean(abs(d) for d in self.tokens) if self.tokens else 0.0


def reforward(
    model: PreTrainedModel, trajectories: Sequence[Trajectory], *, temperature: float
) -> Iterator[Drift]:
    """The drift of each trajectory under `model`, one at a time; the model is left as it was.

    Trajectories with redacted ids are skipped with a warning: what was sampled is not known.
    Raises RecordError naming the turn when logprobs are missing, or an id is none of the model's.
    """
    vocabulary = model.config.get_text_config().vocab_size
    with packed(model), torch.no_grad():
        for trajectory in trajectories:
            if not trajectory.turns:
                continue
            if REDACTED_TOKENS in trajectory.metrics:
                warnings.warn(f"skipped: {trajectory.id}: some ids were redacted", stacklevel=2)
                continue
            try:
                recorded = [p for p in trajectory.behavior_logprobs if p is not None]
            except ValueError as error:
                raise RecordError(f"{error}: there is nothing to compare with") from None
            if max(trajectory.token_ids) >= vocabulary:
                raise RecordError(
                    f"trajectory {trajectory.id} has id {max(trajectory.token_ids)}, the model "
                    f"knows {vocabulary}: it has another tokenizer"
                )
            now = _logprobs(model, trajectory, temperature)
            drift = tuple(a - b for a, b in zip(now, recorded, strict=True))
            yield Drift(
                trajectory_id=trajectory.id, tokens=drift, spans=tuple(_spans(trajectory, drift))
            )


def _logprobs(model: PreTrainedModel, trajectory: Trajectory, temperature: float) -> list[float]:
    ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)
    mask = torch.tensor(trajectory.action_mask)
    lengths = torch.tensor([len(ids)])
    scores = token_logprobs(model, ids, lengths, mask, temperature=temperature)
    return scores.logprobs.tolist()


def _spans(trajectory: Trajectory, drift: Sequence[float]) -> Iterator[SpanDrift]:
    begin = 0
    for number, turn in enumerate(trajectory.turns):
        size = len(turn.action.token_ids)
        here = drift[begin : begin + size]
        begin += size
        sizes = [abs(d) for d in here]
        yield SpanDrift(
            turn=number,
            tokens=size,
            mean=fmean(here),
            mean_abs=fmean(sizes),
            max_abs=max(sizes),
            worst=sizes.index(max(sizes)),
            k3=fmean(expm1(min(d, 20.0)) - d for d in here),
        )
