"""What works on this machine, found out by trying it."""

import asyncio
import importlib.util
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One part: whether it works, and what was found or how to get it."""

    part: str
    works: bool
    needed: bool
    text: str

    def as_row(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def examine() -> list[Finding]:
    """Try every part that a run may use."""
    return [
        _try("python", True, platform.python_version),
        _try("torch", True, _torch),
        _try("gpu", False, _gpu),
        _try("bwrap", True, lambda: asyncio.run(_bwrap())),
        _try("docker", False, lambda: _program("docker", "no Docker command")),
        _try("vllm", False, lambda: _module("vllm", "not installed, and not used by this version")),
        _try("environments", True, _environments),
    ]


def _try(part: str, needed: bool, look: Callable[[], str]) -> Finding:
    try:
        return Finding(part=part, works=True, needed=needed, text=look())
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return Finding(part=part, works=False, needed=needed, text=text)


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device: everything runs on the CPU")
    return torch.cuda.get_device_name()


async def _bwrap() -> str:
    from agentrl.plugins import find_sandbox
    from agentrl.types import SandboxSpec

    async with find_sandbox("bwrap")().session(SandboxSpec()) as sandbox:
        done = await sandbox.exec(["python3", "--version"], timeout_s=10)
    return f"{done.stdout.decode().strip()} in a sandbox"


def _program(name: str, missing: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(missing)
    return found


def _module(name: str, missing: str) -> str:
    if importlib.util.find_spec(name) is None:
        raise RuntimeError(missing)
    return "installed"


def _environments() -> str:
    from agentrl.plugins import find_environment, registered

    names = registered("agentrl.environments")
    for name in names:
        find_environment(name)
    return ", ".join(names)
