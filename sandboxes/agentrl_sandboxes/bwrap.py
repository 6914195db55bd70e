"""The embedded default: bubblewrap with a supervisor as PID 1. No daemon, no image.

The root is the distribution's own /usr, read-only; everything else is empty. Started by root, it
drops to `nobody` first. Memory is limited for each process, not for the tree: bubblewrap has no
cgroup of its own.
"""

import asyncio
import base64
import json
import os
import shutil
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, SandboxFault, ToolError
from agentrl.protocols import Isolation
from agentrl.types import ExecResult, SandboxSpec
from agentrl_sandboxes.seccomp import filter_for

NOBODY = 65534
START_TIMEOUT_S = 20.0
GRACE_S = 10.0
"""How long past a command's own limit the supervisor may take to answer."""

SUPERVISOR = files("agentrl_sandboxes").joinpath("supervisor.py").read_text(encoding="utf-8")


class BwrapProvider:
    """Opens bubblewrap sandboxes. Raises ConfigError where there is no bubblewrap or Python."""

    isolation: Isolation = "process"

    def __init__(self) -> None:
        found = shutil.which("bwrap")
        if found is None:
            raise ConfigError("bubblewrap is missing: install the package `bubblewrap`")
        if not Path("/usr/bin/python3").exists():
            raise ConfigError("the sandbox needs /usr/bin/python3: install the package `python3`")
        self._bwrap = found
        self._filter = filter_for()

    @asynccontextmanager
    async def session(self, spec: SandboxSpec) -> AsyncGenerator["BwrapSandbox"]:
        """A fresh sandbox; when the block ends every process of it is dead."""
        if spec.egress:
            raise ConfigError("bwrap sandboxes have no network: leave SandboxSpec.egress empty")
        process = await self._start(spec)
        sandbox = BwrapSandbox(process, spec)
        try:
            await sandbox.request({"op": "ping"}, timeout_s=START_TIMEOUT_S)
            for path, data in spec.files.items():
                await sandbox.write_file(path, data)
            yield sandbox
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
            process._transport.close()  # type: ignore[attr-defined]  # its pipes, at once

    async def prune(self, run_id: str) -> int:
        """Nothing outlives its owner: the sandbox dies with its parent."""
        return 0

    async def _start(self, spec: SandboxSpec) -> asyncio.subprocess.Process:
        handle = os.memfd_create("agentrl-seccomp")
        try:
            os.write(handle, self._filter)
            os.lseek(handle, 0, os.SEEK_SET)
            return await asyncio.create_subprocess_exec(
                *self._command(spec, handle),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(handle,),
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                start_new_session=True,
                limit=1 << 20,
            )
        except OSError as error:
            raise SandboxFault(f"bubblewrap does not start: {error}") from error
        finally:
            os.close(handle)

    def _command(self, spec: SandboxSpec, seccomp_fd: int) -> list[str]:
        workspace = str(spec.workspace_mb << 20)
        return [
            *_as_nobody(),
            self._bwrap,
            *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
            *("--new-session", "--as-pid-1", "--hostname", "sandbox", "--cap-drop", "ALL"),
            *("--uid", str(NOBODY), "--gid", str(NOBODY), "--seccomp", str(seccomp_fd)),
            *("--ro-bind", "/usr", "/usr", *_links(), "--proc", "/proc", "--dev", "/dev"),
            *("--size", str(16 << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--size", workspace, "--tmpfs", "/tmp", "--size", workspace, "--tmpfs", "/workspace"),
            *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--remount-ro", "/"),
            *("--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin"),
            *("--setenv", "HOME", "/workspace", "--setenv", "LANG", "C.UTF-8"),
            *("--chdir", "/workspace", "/usr/bin/python3", "-I", "-S", "-c", SUPERVISOR),
        ]


class BwrapSandbox:
    """A handle on one sandbox: requests to its supervisor, one at a time."""

    def __init__(self, process: asyncio.subprocess.Process, spec: SandboxSpec) -> None:
        self._process, self._spec = process, spec
        self._turn = asyncio.Lock()
        self._broken: str | None = None

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command; everything it started ends with it. See `protocols.Sandbox`."""
        if user not in (None, "nobody"):
            raise ToolError(f"bwrap sandboxes run everything as nobody, not {user}")
        if any("\0" in word for word in argv) or not argv:
            raise ToolError("a command is at least one word, without NUL bytes")
        request = {
            "op": "exec",
            "argv": [*argv],
            "stdin": base64.b64encode(stdin).decode(),
            "timeout_s": timeout_s,
            "limits": self._limits(),
        }
        answer = await self.request(request, timeout_s=timeout_s + GRACE_S)
        stderr = base64.b64decode(answer["stderr"])
        return ExecResult(
            stdout=base64.b64decode(answer["stdout"]),
            stderr=stderr,
            exit_code=answer["exit_code"],
            seconds=answer["seconds"],
            stdout_bytes=answer["stdout_bytes"],
            stderr_bytes=answer["stderr_bytes"],
            timed_out=answer["timed_out"],
            out_of_memory=answer["exit_code"] not in (0, None) and b"MemoryError" in stderr[-200:],
        )

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """A regular file of the workspace. Raises ToolError."""
        answer = await self._file({"op": "read", "path": path, "max_bytes": max_bytes})
        return base64.b64decode(answer["data"])

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file of the workspace, with its folders. Raises ToolError."""
        await self._file({"op": "write", "path": path, "data": base64.b64encode(data).decode()})

    async def request(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """One question to the supervisor. Raises SandboxFault when it doesn't answer."""
        async with self._turn:
            if self._broken is not None:
                raise SandboxFault(self._broken)
            # Unless the answer is read whole, the channel is out of step: never use it again.
            self._broken = "the sandbox was given up in the middle of a call"
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._exchange(request)
            except (TimeoutError, OSError, EOFError, ValueError) as error:
                self._broken = f"the sandbox's supervisor is gone ({type(error).__name__})"
                raise SandboxFault(self._broken) from error
            self._broken = None
            return answer

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None and reader is not None, "started with pipes"
        payload = json.dumps(request).encode()
        writer.write(struct.pack(">I", len(payload)) + payload)
        await writer.drain()
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        return json.loads(await reader.readexactly(size))

    async def _file(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "\0" in request["path"]:
            raise ToolError("a path has no NUL bytes")
        answer = await self.request(request, timeout_s=START_TIMEOUT_S)
        if "error" in answer:
            raise ToolError(f"{request['path']}: {answer['error']}")
        return answer

    def _limits(self) -> dict[str, Any]:
        spec = self._spec
        return {
            "output_bytes": spec.max_output_bytes,
            "rlimits": {
                "RLIMIT_AS": spec.memory_mb << 20,
                "RLIMIT_NPROC": spec.processes,
                "RLIMIT_FSIZE": spec.max_file_mb << 20,
                "RLIMIT_NOFILE": 256,
                "RLIMIT_CORE": 0,
            },
        }


def _as_nobody() -> list[str]:
    """Root becomes nobody first. By a program: Popen's own way forks all of a large trainer."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]


def _links() -> list[str]:
    """/bin, /lib and their like: links into /usr where the distribution has merged them."""
    out: list[str] = []
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            out += ["--symlink", f"usr/{name}", f"/{name}"]
        elif path.exists():
            out += ["--ro-bind", str(path), str(path)]
    return out
