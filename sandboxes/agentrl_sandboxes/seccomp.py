"""A seccomp filter for sandboxed programs, as the BPF bytes that bubblewrap takes.

Calls that reach for the kernel's rarer doors are refused with EPERM; sockets are Unix, IPv4 and
IPv6 alone; clone3 says ENOSYS so that libc falls back to clone, whose flags can be read. x86-64
and aarch64; a process of another architecture is killed.
"""

import platform
import struct

from agentrl.errors import ConfigError

# asm-generic numbers serve aarch64; x86-64 has its own. Both from the kernel's syscall tables.
REFUSED = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "acct": 163, "mount": 165, "umount2": 166, "swapon": 167,
        "swapoff": 168, "reboot": 169, "init_module": 175, "delete_module": 176, "quotactl": 179,
        "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
        "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
        "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
        "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "chroot": 161,
        "pivot_root": 155, "kexec_load": 246, "personality": 135, "kcmp": 312,
    },
    "aarch64": {
        "ptrace": 117, "syslog": 116, "acct": 89, "mount": 40, "umount2": 39, "swapon": 224,
        "swapoff": 225, "reboot": 142, "init_module": 105, "delete_module": 106, "quotactl": 60,
        "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97, "perf_event_open": 241,
        "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
        "finit_module": 273, "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
        "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "chroot": 51,
        "pivot_root": 41, "kexec_load": 104, "personality": 92, "kcmp": 272,
    },
}  # fmt: skip
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SOCKET = {"x86_64": 41, "aarch64": 198}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
FAMILIES = (1, 2, 10)
NEW_NAMESPACES = 0x7E020000
X32 = 0x40000000

_LOAD, _EQUAL, _GREATER, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38


def filter_for(machine: str | None = None) -> bytes:
    """The filter program for a machine (this one's by default). Raises ConfigError if unknown."""
    machine = machine or platform.machine()
    if machine not in REFUSED:
        raise ConfigError(f"no seccomp filter for {machine}: use x86_64 or aarch64")
    refuse, missing = _ERROR | _EPERM, _ERROR | _ENOSYS
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        *_when(_GREATER, X32, refuse),
        *_when(_EQUAL, CLONE3, missing),
        *(step for n in sorted(REFUSED[machine].values()) for step in _when(_EQUAL, n, refuse)),
        # clone with a namespace flag
        (_EQUAL, 0, 4, CLONE[machine]),
        (_LOAD, 0, 0, 16),
        *_when(_ANY, NEW_NAMESPACES, refuse),
        (_RETURN, 0, 0, _ALLOW),
        # socket of another family
        (_EQUAL, 0, len(FAMILIES) + 2, SOCKET[machine]),
        (_LOAD, 0, 0, 16),
        *((_EQUAL, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in program)


def _when(test: int, value: int, verdict: int) -> list[tuple[int, int, int, int]]:
    """Return `verdict` if the loaded word passes the test."""
    return [(test, 0, 1, value), (_RETURN, 0, 0, verdict)]
