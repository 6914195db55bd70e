"""The built-in engine: continuous batching over a causal LM of transformers, on CPU or CUDA.

One worker thread owns the model. Whatever others want of it, a request or a new set of weights,
is a function in its inbox that runs between two decode steps; answers travel back as futures.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engines.context import check_positions
from agentrl.engines.decoder import Decoder, Ids, Request
from agentrl.engines.weights import copy_weights, fingerprint_of
from agentrl.engines.worker import EngineWorker
from agentrl.errors import ConfigError
from agentrl.types import ActionTokens, Sampling


class TransformersEngine:
    """An `InferenceEngine` for any causal LM of transformers with full attention.

    The engine owns `model` from now on: give it a copy that no learner trains. It decodes up to
    `max_concurrent` sequences of at most `context_tokens` together and prefills at most
    `prefill_tokens` at a time; more requests wait in order of arrival. Between the turns of a
    session its prefix is kept while there is room, and rows with the same prompt share its work.

    Use as `async with engine:`. Raises ConfigError if the model can't be served like this.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_concurrent: int = 64,
        context_tokens: int = 2048,
        prefill_tokens: int = 2048,
        version: int = 0,
    ) -> None:
        _check_model(model, context_tokens)
        model.requires_grad_(False).eval()
        self.version = version
        """The policy version that is served: set by `load`."""
        self.fingerprint = fingerprint_of(model)
        """A checksum of all weights that are served: changes exactly when one of them does."""
        self.context_tokens = context_tokens
        self.dtype = model.dtype
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._decoder = Decoder(
            model,
            slots=max_concurrent,
            context_tokens=context_tokens,
            prefill_tokens=prefill_tokens,
        )
        self._decoder.version = version
        self._worker = EngineWorker()

    async def __aenter__(self) -> Self:
        await self._worker.open(lambda: self._decoder, lambda: None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._worker.close()

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> ActionTokens:
        """Sample one action after `prompt_ids`.

        `max_tokens` is cut to what the context leaves. The draws depend on the seed and the
        position in the action, not on what else is in flight. Raises ValueError if the prompt is
        empty, leaves no room or holds an unknown id; EngineFault if the engine fails.
        """
        prompt = self._checked(prompt_ids, f"session {session}: the prompt")
        room = self.context_tokens - len(prompt)
        if room < 1:
            raise ValueError(
                f"session {session}: a prompt of {len(prompt)} tokens leaves no room in a context "
                f"of {self.context_tokens}: raise engine.context_tokens or end the episode"
            )
        limit = min(sampling.max_tokens, room)

        def begin(future: Future[ActionTokens]) -> None:
            self._decoder.waiting.append(Request(prompt, sampling, limit, session, future))

        return await self._worker.promise(begin)

    def released(self) -> AbstractAsyncContextManager[None]:
        """Give up the accelerator: no request runs inside, new ones wait, the cache is gone."""
        return self._worker.released(self._free, lambda: None)

    async def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> str:
        """Copy weights in between two steps, forget all prefixes and serve them as `version`.

        Running requests go on under the new weights; their tokens say so. Returns the
        fingerprint of the weights as given, in the engine's dtype. Raises WeightsNotApplied if
        the names or shapes are not the model's.
        """
        return await self._worker.between_steps(partial(self._load, weights, version))

    async def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Entry t-1 is the logprob (nats) of token t given the ids before it.

        Goes through the cache and the sampling distribution like any request. Raises ValueError
        for ids that are unknown or more than the context.
        """
        ids = self._checked(token_ids, "a sequence to score")
        return await self._worker.between_steps(partial(self._decoder.score, ids, temperature))

    def _checked(self, token_ids: Sequence[int], what: str) -> Ids:
        ids = np.array(token_ids, np.int64)
        if not 0 < len(ids) <= self.context_tokens:
            raise ValueError(
                f"{what} has {len(ids)} tokens: at least one, at most the context of "
                f"{self.context_tokens}"
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"{what} holds an id outside 0…{self.vocab_size - 1}")
        return ids

    # What follows runs on the worker thread.

    def _free(self) -> None:
        self._decoder.forget_prefixes()
        if self._decoder.model.device.type == "cuda":
            self._decoder.cache.free()
            torch.cuda.empty_cache()

    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        given = copy_weights(weights, self._decoder.model)
        self._decoder.forget_prefixes()
        self._decoder.version = self.version = version
        self.fingerprint = fingerprint_of(self._decoder.model)
        return given


def _check_model(model: PreTrainedModel, context_tokens: int) -> None:
    """Refuse what would be served wrong: windowed or recurrent layers, too few positions."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if kinds != {"full_attention"} or (window is not None and window < context_tokens):
        raise ConfigError(
            f"engine transformers: {type(model).__name__} has layers without full attention "
            f"({', '.join(sorted(kinds))}; window {window}): lower engine.context_tokens below "
            "the window, or use another engine"
        )
    check_positions(model, context_tokens)
