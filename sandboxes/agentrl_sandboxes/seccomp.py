"""What sandboxed programs may ask the kernel for: one list, as BPF bytes and as Docker's profile.

A call that is not listed is refused with EPERM (one the list is too old to know with ENOSYS, as an
older kernel would). Sockets are Unix, IPv4 and IPv6 alone; clone makes no namespace; clone3 says
ENOSYS so that libc falls back to clone, whose flags can be read. Limits and priorities are set for
the caller alone: the supervisor may be of the same user. x86-64 and aarch64; a process of another
architecture is killed.
"""

import json
import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from agentrl.errors import ConfigError

CLONE3 = 435
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
OF_ITSELF: dict[str, tuple[tuple[int, int], ...]] = {
    "prlimit64": ((0, 0),),
    "sched_setaffinity": ((0, 0),),
    "sched_setattr": ((0, 0),),
    "sched_setparam": ((0, 0),),
    "sched_setscheduler": ((0, 0),),
    "setpriority": ((0, 0), (1, 0)),
}
"""Calls that take a process: allowed if each of these arguments (place, value) names the caller."""
NEW_NAMESPACES = 0x7E020000
X32 = 0x40000000
_NEWEST = 460

_LOAD, _EQUAL, _GREATER, _AT_LEAST, _ANY, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_REFUSE, _MISSING = _ERROR | _EPERM, _ERROR | _ENOSYS

_Step = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """Numbers of an architecture; `column` is its place in the table of calls."""

    audit: int
    name: str
    socket: int
    clone: int
    column: int


_MACHINES = {
    "x86_64": _Machine(audit=0xC000003E, name="SCMP_ARCH_X86_64", socket=41, clone=56, column=1),
    "aarch64": _Machine(
        audit=0xC00000B7, name="SCMP_ARCH_AARCH64", socket=198, clone=220, column=2
    ),
}


NAMED = frozenset(
    {"bind", "connect", "listen", "sendmsg", "sendmmsg", "name_to_handle_at"}
    | {"mq_open", "mq_unlink", "msgctl", "msgget", "msgrcv", "msgsnd"}
    | {"semctl", "semget", "semop", "semtimedop", "shmat", "shmctl", "shmdt", "shmget"}
)
"""Calls for what the whole machine shares by name, where a sandbox has no namespaces."""
SOCKETPAIR = "socketpair"


@cache
def filter_for(name: str | None = None, *, shared: bool = False) -> bytes:
    """The filter program for a machine (this one's by default). Raises ConfigError if unknown.

    `shared`: for a sandbox in the host's own namespaces. It has no sockets but connected pairs,
    and none of `NAMED`.
    """
    machine = _machine(name)
    families = () if shared else FAMILIES
    refused = NAMED if shared else frozenset[str]()
    program: list[_Step] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        *_when(_AT_LEAST, X32, _REFUSE),
        *_when(_EQUAL, CLONE3, _MISSING),
        # clone without a new namespace
        (_EQUAL, 0, 4, machine.clone),
        (_LOAD, 0, 0, 16),
        *_when(_ANY, NEW_NAMESPACES, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
        # socket of a known family
        (_EQUAL, 0, len(families) + 3, machine.socket),
        (_LOAD, 0, 0, 16),
        *((_EQUAL, len(families) - i, 0, family) for i, family in enumerate(families)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
        *(step for number, wanted in _of_itself(machine) for step in _only(number, wanted)),
        *(_connected_pairs(machine) if shared else ()),
        *(
            step
            for first, last in _runs(_numbers(machine, refused))
            for step in _between(first, last)
        ),
        *_when(_GREATER, _NEWEST, _MISSING),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in program)


@cache
def docker_profile() -> str:
    """The same list as JSON, in the format of Docker's `--security-opt seccomp=`."""
    machine = _machine(None)
    names = [name for name, *_ in _table() if name not in OF_ITSELF]
    no_namespace = {"index": 0, "value": NEW_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    sockets = [
        {
            "names": ["socket"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"}],
        }
        for family in FAMILIES
    ]
    own = [
        {
            "names": [name],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": i, "value": value, "op": "SCMP_CMP_EQ"} for i, value in wanted],
        }
        for name, wanted in OF_ITSELF.items()
    ]
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": [machine.name],
        "syscalls": [
            {"names": names, "action": "SCMP_ACT_ALLOW"},
            {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [no_namespace]},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
            *sockets,
            *own,
        ],
    }
    return json.dumps(profile)


def _machine(name: str | None) -> _Machine:
    name = name or platform.machine()
    if name not in _MACHINES:
        raise ConfigError(f"no seccomp filter for {name}: use x86_64 or aarch64")
    return _MACHINES[name]


@cache
def _table() -> tuple[tuple[str, str, str], ...]:
    text = files("agentrl_sandboxes").joinpath("syscalls.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines() if not line.startswith("#"))
    return tuple((name, x86, arm) for name, x86, arm in rows)


def _numbers(machine: _Machine, refused: frozenset[str]) -> list[int]:
    """The calls that are allowed with any arguments."""
    judged = {*OF_ITSELF, *refused}
    rows = (row for row in _table() if row[0] not in judged and row[machine.column] != "-")
    return sorted(int(row[machine.column]) for row in rows)


def _connected_pairs(machine: _Machine) -> list[_Step]:
    """No pair of datagram sockets (types 2 and 3): those can be sent from to any name."""
    (number,) = (int(row[machine.column]) for row in _table() if row[0] == SOCKETPAIR)
    tests = [(_LOAD, 0, 0, 24), *_when(_ANY, 2, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(tests), number), *tests]


def _of_itself(machine: _Machine) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    numbers = {row[0]: int(row[machine.column]) for row in _table() if row[0] in OF_ITSELF}
    return [(numbers[name], wanted) for name, wanted in OF_ITSELF.items()]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring numbers as ranges, both ends included."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number > last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _between(first: int, last: int) -> list[_Step]:
    """Allow the loaded number if it is in the range."""
    return [(_AT_LEAST, 0, 2, first), (_GREATER, 1, 0, last), (_RETURN, 0, 0, _ALLOW)]


def _only(number: int, wanted: Sequence[tuple[int, int]]) -> list[_Step]:
    """If the loaded number is this one: allow it with these arguments, else refuse it."""
    tests = [
        step
        for place, value in wanted
        for step in ((_LOAD, 0, 0, 16 + 8 * place), (_EQUAL, 1, 0, value), (_RETURN, 0, 0, _REFUSE))
    ]
    return [(_EQUAL, 0, len(tests) + 1, number), *tests, (_RETURN, 0, 0, _ALLOW)]


def _when(test: int, value: int, verdict: int) -> list[_Step]:
    """Return `verdict` if the loaded word passes the test."""
    return [(test, 0, 1, value), (_RETURN, 0, 0, verdict)]
