"""The embedded default: bubblewrap with a supervisor as PID 1. No daemon, no image.

The root is the distribution's own /usr, read-only; everything else is empty. Started by root, it
drops to `nobody` first. Memory is limited for each process, not for the tree: bubblewrap has no
cgroup of its own.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.errors import ConfigError, SandboxFault
from agentrl.protocols import Isolation
from agentrl.types import SandboxSpec
from agentrl_sandboxes.channel import NOBODY, SUPERVISOR, SupervisedSandbox, rlimits
from agentrl_sandboxes.pipes import Pipes, end_process, started
from agentrl_sandboxes.seccomp import filter_for


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
        self._probe()

    @asynccontextmanager
    async def session(self, spec: SandboxSpec) -> AsyncGenerator[SupervisedSandbox]:
        """A fresh sandbox; when the block ends every process of it is dead."""
        if spec.egress:
            raise ConfigError("bwrap sandboxes have no network: leave SandboxSpec.egress empty")
        process = await self._start(spec)
        limits = {"RLIMIT_AS": spec.memory_mb << 20, "RLIMIT_NPROC": spec.processes}
        sandbox = SupervisedSandbox(Pipes(process), spec, {**rlimits(spec), **limits})
        try:
            await sandbox.begin()
            yield sandbox
        finally:
            await asyncio.shield(end_process(process))

    def describe(self) -> Mapping[str, str]:
        """The program's version, and that memory is limited for each process."""
        said = subprocess.run([self._bwrap, "--version"], capture_output=True, text=True)
        return {"backend": "bwrap", "program": said.stdout.strip(), "memory": "of each process"}

    async def prune(self, run_id: str) -> int:
        """Nothing outlives its owner: the sandbox dies with its parent."""
        return 0

    def _probe(self) -> None:
        """Open an empty sandbox: a program on the path proves nothing."""
        command = [*self._own_root(), "/usr/bin/true"]
        try:
            tried = subprocess.run(command, capture_output=True, text=True, timeout=10)
            failure = tried.stderr if tried.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            failure = str(error)
        if failure:
            raise ConfigError(
                f"bubblewrap can't make a sandbox here ({' '.join(failure.split())[:200]}): it "
                "needs user namespaces, see `agentrl doctor`"
            )

    async def _start(self, spec: SandboxSpec) -> asyncio.subprocess.Process:
        handle = os.memfd_create("agentrl-seccomp")
        try:
            os.write(handle, self._filter)
            os.lseek(handle, 0, os.SEEK_SET)
            starting = asyncio.create_subprocess_exec(
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
            return await started(asyncio.create_task(starting))
        except OSError as error:
            raise SandboxFault(f"bubblewrap does not start: {error}") from error
        finally:
            os.close(handle)

    def _own_root(self) -> list[str]:
        """Namespaces of its own, and a root that holds the distribution's programs alone."""
        return [
            *_as_nobody(),
            self._bwrap,
            *("--unshare-all", "--unshare-user", "--disable-userns"),
            *("--ro-bind", "/usr", "/usr", *_links(), "--proc", "/proc"),
        ]

    def _command(self, spec: SandboxSpec, seccomp_fd: int) -> list[str]:
        workspace = str(spec.workspace_mb << 20)
        return [
            *self._own_root(),
            *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"),
            *("--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY)),
            *("--seccomp", str(seccomp_fd), "--dev", "/dev"),
            *("--size", str(16 << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--size", workspace, "--tmpfs", "/tmp", "--size", workspace, "--tmpfs", "/workspace"),
            *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--remount-ro", "/"),
            *("--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin"),
            *("--setenv", "HOME", "/workspace", "--setenv", "LANG", "C.UTF-8"),
            *("--chdir", "/workspace", "/usr/bin/python3", "-I", "-S", "-c", SUPERVISOR),
        ]


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
