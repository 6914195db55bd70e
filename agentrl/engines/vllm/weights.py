"""Publishing weights by vLLM's own weight-transfer interface: both ends of it.

vLLM's workers import this module: `worker_extension_cls` names a class of it, and the backend is
registered on import. Two ways bring the tensors to a worker:

- by reference, to an engine in this process;
- as a safetensors file, best in shared memory, to a server that can read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm import LLMEngine
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from agentrl.engines.weights import checksum_of, digest
from agentrl.errors import WeightsNotApplied

Named = Sequence[tuple[str, Tensor]]


@dataclass
class NoRendezvous(WeightTransferInitInfo):
    """References and files need no meeting beforehand."""


@dataclass
class Parcel(WeightTransferUpdateInfo):
    """All weights of one version, in the names of transformers: themselves or where they lie."""

    tensors: Named | None = None
    path: str | None = None


class ReceivedWeights(WeightTransferEngine[NoRendezvous, Parcel]):
    """The worker's end of a publish by reference or file."""

    init_info_cls = NoRendezvous
    update_info_cls = Parcel
    received = ""
    """The fingerprint of the last parcel."""

    def init_transfer_engine(self, init_info: NoRendezvous) -> None:
        """Nothing to open."""

    def start_weight_update(self) -> None:
        """Unpack what vLLM has packed for its kernels."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one parcel. The base class waits for an accelerator, which a CPU doesn't have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Parcel) -> None:
        """Give each tensor to the model's own loader and note its checksum."""
        parcel = update_info.tensors
        named = parcel if parcel is not None else _read(Path(update_info.path or ""))
        model: Any = self.model
        model.load_weights(iter(named))
        self.received = digest((name, checksum_of(tensor)) for name, tensor in named)

    def finish_weight_update(self) -> None:
        """Pack again."""
        finalize_layerwise_reload(self.model, self.model_config)
        self.repair()

    def repair(self) -> None:
        """Pack output heads anew: one that is tied to the embedding keeps its old packed copy.

        On a CPU vLLM packs the head's weights apart from the embedding that they share. A reload
        brings no weight of the head's own name, so vLLM (0.32) puts the old ones back.
        """
        if self.device.type != "cpu":
            return
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to close."""


class WorkerExtension:
    """What our side asks of a worker by name."""

    def agentrl_fingerprints(self: Any) -> tuple[str, str | None]:
        """The fingerprint of what was received, and of the tensors that the worker computes with.

        The second is None where kernels keep packed copies (CPU), which can't be read back.
        """
        model: nn.Module = self.model_runner.get_model()
        served = [(name, p) for name, p in model.named_parameters()]
        whole = all(p.numel() for _, p in served)
        return (
            self.weight_transfer_engine.received,
            digest((name, checksum_of(p)) for name, p in served) if whole else None,
        )


def receiving_arguments(backend: str) -> dict[str, object]:
    """Arguments of `EngineArgs` that make an engine's workers able to receive weights."""
    return {
        "weight_transfer_config": WeightTransferConfig(backend=backend),
        "worker_extension_cls": f"{__name__}.{WorkerExtension.__name__}",
    }


def hand_over(llm: LLMEngine, tensors: Named, *, before: str) -> str:
    """Give tensors to an engine in this process by reference; the fingerprint it received.

    Raises WeightsNotApplied if workers disagree, or what they received is not what it was
    `before` and the tensors they compute with are.
    """
    old = llm.collective_rpc("agentrl_fingerprints")
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"tensors": tensors}})
    llm.collective_rpc("finish_weight_update")
    new = llm.collective_rpc("agentrl_fingerprints")
    return received_by_all(old, new, before=before)


def received_by_all(
    old: Sequence[tuple[str, str | None]], new: Sequence[tuple[str, str | None]], *, before: str
) -> str:
    """The one fingerprint that all workers report; see `hand_over` for what it raises."""
    received = {fingerprint for fingerprint, _ in new}
    if len(received) != 1:
        raise WeightsNotApplied(f"vLLM's workers received different weights: {sorted(received)}")
    (fingerprint,) = received
    for (_, was), (_, served) in zip(old, new, strict=True):
        if before and fingerprint != before and served is not None and served == was:
            raise WeightsNotApplied(
                f"a vLLM worker received {fingerprint} after {before}, but still computes with the "
                f"same tensors ({served})"
            )
    return fingerprint


def _read(path: Path) -> Named:
    with safe_open(path, framework="pt") as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118


WeightTransferEngineFactory.register_engine("agentrl", ReceivedWeights)
