"""Publishing weights to an engine in the same process, and proof that they arrived."""

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.errors import WeightsNotApplied
from agentrl.protocols import Learner

PROBE_TOKENS = 24
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.75}
"""Largest allowed gap between the logprobs (nats) of engine and learner, by the engine's dtype."""

_CHUNK = 1 << 20
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's 64 bits, as a signed number
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PublishableEngine(Protocol):
    """What publishing needs of an engine."""

    version: int
    fingerprint: str
    dtype: torch.dtype
    vocab_size: int
    context_tokens: int

    async def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> str:
        """Serve these weights as `version`; returns their fingerprint as given."""
        ...

    async def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Logprob of each token after the first (nats)."""
        ...


class InProcessWeightSync:
    """A `WeightSync` that copies between decode steps and then checks what the engine serves."""

    def __init__(self, engine: PublishableEngine) -> None:
        self._engine = engine

    async def publish(self, learner: Learner) -> None:
        """Make the engine serve the learner's weights as `learner.version`.

        Raises WeightsNotApplied when afterwards the engine's fingerprint is not that of the
        learner's weights, or engine and learner disagree on the logprobs of a few tokens.
        """
        engine = self._engine
        given = await engine.load(learner.weights(), version=learner.version)
        if engine.fingerprint != given:
            raise WeightsNotApplied(
                f"version {learner.version}: the engine holds {engine.fingerprint} and not the "
                f"learner's weights {given}: do engine and learner tie the same weights?"
            )
        await self._probe(learner)

    async def _probe(self, learner: Learner) -> None:
        engine = self._engine
        draw = np.random.default_rng(learner.version)
        count = min(PROBE_TOKENS, engine.context_tokens - 1)
        ids: list[int] = draw.integers(engine.vocab_size, size=count).tolist()
        served = await engine.score(ids, 1.0)
        wanted = await asyncio.to_thread(learner.logprobs, ids, 1.0)
        gap = float(np.abs(np.subtract(served, wanted)).max())
        if not gap <= TOLERANCE[engine.dtype]:
            raise WeightsNotApplied(
                f"version {learner.version}: engine and learner differ by up to {gap:.4g} nats on "
                f"{count} probe tokens (at most {TOLERANCE[engine.dtype]}): the engine does not "
                "compute with the learner's weights"
            )


@dataclass(frozen=True, slots=True)
class WeightNames:
    """What a model's weights are called: their shapes and dtypes, the first name of tied ones."""

    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    first: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> "WeightNames":
        """The names of all parameters of a model."""
        first = {id(p): name for name, p in model.named_parameters()}
        every = dict(model.named_parameters(remove_duplicate=False))
        return cls(
            {name: p.shape for name, p in every.items()},
            {name: p.dtype for name, p in every.items()},
            {name: first[id(p)] for name, p in every.items()},
        )


class Delivery:
    """One set of weights on its way to an engine: checked one by one, complete at the end."""

    def __init__(self, names: WeightNames) -> None:
        self._names = names
        self._sums: dict[str, int] = {}

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Each weight once, under its first name and in the dtype of the model.

        A tied weight may come under one of its names or under all. Raises WeightsNotApplied for
        an unknown name, another shape, or two values for a tied weight.
        """
        for name, source in weights:
            shape = self._names.shapes.get(name)
            if shape != source.shape:
                has = "no such weight" if shape is None else f"shape {tuple(shape)}"
                raise WeightsNotApplied(
                    f"weight {name} of shape {tuple(source.shape)} does not fit: the engine has "
                    f"{has}"
                )
            cast, first = source.detach().to(self._names.dtypes[name]), self._names.first[name]
            checksum, known = checksum_of(cast), self._sums.get(first)
            if known is None:
                self._sums[first] = checksum
                yield first, cast
            elif known != checksum:
                raise WeightsNotApplied(
                    f"weight {name} is tied to {first}, but the learner gave both values"
                )

    def fingerprint(self) -> str:
        """Of all that came. Raises WeightsNotApplied if a weight never did."""
        missing = sorted(set(self._names.first.values()) - set(self._sums))
        if missing:
            raise WeightsNotApplied(
                f"{len(missing)} weights never came from the learner, as {missing[0]}"
            )
        return digest(self._sums.items())


def copy_weights(weights: Iterable[tuple[str, Tensor]], model: nn.Module) -> str:
    """Copy every weight in, cast to the model's dtype; the fingerprint of what was given.

    Raises what `Delivery` raises, and WeightsNotApplied for a source that is the model's own
    memory.
    """
    own, delivery = dict(model.named_parameters()), Delivery(WeightNames.of(model))
    for name, cast in delivery.checked(weights):
        if own[name].data_ptr() == cast.data_ptr():
            raise WeightsNotApplied(
                f"weight {name} is the learner's own memory: give the engine a copy of the model"
            )
        own[name].copy_(cast)
    return delivery.fingerprint()


def fingerprint_of(model: nn.Module) -> str:
    """16 hex digits over names and bits of all weights; any single changed weight changes it."""
    return digest((name, checksum_of(p)) for name, p in model.named_parameters())


@torch.no_grad()
def checksum_of(tensor: Tensor) -> int:
    """A position-dependent sum of the raw bits mod 2^64.

    Each element is multiplied by an odd number of its own, so a change of one element can never
    cancel. Computed where the tensor lives, in chunks that bound the memory.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    return sum(_chunk_sums(bits)) % 2**64


def _chunk_sums(bits: Tensor) -> Iterator[int]:
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].long()
        index = torch.arange(start, start + len(chunk), device=bits.device)
        yield int((chunk * ((index * _ODD) | 1)).sum())


def digest(sums: Iterable[tuple[str, int]]) -> str:
    """16 hex digits over names and checksums, in whatever order they come."""
    lines = "\n".join(f"{name} {value:016x}" for name, value in sorted(sums))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()
