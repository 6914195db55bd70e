"""The built-in engine: continuous batching over a causal LM of transformers, on CPU or CUDA.

One worker thread owns the model. Whatever others want of it, a request or a new set of weights,
is a function in its inbox that runs between two decode steps; answers travel back as futures.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engines.decoder import Decoder, Ids, Request, settle
from agentrl.engines.weights import copy_weights, fingerprint_of
from agentrl.errors import ConfigError, EngineFault
from agentrl.types import ActionTokens, Sampling

T = TypeVar("T")


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
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._drained: list[Future[None]] = []
        self._holds = 0
        self._closing = False
        self._why_not: str | None = "the engine is not open: use it as `async with engine:`"
        self._thread = threading.Thread(target=self._work, name="agentrl-engine", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        self._why_not = None
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._lock:
            self._why_not = self._why_not or "the engine was closed"
        self._inbox.put(self._close)
        await asyncio.to_thread(self._thread.join)

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

        return await asyncio.wrap_future(self._promise(begin))

    @asynccontextmanager
    async def released(self) -> AsyncGenerator[None]:
        """Give up the accelerator: no request runs inside, new ones wait, the cache is gone."""
        drained = self._promise(self._hold)
        try:
            await asyncio.wrap_future(drained)
            await self._between_steps(self._free)
            yield
        finally:
            self._inbox.put(self._unhold)

    async def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> str:
        """Copy weights in between two steps, forget all prefixes and serve them as `version`.

        Running requests go on under the new weights; their tokens say so. Returns the
        fingerprint of the weights as given, in the engine's dtype. Raises WeightsNotApplied if
        the names or shapes are not the model's.
        """
        return await self._between_steps(partial(self._load, weights, version))

    async def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Entry t-1 is the logprob (nats) of token t given the ids before it.

        Goes through the cache and the sampling distribution like any request. Raises ValueError
        for ids that are unknown or more than the context.
        """
        ids = self._checked(token_ids, "a sequence to score")
        return await self._between_steps(partial(self._decoder.score, ids, temperature))

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

    async def _between_steps(self, function: Callable[[], T]) -> T:
        def begin(future: Future[T]) -> None:
            try:
                result = function()
            except Exception as error:
                settle(future, error=error)
            else:
                settle(future, result)

        return await asyncio.wrap_future(self._promise(begin))

    def _promise(self, begin: Callable[[Future[T]], None]) -> Future[T]:
        """Have the worker call `begin` with a future that is answered whatever happens."""
        future: Future[T] = Future()
        with self._lock:
            if self._why_not is not None:
                raise EngineFault(self._why_not)
            self._open.add(future)
            self._inbox.put(partial(begin, future))
        future.add_done_callback(self._settled)
        return future

    def _settled(self, future: Future[Any]) -> None:
        self._open.discard(future)
        if future.cancelled():
            self._inbox.put(partial(self._decoder.forget, future))

    # What follows runs on the worker thread.

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._read_inbox()
                    self._decoder.step()
                    self._tell_drained()
        except BaseException as error:
            self._why_not = f"the engine's worker failed: {type(error).__name__}: {error}"
        finally:
            self._refuse_all()

    def _read_inbox(self) -> None:
        if not self._decoder.has_work:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _refuse_all(self) -> None:
        with self._lock:
            self._why_not = self._why_not or "the engine was closed"
            left = list(self._open)
        for future in left:
            settle(future, error=EngineFault(self._why_not))

    def _close(self) -> None:
        self._closing = True

    def _hold(self, future: "Future[None]") -> None:
        self._holds += 1
        self._decoder.held = True
        self._drained.append(future)

    def _unhold(self) -> None:
        self._holds -= 1
        self._decoder.held = self._holds > 0

    def _tell_drained(self) -> None:
        if self._drained and not self._decoder.running:
            for future in self._drained:
                settle(future)
            self._drained.clear()

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
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < context_tokens:
        raise ConfigError(
            f"engine.context_tokens ({context_tokens}) is more than the {positions} positions "
            f"that {type(model).__name__} knows: lower it"
        )
