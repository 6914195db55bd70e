"""The vLLM engine in one process with the learner: on a CPU, or sharing one GPU with it."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engines.context import check_positions
from agentrl.engines.vllm.settings import (
    SCORING,
    bear_numba,
    check_import,
    check_scoring_temperature,
    check_temperature,
    checked_ids,
    engine_arguments,
    kv_cache_bytes,
    quiet_start,
    require_vllm,
    roomy_folder,
    sampling_fields,
    set_environment,
)
from agentrl.engines.weights import Delivery, WeightNames
from agentrl.engines.worker import EngineWorker
from agentrl.errors import ConfigError
from agentrl.types import ActionTokens, Sampling

if TYPE_CHECKING:
    from agentrl.engines.vllm.stepper import VllmStepper


class VllmEngine:
    """An `InferenceEngine` by vLLM on a thread of this process.

    It serves a copy of `model`, in its dtype and on its kind of device, at most `max_concurrent`
    sequences of at most `context_tokens` together. `kv_cache_mb` bounds the memory of keys and
    values (0: what `max_concurrent` full sequences need; on a GPU, what is free in
    `gpu_memory_share` of it). Prefixes are kept by the block, also between episodes.

    Use as `async with engine:`. Raises ConfigError when vLLM is not installed or can't serve this.
    """

    weight_transfer: ClassVar[str] = "agentrl"
    """The weight-transfer backend of vLLM that `load` uses."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_concurrent: int = 64,
        context_tokens: int = 2048,
        kv_cache_mb: int = 0,
        gpu_memory_share: float = 0.45,
    ) -> None:
        require_vllm()
        set_environment()
        check_positions(model, context_tokens)
        self.version = 0
        """The policy version that is served: set by `load`."""
        self.fingerprint = ""
        """The fingerprint of the weights that vLLM has received: set by `load`."""
        self.context_tokens = context_tokens
        self.dtype = model.dtype
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._names = WeightNames.of(model)
        self._model: PreTrainedModel | None = model
        self._arguments = engine_arguments(
            model, "", max_concurrent=max_concurrent, context_tokens=context_tokens
        )
        if model.device.type == "cuda":
            self._arguments["gpu_memory_utilization"] = gpu_memory_share
        if kv_cache_mb or model.device.type != "cuda":
            self._arguments["kv_cache_memory_bytes"] = kv_cache_mb << 20 or kv_cache_bytes(
                model, sequences=max_concurrent, context_tokens=context_tokens
            )
        self._worker = EngineWorker()

    async def __aenter__(self) -> Self:
        await self._worker.open(self._build, self._close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._worker.close()

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> ActionTokens:
        """Sample one action after `prompt_ids`.

        `max_tokens` is cut to what the context leaves. The draws depend on the seed and the
        position in the action. Raises ValueError if the prompt is empty, leaves no room or holds
        an unknown id, or the temperature is one that vLLM would change; EngineFault if it fails.
        """
        from agentrl.engines.vllm.stepper import read_action

        check_temperature(sampling)
        prompt = self._checked(prompt_ids, f"session {session}: the prompt")
        limit = min(sampling.max_tokens, self.context_tokens - len(prompt))
        return await self._request(prompt, sampling_fields(sampling, limit), read_action)

    def released(self) -> AbstractAsyncContextManager[None]:
        """Give up the accelerator: no request runs inside, new ones wait, the cache is gone.

        On a GPU vLLM sleeps: its weights move to the host and its cache is freed.
        """
        return self._worker.released(self._sleep, self._wake)

    async def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> str:
        """Hand weights to vLLM between two steps, forget all prefixes, serve them as `version`.

        Running requests go on under the new weights; their tokens say so. Returns the fingerprint
        of the weights as given, in the engine's dtype. Raises WeightsNotApplied if names or
        shapes are not the model's or vLLM's tensors did not change with them.
        """
        return await self._worker.between_steps(partial(self._load, weights, version))

    async def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Entry t-1 is the logprob (nats) of token t given the ids before it.

        vLLM scores prompts at temperature 1 only, and samples one token more. Raises ValueError
        for another temperature, and for ids that are unknown or as many as the context.
        """
        from agentrl.engines.vllm.stepper import read_scores

        check_scoring_temperature(temperature)
        ids = self._checked(token_ids, "a sequence to score")
        return await self._request(ids, SCORING, read_scores)

    def _checked(self, token_ids: Sequence[int], what: str) -> list[int]:
        return checked_ids(token_ids, what, context=self.context_tokens, vocab=self.vocab_size)

    async def _request(self, prompt: list[int], fields: Mapping[str, Any], read: Any) -> Any:
        from agentrl.engines.vllm.stepper import Request, final_params

        request = partial(Request, prompt, final_params(fields), read)
        return await self._worker.promise(lambda f: self._stepper.waiting.append(request(f)))

    # What follows runs on the worker's thread.

    def _build(self) -> "VllmStepper":
        model, self._model = self._model, None
        assert model is not None, "an engine is opened once"
        with tempfile.TemporaryDirectory(dir=roomy_folder(model)) as folder, quiet_start():
            check_import()
            bear_numba()
            model.save_pretrained(folder)
            self._stepper = self._started(folder, type(model).__name__)
        return self._stepper

    def _started(self, folder: str, architecture: str) -> "VllmStepper":
        from agentrl.engines.vllm.stepper import VllmStepper
        from agentrl.engines.vllm.weights import receiving_arguments

        arguments = {
            **self._arguments,
            "model": folder,
            **receiving_arguments(self.weight_transfer),
        }
        try:
            return VllmStepper(arguments, version=self.version)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"engine vllm can't serve this {architecture}: {reason}") from error

    def _close(self) -> None:
        stepper = getattr(self, "_stepper", None)
        if stepper is not None:
            stepper.close()

    def _sleep(self) -> None:
        self._stepper.forget_prefixes()
        if self._arguments["enable_sleep_mode"]:
            self._stepper.llm.sleep(level=1)

    def _wake(self) -> None:
        if self._arguments["enable_sleep_mode"]:
            self._stepper.llm.wake_up()

    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        from agentrl.engines.vllm.weights import hand_over

        delivery = Delivery(self._names)
        tensors = list(delivery.checked(weights))
        given = delivery.fingerprint()
        self.fingerprint = hand_over(self._stepper.llm, tensors, before=self.fingerprint)
        self._stepper.forget_prefixes()
        self._stepper.set_version(version)
        self.version = version
        return given
