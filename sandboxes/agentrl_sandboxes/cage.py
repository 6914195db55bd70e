"""Shuts itself in with Landlock and seccomp, then becomes the supervisor. Standard library alone.

Given as source to `python3 -c` with: the sandbox's folder, the descriptor of a seccomp filter and
the supervisor's source. It is already of the sandbox's own user. Whatever does not hold ends it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

CREATE, ADD, RESTRICT = 444, 445, 446
"""Landlock's calls, the same numbers on every architecture."""
ABI = 6
"""The first version that keeps signals in."""

EXECUTE, WRITE, READ, LIST, TRUNCATE, IOCTL = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
ALL = (1 << 16) - 1
DEVICES = 1 << 6 | 1 << 11
"""Making character and block devices."""
TCP = 3
SCOPES = 3
"""Abstract sockets and signals."""

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
PSEUDO = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PROC = ("/proc/cpuinfo", "/proc/meminfo", "/proc/loadavg", "/proc/stat", "/proc/filesystems")


def main() -> None:
    """Enter the cage, see that it is shut, become the supervisor."""
    folder, handle, supervisor = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS")
    check(libc.syscall(CREATE, None, 0, 1) >= ABI, "Landlock of this kernel is too old")
    restrict(libc, folder)
    filter_calls(libc, handle)
    see_that_it_holds()
    workspace = os.path.join(folder, "workspace")
    os.chdir(workspace)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", supervisor, workspace])


def restrict(libc: ctypes.CDLL, folder: str) -> None:
    """Programs to read and run, the sandbox's folder to write, no TCP, no signal to the outside."""
    attributes = struct.pack("=QQQ", ALL, TCP, SCOPES)
    rules = libc.syscall(CREATE, attributes, len(attributes), 0)
    check(rules >= 0, "landlock_create_ruleset")
    for path in PROGRAMS:
        allow(libc, rules, path, EXECUTE | READ | LIST)
    for path in PSEUDO:
        allow(libc, rules, path, READ | WRITE | TRUNCATE | IOCTL)
    for path in PROC:
        allow(libc, rules, path, READ)
    for name in ("workspace", "tmp"):
        allow(libc, rules, os.path.join(folder, name), ALL & ~DEVICES)
    check(libc.syscall(RESTRICT, rules, 0) == 0, "landlock_restrict_self")
    os.close(rules)


def allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    """Allow this below a path, if it is there."""
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        access &= EXECUTE | WRITE | READ | TRUNCATE | IOCTL
    rule = struct.pack("=Qi", access, handle)
    check(libc.syscall(ADD, rules, 1, rule, 0) == 0, f"landlock_add_rule of {path}")
    os.close(handle)


def filter_calls(libc: ctypes.CDLL, handle: int) -> None:
    """The seccomp filter that the descriptor holds."""
    program = os.read(handle, 1 << 16)
    os.close(handle)
    steps = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a length, padding, a pointer
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(steps))
    check(libc.prctl(22, 2, header, 0, 0) == 0, "PR_SET_SECCOMP")


def see_that_it_holds() -> None:
    """The supervisor will signal all that it can: outside of the cage that must be nothing."""
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return
    check(False, "a signal can leave it")


def check(holds: bool, what: str) -> None:
    """End here unless it does."""
    if not holds:
        sys.exit(f"the cage does not hold: {what} ({os.strerror(ctypes.get_errno())})")


if __name__ == "__main__":
    main()
