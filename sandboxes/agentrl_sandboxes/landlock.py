"""Landlock sandboxes, for containers whose kernel gives no namespaces: a domain, not a root.

Each sandbox is a supervisor of a user of its own (which root alone can make), in a Landlock domain
that reads the distribution's programs, writes its own folder and signals only itself, under the
list of system calls without sockets that have a name. What is weaker than elsewhere: `describe`.
"""

import asyncio
import ctypes
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path

from agentrl.errors import ConfigError, SandboxFault, SandboxLost
from agentrl.protocols import Isolation
from agentrl.types import SandboxSpec
from agentrl_sandboxes.cage import ABI, CREATE
from agentrl_sandboxes.channel import SUPERVISOR, SupervisedSandbox, rlimits
from agentrl_sandboxes.owner import is_gone, this_process
from agentrl_sandboxes.pipes import Pipes, end_process, started
from agentrl_sandboxes.seccomp import filter_for

CAGE = files("agentrl_sandboxes").joinpath("cage.py").read_text(encoding="utf-8")
PATH = "/usr/local/bin:/usr/bin:/bin"
PREFIX = "agentrl-landlock-"
OWNER_FILE = "owner"
_FIRST_USER = 1 << 30
_LOOK_S = 1.0


class LandlockProvider:
    """Opens Landlock sandboxes. Raises ConfigError without root, or on a kernel before 6.12."""

    isolation: Isolation = "process"

    def __init__(self, *, run_id: str = "") -> None:
        python = shutil.which("python3", path=PATH)
        if python is None:
            raise ConfigError("the sandbox needs a python3 in /usr: install the package `python3`")
        abi = ctypes.CDLL(None).syscall(CREATE, None, 0, 1)
        if abi < ABI:
            raise ConfigError(
                f"Landlock here is version {max(abi, 0)}, the sandbox needs {ABI}: use Linux 6.12 "
                "or newer with landlock among its security modules"
            )
        if os.geteuid() != 0:
            raise ConfigError(
                "landlock sandboxes are each of a user of their own, which root alone can make: "
                "run as root of a container, or use bwrap or docker"
            )
        self._python, self._abi = python, abi
        self._filter, self._run_id = filter_for(shared=True), run_id
        self._probe()

    @asynccontextmanager
    async def session(self, spec: SandboxSpec) -> AsyncGenerator[SupervisedSandbox]:
        """A fresh sandbox; when the block ends its processes are dead and its folder is gone."""
        if spec.egress:
            raise ConfigError("landlock sandboxes have no network: leave SandboxSpec.egress empty")
        user = _new_user()
        folder = _made_folder(user, self._run_id)
        try:
            process = await self._start(folder, user)
            try:
                limits = {"RLIMIT_AS": spec.memory_mb << 20, "RLIMIT_NPROC": spec.processes}
                pipes = Pipes(process)
                sandbox = SupervisedSandbox(pipes, spec, {**rlimits(spec), **limits})
                await sandbox.begin()
                watch = asyncio.create_task(_watch_disk(folder, spec, process, pipes))
                try:
                    yield sandbox
                finally:
                    watch.cancel()
            finally:
                await asyncio.shield(self._end(process, user))
        finally:
            await asyncio.shield(asyncio.to_thread(_remove, folder))

    def describe(self) -> Mapping[str, str]:
        """The kernel's version of Landlock, and what is weaker here than in a container."""
        return {
            "backend": "landlock",
            "abi": str(self._abi),
            "memory": "of each process",
            "disk": "looked at each second",
            "names": "files outside can be seen to exist, not opened",
        }

    async def prune(self, run_id: str) -> int:
        """Remove the folders that dead owners left; their processes ended with them."""
        return await asyncio.to_thread(_prune, run_id)

    def _probe(self) -> None:
        """Shut a cage once: a kernel that has it may still be told not to."""
        user = _new_user()
        folder = _made_folder(user, self._run_id)
        handle = self._filter_file()
        try:
            command = self._command(folder, user, handle, supervisor="")
            tried = subprocess.run(
                command, pass_fds=(handle,), capture_output=True, text=True, timeout=10
            )
            failure = tried.stderr if tried.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            failure = str(error)
        finally:
            os.close(handle)
            _remove(folder)
        if failure:
            said = " ".join(failure.split())[-200:]
            raise ConfigError(f"landlock can't make a sandbox here ({said})")

    def _filter_file(self) -> int:
        handle = os.memfd_create("agentrl-seccomp")
        os.write(handle, self._filter)
        os.lseek(handle, 0, os.SEEK_SET)
        return handle

    async def _start(self, folder: Path, user: int) -> asyncio.subprocess.Process:
        handle = self._filter_file()
        try:
            starting = asyncio.create_subprocess_exec(
                *self._command(folder, user, handle, supervisor=SUPERVISOR),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(handle,),
                env={
                    "PATH": PATH,
                    "HOME": str(folder / "workspace"),
                    "TMPDIR": str(folder / "tmp"),
                    "LANG": "C.UTF-8",
                },
                cwd="/",
                start_new_session=True,
                limit=1 << 20,
            )
            return await started(asyncio.create_task(starting))
        except OSError as error:
            raise SandboxFault(f"landlock's supervisor does not start: {error}") from error
        finally:
            os.close(handle)

    def _command(self, folder: Path, user: int, handle: int, *, supervisor: str) -> list[str]:
        return [
            *_as_user(user, "--no-new-privs"),
            *(self._python, "-I", "-S", "-c", CAGE, str(folder), str(handle), supervisor),
        ]

    async def _end(self, process: asyncio.subprocess.Process, user: int) -> None:
        """The supervisor first, then all that is of its user: nothing can hide from that."""
        await end_process(process)
        clearing = await asyncio.create_subprocess_exec(
            *_as_user(user), "kill", "-KILL", "--", "-1", stderr=asyncio.subprocess.DEVNULL
        )
        await clearing.wait()


def _as_user(user: int, *options: str) -> list[str]:
    who = (f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all")
    return ["setpriv", *who, "--bounding-set=-all", *options]


def _new_user() -> int:
    """A user number that nothing else has: one of a thousand million by chance."""
    return _FIRST_USER + secrets.randbelow(_FIRST_USER)


def _made_folder(user: int, run_id: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    folder.chmod(0o711)
    (folder / OWNER_FILE).write_text(f"{this_process()}\n{run_id}", encoding="utf-8")
    for name in ("workspace", "tmp"):
        (folder / name).mkdir(mode=0o700)
        os.chown(folder / name, user, user)
    return folder


async def _watch_disk(
    folder: Path, spec: SandboxSpec, process: asyncio.subprocess.Process, pipes: Pipes
) -> None:
    """End a sandbox whose folder has outgrown its limits: there is no file system of its own."""
    limit = 2 * spec.workspace_mb << 20  # workspace and tmp
    while process.returncode is None:
        await asyncio.sleep(_LOOK_S)
        if await asyncio.to_thread(_bytes_on_disk, folder) > limit:
            pipes.lost = SandboxLost(f"the sandbox filled its disk of {limit >> 20} MB")
            with suppress(ProcessLookupError):
                process.kill()


def _bytes_on_disk(folder: Path) -> int:
    # By a program, as for removal; a file that goes away meanwhile is no error.
    counting = ["du", "-sx", "--block-size=1", "--", str(folder)]
    said = subprocess.run(counting, capture_output=True, text=True).stdout
    return int(said.split()[0]) if said else 0


def _remove(folder: Path) -> None:
    # By a program: a tree may be deeper than Python can follow.
    subprocess.run(["rm", "-rf", "--one-file-system", "--", str(folder)], stderr=subprocess.DEVNULL)


def _prune(run_id: str) -> int:
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another removes it, too
            if folder.lstat().st_uid != 0:
                continue
            owner, _, run = (folder / OWNER_FILE).read_text("utf-8").partition("\n")
            if is_gone(owner) and run_id in ("", run):
                _remove(folder)
                removed += 1
    return removed
