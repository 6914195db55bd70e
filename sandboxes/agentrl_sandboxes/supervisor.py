"""PID 1 of a sandbox: runs commands and moves files on request. Standard library alone.

It is given as source to `python3 -c` and spoken to over its own stdin and stdout: 4 bytes of length
(big endian), then a JSON object; bytes travel as base64. It ends when its stdin does, also in the
middle of a command. Commands get pipes of their own, so nothing they write can look like an answer,
and as PID 1 it can't be killed from inside. When a command ends, every process of the sandbox ends
with it. Where it is root, commands and file operations are nobody's.

Its argument, if there is one, is a workspace elsewhere than /workspace. Then it is not PID 1, but
in a Landlock domain that signals do not leave, and it puts each command in an inner one, whose
signals do not reach it.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import resource
import selectors
import signal
import stat
import struct
import subprocess
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # as in typing, whose import would cost each sandbox some milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Any

    Request = dict[str, Any]
    Answer = dict[str, Any]
    Captures = dict[int, "Capture"]

NOBODY = 65534
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36
WORKSPACE = sys.argv[1] if len(sys.argv) > 1 else "/workspace"
SCOPED = WORKSPACE != "/workspace"


def main() -> None:
    """Answer requests until stdin ends."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0)  # nobody of the same uid may trace it or read its memory
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # as PID 1 is one anyway
    if os.getuid() == 0:
        for folder in ("/workspace", "/tmp"):  # some runtimes mount them for root alone
            if os.stat(folder).st_uid == 0:
                os.chmod(folder, 0o1777)
    operations: dict[str, Callable[[Request], Answer]] = {
        "exec": run,
        "read": lambda request: as_nobody(read_file, request),
        "write": lambda request: as_nobody(write_file, request),
        "list": lambda request: as_nobody(list_files, request),
        "mode": lambda request: as_nobody(set_mode, request),
        "ping": lambda _: {},
    }
    while True:
        head = read_exactly(4)
        if head is None:
            return
        request: Request = json.loads(read_exactly(struct.unpack(">I", head)[0]) or b"{}")
        try:
            answer = operations[request["op"]](request)
        except OSError as error:
            answer = {"error": error.strerror or str(error)}
        except ValueError as error:  # a path that no encoding takes
            answer = {"error": str(error)}
        payload = json.dumps(answer).encode()
        write_all(struct.pack(">I", len(payload)) + payload)


def read_exactly(size: int) -> bytes | None:
    """`size` bytes of stdin, or None at its end."""
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def write_all(data: bytes) -> None:
    """Everything to stdout."""
    while data:
        data = data[os.write(1, data) :]


def run(request: Request) -> Answer:
    """Run one command to its end or its time limit."""
    began = time.monotonic()
    limits = request["limits"]
    oom_kills = count_oom_kills()
    try:
        child = subprocess.Popen(
            request["argv"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=WORKSPACE,
            start_new_session=True,
            preexec_fn=lambda: become_command(limits),
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        text = f"{request['argv'][0]}: {error}\n".encode()
        clear()
        return result(127, {1: Capture(0), 2: Capture(65536, text)}, began, 0)
    captures = {1: Capture(limits["output_bytes"]), 2: Capture(limits["output_bytes"])}
    timed_out = not communicate(
        child, base64.b64decode(request["stdin"]), captures, began + request["timeout_s"]
    )
    code = None if timed_out else child.returncode
    return result(code, captures, began, count_oom_kills() - oom_kills)


class Capture:
    """The first bytes of a stream, and how many there were."""

    def __init__(self, limit: int, data: bytes = b"") -> None:
        self.limit = limit
        self.data = bytearray(data)
        self.seen = len(data)

    def take(self, part: bytes) -> None:
        """Count it, and keep what there is room for."""
        self.seen += len(part)
        self.data += part[: max(0, self.limit - len(self.data))]


def communicate(
    child: subprocess.Popen[bytes], stdin: bytes, captures: Captures, deadline: float
) -> bool:
    """Feed and read until the command itself has ended; False if the deadline came first."""
    assert child.stdin and child.stdout and child.stderr, "all three are pipes"
    wait = selectors.DefaultSelector()
    streams = {child.stdout: captures[1], child.stderr: captures[2]}
    for stream in (*streams, child.stdin):
        os.set_blocking(stream.fileno(), False)
    for stream in streams:
        wait.register(stream, selectors.EVENT_READ, stream)
    wait.register(child.stdin, selectors.EVENT_WRITE)
    watch = os.pidfd_open(child.pid)
    wait.register(watch, selectors.EVENT_READ)
    wait.register(0, selectors.EVENT_READ)
    left = memoryview(stdin)
    ended = False
    while not ended:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        for key, _ in wait.select(remaining):
            if key.fileobj is child.stdin:
                left = feed(wait, child.stdin, left)
            elif key.fd == watch:
                ended = True
            elif key.fd == 0:
                # The owner is gone: nobody asks before the answer is there.
                os.kill(-1, signal.SIGKILL)
                os._exit(0)
            elif not drain_once(key.data, streams[key.data]):
                wait.unregister(key.fileobj)
    clear(child)
    for stream, capture in streams.items():
        # All writers are dead: what is left is at most a full pipe, then its end.
        while drain_once(stream, capture):
            pass
        stream.close()
    child.stdin.close()
    os.close(watch)
    wait.close()
    return ended


def feed(wait: selectors.BaseSelector, stdin: IO[bytes], left: memoryview) -> memoryview:
    """Give the command some of its input; returns what is left."""
    try:
        left = left[os.write(stdin.fileno(), left[:65536]) :] if left else left
    except BlockingIOError:
        return left
    except OSError:
        left = left[:0]
    if not left:
        wait.unregister(stdin)
        stdin.close()
    return left


def drain_once(stream: IO[bytes], capture: Capture) -> bool:
    """Read once; False when there is nothing now, or never again."""
    try:
        part = os.read(stream.fileno(), 65536)
    except BlockingIOError:
        return False
    capture.take(part)
    return bool(part)


def clear(command: subprocess.Popen[bytes] | None = None) -> None:
    """End every other process of the sandbox and reap it; the command's own status is kept."""
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if command is not None:
            command.wait()
        try:
            while os.waitpid(-1, 0)[0]:
                pass
        except ChildProcessError:
            pass
        if alone():
            return


def alone() -> bool:
    """Whether this is the only process left. A reaper without children has no descendants."""
    return SCOPED or not any(entry.isdigit() and entry != "1" for entry in os.listdir("/proc"))


def become_command(limits: dict[str, Any]) -> None:
    """Between fork and exec: nobody's, limited, and the first to go when memory runs out."""
    for name, value in limits["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if SCOPED:
        enter_inner_scope()


def enter_inner_scope() -> None:
    """A Landlock domain whose processes signal and connect to each other alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Moving files between folders is refused by every domain that does not allow it.
    move, scopes = 1 << 13, 3
    rules = libc.syscall(444, struct.pack("=QQQ", move, 0, scopes), 24, 0)
    folder = os.open(os.path.dirname(WORKSPACE), os.O_PATH)
    moving = libc.syscall(445, rules, 1, struct.pack("=Qi", move, folder), 0)
    if rules < 0 or moving or libc.syscall(446, rules, 0):
        raise OSError(ctypes.get_errno(), "Landlock")
    os.close(folder)
    os.close(rules)


def as_nobody(operation: Callable[[Request], Answer], request: Request) -> Answer:
    """Do it with nobody's rights: what a command owns, and no more. No command is running."""
    if os.getuid() != 0:
        return operation(request)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        return operation(request)
    finally:
        os.seteuid(0)
        os.setegid(0)


def count_oom_kills() -> int:
    """How often the kernel has killed for memory in this control group; 0 where it doesn't say."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with suppress(OSError), open(path) as file:
            for line in file:
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


def result(code: int | None, captures: Captures, began: float, oom_kills: int) -> Answer:
    """What one command did; no exit code means that its time ran out."""
    out, err = captures[1], captures[2]
    return {
        "exit_code": None if code is None else code if code >= 0 else 128 - code,
        "stdout": base64.b64encode(bytes(out.data)).decode(),
        "stderr": base64.b64encode(bytes(err.data)).decode(),
        "stdout_bytes": out.seen,
        "stderr_bytes": err.seen,
        "seconds": time.monotonic() - began,
        "timed_out": code is None,
        "oom_kills": oom_kills,
    }


def open_parent(path: str, create: bool) -> tuple[int, str]:
    """A descriptor of the file's folder, and its name; no link is followed on the way."""
    *folders, name = [part for part in path.split("/") if part not in ("", ".")] or [""]
    if not name or ".." in (*folders, name):
        raise OSError(errno.EINVAL, "not a path inside the workspace")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    here = os.open(WORKSPACE, flags)
    try:
        for folder in folders:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(folder, 0o755, dir_fd=here)
            inner = os.open(folder, flags, dir_fd=here)
            os.close(here)
            here = inner
        return here, name
    except OSError:
        os.close(here)
        raise


def read_file(request: Request) -> Answer:
    """A part of a regular file of the workspace, and the size of the whole."""
    folder, name = open_parent(request["path"], False)
    try:
        # Non-blocking: opening a fifo must not hang.
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    with open(handle, "rb") as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        file.seek(request["offset"])
        data = file.read(request["size"])
        return {"data": base64.b64encode(data).decode(), "size": info.st_size}


def write_file(request: Request) -> Answer:
    """Write the first part of a regular file of the workspace, with its folders, or add to it."""
    folder, name = open_parent(request["path"], True)
    try:
        how = os.O_APPEND if request["append"] else os.O_CREAT | os.O_TRUNC
        flags = os.O_WRONLY | how | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(name, flags, 0o644, dir_fd=folder)
    finally:
        os.close(folder)
    with open(handle, "wb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        file.write(base64.b64decode(request["data"]))
    return {}


def list_files(request: Request) -> Answer:
    """Regular files and folders of the workspace: path, permissions, size (of a folder: None).

    No more than `most`, and only names that are text: whoever asks says what is missing.
    """
    found: list[tuple[str, int, int | None]] = []
    for folder, folders, files, handle in os.fwalk(WORKSPACE, onerror=raise_it):
        here = os.path.relpath(folder, WORKSPACE)
        for name in (*folders, *files):
            info = os.stat(name, dir_fd=handle, follow_symlinks=False)
            is_folder = stat.S_ISDIR(info.st_mode)
            if not is_folder and not stat.S_ISREG(info.st_mode):
                continue
            if len(found) >= request["most"]:
                raise OSError(errno.EFBIG, f"more than {request['most']} files")
            path = os.path.normpath(os.path.join(here, name))
            path.encode()  # a name that is no text is a ValueError
            found.append((path, stat.S_IMODE(info.st_mode), None if is_folder else info.st_size))
    return {"files": found}


def raise_it(error: OSError) -> None:
    """A folder that can't be read must not look empty."""
    raise error


def set_mode(request: Request) -> Answer:
    """Give a file or folder its permissions; a folder that is missing is made."""
    folder, name = open_parent(request["path"], True)
    try:
        if request["folder"]:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=folder)
        kind = os.O_DIRECTORY if request["folder"] else os.O_NONBLOCK
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        os.fchmod(handle, request["mode"])
    finally:
        os.close(handle)
    return {}


if __name__ == "__main__":
    main()
