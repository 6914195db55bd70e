"""Landlock sandboxes hold the contract; what needs namespaces is tried another way."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from agentrl_sandboxes import landlock
from agentrl_sandboxes.landlock import LandlockProvider
from sandbox_cases import needs_landlock

from agentrl.errors import SandboxLost
from agentrl.protocols import Sandbox
from agentrl.testing import sandbox as contract
from agentrl.types import SandboxSpec

TRIED_BELOW = {
    contract.a_timeout_keeps_the_output_and_the_session,  # counts processes in /proc, closed here
    contract.nothing_outlives_its_call,
    contract.a_fork_bomb_is_contained,
    contract.the_disk_is_small_and_the_rest_read_only,  # its disk is no file system of its own
    contract.real_programs_run,  # no /dev/shm, hence no semaphores of multiprocessing
    contract.nothing_of_the_host_shines_through,  # reads its capabilities in /proc
}
CHECKS = [check for check in contract.SANDBOX_CHECKS if check not in TRIED_BELOW]


async def sh(sandbox: Sandbox, script: str, timeout_s: float = 10) -> bytes:
    done = await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)
    return done.stdout


async def py(sandbox: Sandbox, code: str) -> str:
    done = await sandbox.exec(["python3", "-I", "-S", "-c", code], timeout_s=20)
    return (done.stdout + done.stderr).decode()


def processes_of(user: int) -> int:
    """Seen from the host: each sandbox has a user of its own."""
    seen = subprocess.run(["ps", "-o", "pid=", "-u", str(user)], capture_output=True, text=True)
    return len(seen.stdout.split())


@needs_landlock
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_contract(check: contract.SandboxCheck) -> None:
    await check(LandlockProvider())


@needs_landlock
async def test_nothing_outlives_its_call_and_the_session_goes_on() -> None:
    """However a process hides or strikes, one is left: the supervisor."""
    async with LandlockProvider().session(SandboxSpec()) as sandbox:
        user = int(await sh(sandbox, "id -u"))
        for script in (
            "(setsid sleep 60 &); echo ok",
            "python3 -c 'import os,time; os.fork() or os.setsid() or os.fork() or time.sleep(60)'",
            "trap '' TERM HUP INT; sleep 60 & exit 0",
            "for i in 1 2 3 4 5 6 7 8; do (exit 0 &) ; done",
            "kill -9 -1",
            "kill -9 1",
            "kill -STOP $PPID",
            "kill -9 $PPID",
        ):
            await sh(sandbox, script)
            assert processes_of(user) == 1, script
        done = await sandbox.exec(["sh", "-c", "echo a; sleep 60"], timeout_s=0.5)
        assert (done.timed_out, done.stdout, processes_of(user)) == (True, b"a\n", 1)
        bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
        running = asyncio.ensure_future(sandbox.exec(["python3", "-c", bomb], timeout_s=1.5))
        async with LandlockProvider().session(SandboxSpec()) as other:
            assert await sh(other, "echo here") == b"here\n"
        assert (await running).timed_out
        assert processes_of(user) == 1
    assert processes_of(user) == 0


@needs_landlock
async def test_signals_traces_and_sockets_stop_at_the_cage() -> None:
    """Tried on this very process, which the sandbox's number would name."""
    code = (
        f"import os, socket\nme = {os.getpid()}\n"
        "def t(f, *a):\n"
        " try: f(*a); print('done')\n"
        " except OSError as e: print(type(e).__name__)\n"
        "t(os.kill, me, 0); t(os.kill, os.getppid(), 0); t(open, f'/proc/{me}/environ')\n"
        "t(os.listdir, '/proc'); t(os.listdir, '/'); t(open, '/etc/passwd'); t(socket.socket)\n"
        "t(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "t(os.mknod, 'device', 0o20666, os.makedev(1, 3)); t(os.setuid, 0)"
    )
    async with LandlockProvider().session(SandboxSpec()) as sandbox:
        said = (await py(sandbox, code)).split()
    assert said == ["PermissionError"] * 10, said


@needs_landlock
async def test_it_has_no_rights_and_a_user_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_TEST_SECRET", "swordfish")
    capabilities = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "data = (ctypes.c_uint32 * 6)()\n"
        "libc.syscall(125, (ctypes.c_uint32 * 2)(0x20080522, 0), data)\n"  # capget
        "print(list(data), libc.prctl(39, 0, 0, 0, 0), libc.prctl(21), os.getgroups())"
    )
    provider = LandlockProvider()
    async with (
        provider.session(SandboxSpec()) as sandbox,
        provider.session(SandboxSpec()) as other,
    ):
        assert b"swordfish" not in await sh(sandbox, "env; cat /proc/*/environ /proc/*/cmdline")
        assert await py(sandbox, capabilities) == "[0, 0, 0, 0, 0, 0] 1 2 []\n"
        theirs = (await sh(other, "echo x > mine; pwd; id -u")).decode().split()
        assert await sh(sandbox, f"cat {theirs[0]}/mine; ls {theirs[0]} /tmp") == b""
        assert await sh(sandbox, "id -u") != theirs[1].encode()


@needs_landlock
async def test_who_fills_the_disk_loses_the_sandbox_and_nothing_stays() -> None:
    """That is the agent's doing: no fault. The rest of the disk is read-only."""
    async with LandlockProvider().session(SandboxSpec(workspace_mb=16)) as sandbox:
        folder = Path((await sh(sandbox, "pwd")).decode().strip()).parent
        for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/tmp/x", "/dev/shm/x", "../x"):
            done = await sandbox.exec(["sh", "-c", f"echo x > {path}"], timeout_s=5)
            assert done.exit_code != 0, path
        with pytest.raises(SandboxLost, match="disk"):
            await sh(sandbox, "for i in 1 2 3; do head -c 20000000 /dev/zero > $i; done; sleep 9")
    assert not folder.exists()


@needs_landlock
async def test_real_programs_run() -> None:
    code = (
        "import asyncio, concurrent.futures, mmap, os, sqlite3, socket, subprocess, tempfile\n"
        "with concurrent.futures.ThreadPoolExecutor(4) as p: assert sum(p.map(int,'123')) == 6\n"
        "assert asyncio.run(asyncio.sleep(0, 5)) == 5\n"
        "assert sqlite3.connect('x.db').execute('select 6*7').fetchone() == (42,)\n"
        "assert subprocess.check_output(['sh','-c','ls | sort | wc -l']).strip() == b'1'\n"
        "a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'\n"
        "with tempfile.TemporaryDirectory() as d: os.symlink('a', d+'/b'); os.unlink(d+'/b')\n"
        "m = mmap.mmap(-1, 4096); m[0] = 7; os.urandom(9); os.getloadavg()\n"
        "print('all')"
    )
    async with LandlockProvider().session(SandboxSpec()) as sandbox:
        assert await py(sandbox, code) == "all\n"


@needs_landlock
async def test_a_tree_too_deep_for_python_is_removed_and_dead_owners_are_pruned() -> None:
    deep = "import os\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')"
    provider = LandlockProvider()
    async with provider.session(SandboxSpec()) as sandbox:
        folder = Path((await sh(sandbox, "pwd")).decode().strip()).parent
        await py(sandbox, deep)
        await provider.prune("")
        assert folder.exists()
        left = folder.with_name(f"{landlock.PREFIX}left")
        left.mkdir()
        (left / landlock.OWNER_FILE).write_text(f"{os.uname().nodename}:{2**22}:1\nrun")
        assert await provider.prune("another run") == 0
        assert await provider.prune("run") == 1
        assert not left.exists() and folder.exists()
    assert not folder.exists()
