"""Who owns a sandbox: a process, told apart from a later one with the same number."""

import os
import socket
from pathlib import Path


def this_process() -> str:
    """This process, as a label: host, process id and start time."""
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def is_gone(owner: str) -> bool:
    """Whether that process has ended. A process of another host is never known to have."""
    host, _, rest = owner.rpartition(":")[0].rpartition(":")
    started = owner.rpartition(":")[2]
    if host != socket.gethostname() or not rest.isdecimal():
        return False
    return _started(int(rest)) != started


def _started(process: int) -> str:
    """The start time in clock ticks since boot; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
