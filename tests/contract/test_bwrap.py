"""What a bubblewrap sandbox promises, tried from inside. Nothing here runs outside of one."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from agentrl_sandboxes.bwrap import BwrapProvider
from agentrl_sandboxes.channel import SupervisedSandbox

from agentrl.errors import SandboxFault, ToolError
from agentrl.types import ExecResult, SandboxSpec


@pytest_asyncio.fixture
async def sandbox() -> AsyncGenerator[SupervisedSandbox]:
    spec = SandboxSpec(memory_mb=256, files={"in/a.txt": b"\xff\x00hello"})
    async with BwrapProvider().session(spec) as opened:
        yield opened


async def sh(sandbox: SupervisedSandbox, script: str, timeout_s: float = 10) -> ExecResult:
    return await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)


async def py(sandbox: SupervisedSandbox, code: str, timeout_s: float = 10) -> ExecResult:
    return await sandbox.exec(["python3", "-I", "-S", "-c", code], timeout_s=timeout_s)


async def processes(sandbox: SupervisedSandbox) -> int:
    done = await py(sandbox, "import os; print(sum(e.isdigit() for e in os.listdir('/proc')))")
    return int(done.stdout) - 1  # without the one that counts


async def test_a_timeout_keeps_the_output_and_the_session(sandbox: SupervisedSandbox) -> None:
    await sandbox.write_file("kept", b"1")
    begun = time.monotonic()
    done = await sh(sandbox, "echo step 1; sleep 60", timeout_s=0.5)
    assert (done.timed_out, done.exit_code, done.stdout) == (True, None, b"step 1\n")
    assert time.monotonic() - begun < 3
    assert await sandbox.read_file("kept", max_bytes=9) == b"1"
    assert await processes(sandbox) == 1


@pytest.mark.parametrize(
    "script",
    [
        "(setsid sleep 60 &); echo ok",
        "python3 -c 'import os,time; os.fork() or os.setsid() or os.fork() or time.sleep(60)'",
        "trap '' TERM HUP INT; sleep 60 & exit 0",
        "kill -9 -1",
        "kill -9 1",
        "kill -STOP 1",
    ],
)
async def test_nothing_outlives_its_call(sandbox: SupervisedSandbox, script: str) -> None:
    await sh(sandbox, script)
    assert await processes(sandbox) == 1


async def test_many_quick_commands_each_give_their_own_output(sandbox: SupervisedSandbox) -> None:
    for number in range(100):
        assert (await sh(sandbox, f"echo {number}")).stdout == f"{number}\n".encode()


async def test_a_fork_bomb_is_contained_and_another_sandbox_answers(
    sandbox: SupervisedSandbox,
) -> None:
    done = await py(sandbox, "import os\nwhile True:\n try: os.fork()\n except OSError: pass", 1.5)
    assert done.timed_out
    assert await processes(sandbox) == 1
    async with BwrapProvider().session(SandboxSpec()) as other:
        assert (await sh(other, "echo here")).stdout == b"here\n"


async def test_memory_runs_out_inside(sandbox: SupervisedSandbox) -> None:
    done = await py(sandbox, "x = bytearray(10**9)")
    assert done.out_of_memory and done.exit_code == 1 and not done.timed_out
    assert (await sh(sandbox, "echo on")).stdout == b"on\n"


async def test_a_flood_is_cut_and_counted(sandbox: SupervisedSandbox) -> None:
    done = await sh(sandbox, "head -c 100000000 /dev/zero")
    assert done.stdout_bytes == 100_000_000
    assert len(done.stdout) == SandboxSpec().max_output_bytes
    assert done.cut


async def test_the_disk_is_small_and_the_rest_read_only(sandbox: SupervisedSandbox) -> None:
    done = await sh(sandbox, "head -c 200000000 /dev/zero > big")
    assert done.exit_code != 0
    for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/bin/x"):
        assert b"Read-only" in (await sh(sandbox, f"touch {path}")).stderr, path


async def test_bytes_that_are_no_text_pass_through(sandbox: SupervisedSandbox) -> None:
    assert (await sh(sandbox, r"printf '\377\376A'")).stdout == b"\xff\xfeA"
    assert await sandbox.read_file("in/a.txt", max_bytes=100) == b"\xff\x00hello"


async def test_stdin_is_given_and_then_ends(sandbox: SupervisedSandbox) -> None:
    done = await sandbox.exec(["cat"], stdin=b"x" * 300_000, timeout_s=10)
    assert done.stdout_bytes == 300_000
    assert (await sandbox.exec(["cat"], timeout_s=5)).stdout == b""


async def test_no_network_and_no_rare_sockets(sandbox: SupervisedSandbox) -> None:
    code = (
        "import socket\n"
        "def t(f,k,*a):\n"
        " try:\n  s=socket.socket(f,k); s.settimeout(2); a and s.connect(a[0]); print('open')\n"
        " except OSError as e: print(type(e).__name__, e.errno)\n"
        "t(2,1,('127.0.0.2',80)); t(2,2,('192.0.2.1',53)); t(40,1); t(38,5); t(16,3); t(17,3)"
    )
    said = (await py(sandbox, code)).stdout.decode().split("\n")
    assert "open" not in said
    assert said[2:6] == ["PermissionError 1"] * 4


SYSCALLS = {  # x86-64 numbers
    "ptrace": 101, "mount": 165, "unshare": 272, "keyctl": 250, "bpf": 321, "userfaultfd": 323,
    "io_uring_setup": 425, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310,
    "kexec_load": 246, "init_module": 175, "open_by_handle_at": 304, "pidfd_getfd": 438,
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
async def test_the_kernels_rare_doors_are_shut(sandbox: SupervisedSandbox) -> None:
    code = (
        "import ctypes\nc=ctypes.CDLL(None,use_errno=True)\n"
        f"for name,n in {SYSCALLS!r}.items():\n"
        " r=c.syscall(n,0,0,0,0,0); print(name,r,ctypes.get_errno())\n"
        "r=c.syscall(435,0,0); print('clone3',r,ctypes.get_errno())\n"
        "r=c.syscall(56,0x10000000|17,0,0,0,0); print('clone',r,ctypes.get_errno())"
    )
    lines = (await py(sandbox, code)).stdout.decode().splitlines()
    assert lines == [*(f"{name} -1 1" for name in SYSCALLS), "clone3 -1 38", "clone -1 1"]


async def test_the_supervisor_can_not_be_read_or_traced(sandbox: SupervisedSandbox) -> None:
    for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd/1", "/proc/1/maps"):
        done = await sh(sandbox, f"cat {path}")
        assert done.exit_code != 0 and done.stdout == b"", path


async def test_nothing_of_the_host_shines_through(
    sandbox: SupervisedSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_MARKER", "swordfish")
    (tmp_path / "secret").write_text("swordfish")
    async with BwrapProvider().session(SandboxSpec()) as fresh:
        seen = await sh(fresh, f"env; cat /proc/*/environ /proc/*/cmdline; cat {tmp_path}/secret")
        assert b"swordfish" not in seen.stdout
        listing = (await sh(fresh, "ls /; ls -A /root /home /var /run 2>&1; id -u")).stdout
    assert b"\n65534\n" in listing
    assert b"docker.sock" not in listing


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/proc/1/environ", "link", "fifo", "in", ""])
async def test_the_file_api_reads_regular_files_of_the_workspace(
    sandbox: SupervisedSandbox, path: str
) -> None:
    await sh(sandbox, "ln -s /usr/bin/python3 link; ln -s / out; mkfifo fifo")
    for bad in (path, f"out/{path}"):
        with pytest.raises(ToolError):
            await asyncio.wait_for(sandbox.read_file(bad, max_bytes=1 << 20), 5)
    with pytest.raises(ToolError):
        await sandbox.write_file("out/usr/x", b"")
    with pytest.raises(ToolError, match="larger"):
        await sandbox.read_file("in/a.txt", max_bytes=3)


async def test_sandboxes_share_nothing(sandbox: SupervisedSandbox) -> None:
    await sh(sandbox, "echo x > /tmp/left; echo x > left")
    async with BwrapProvider().session(SandboxSpec()) as other:
        assert (await sh(other, "ls -A /tmp /workspace /dev/shm")).stdout.count(b"left") == 0


async def test_a_call_that_is_given_up_ends_the_channel_not_the_host(
    sandbox: SupervisedSandbox,
) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sh(sandbox, "sleep 60", 60), 0.3)
    with pytest.raises(SandboxFault):
        await sh(sandbox, "echo late")


async def test_many_at_once_and_nothing_left() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def one(number: int) -> bytes:
        async with BwrapProvider().session(SandboxSpec()) as opened:
            return (await sh(opened, f"echo {number}")).stdout

    await one(0)
    before = open_files()
    said = await asyncio.gather(*(one(number) for number in range(32)))
    assert said == [f"{number}\n".encode() for number in range(32)]
    assert open_files() <= before + 1


def test_when_the_owner_is_killed_nothing_stays() -> None:
    code = (
        "import asyncio\n"
        "from agentrl_sandboxes.bwrap import BwrapProvider\nfrom agentrl.types import SandboxSpec\n"
        "async def main():\n"
        " async with BwrapProvider().session(SandboxSpec()) as s:\n"
        "  print('up', flush=True); await s.exec(['sleep', '98765'], timeout_s=99)\n"
        "asyncio.run(main())"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
    time.sleep(0.5)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 5
    while b"98765" in subprocess.run(["ps", "-eo", "args"], capture_output=True).stdout:
        assert time.monotonic() < deadline, "the sandbox outlived its owner"
        time.sleep(0.05)


async def test_egress_is_refused_rather_than_ignored() -> None:
    from agentrl.errors import ConfigError

    with pytest.raises(ConfigError, match="egress"):
        async with BwrapProvider().session(SandboxSpec(egress=("example.org",))):
            raise AssertionError("must not open")
