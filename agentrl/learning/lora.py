"""Low-rank adapters on every linear layer (LoRA, 2106.09685): few trained weights, one model.

The model stays itself: its layers are wrapped in place, its head and embeddings are not. With the
adapters off it is the policy that the run started from, so a reference needs no second model.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import ConfigError

ALPHA = 32
"""Adapters are scaled by ALPHA / rank, so that a good learning rate does not depend on the rank."""

_NAME = "policy"
_WRAPPED = ".base_layer"


def add_adapters(model: PreTrainedModel, rank: int, *, seed: int = 0) -> None:
    """Wrap every linear layer, in place; only the adapters are trained from now on.

    They change nothing at first (B is 0; A is drawn by `seed`), and are float32 whatever the
    model's dtype. Raises ConfigError without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("learner.lora_rank needs peft: pip install -e '.[lora]'") from None
    layers = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules="all-linear")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(layers, model, adapter_name=_NAME)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return ".lora_" in name


@contextmanager
def without_adapters(model: PreTrainedModel) -> Generator[None]:
    """The policy as it was before any training, inside the block."""
    layers = [layer for _, layer in _wrapped(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model as it would be without adapters and with what they learned."""
    wrapped = dict(_wrapped(model))
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        layer = wrapped.get(name.partition(_WRAPPED)[0])
        if layer is not None and name.endswith(".weight"):
            delta = layer.get_delta_weight(_NAME)
            yield name.replace(_WRAPPED, ""), (parameter.float() + delta).to(parameter.dtype)
        else:
            yield name.replace(_WRAPPED, ""), parameter.detach()


def _wrapped(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight"):
            yield name, module
