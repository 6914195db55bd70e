"""What every sandbox backend must hold, as plain async checks, each tried from inside.

A test module brings a provider and runs each of `SANDBOX_CHECKS` with it. A check raises
AssertionError with what it saw. Nothing here runs outside of a sandbox.
"""

import asyncio
import os
import platform
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from agentrl.errors import ConfigError, SandboxFault, SandboxLost, ToolError
from agentrl.protocols import Sandbox, SandboxProvider
from agentrl.snapshot import unpack
from agentrl.types import ExecResult, SandboxSpec

SandboxCheck = Callable[[SandboxProvider], Awaitable[None]]

SPEC = SandboxSpec(memory_mb=256, files={"in/a.txt": b"\xff\x00hello"})


async def a_timeout_keeps_the_output_and_the_session(provider: SandboxProvider) -> None:
    """The time limit ends a call, not the sandbox."""
    async with _opened(provider) as sandbox:
        await sandbox.write_file("kept", b"1")
        begun = time.monotonic()
        done = await _sh(sandbox, "echo step 1; sleep 60", timeout_s=0.5)
        seen = (done.timed_out, done.exit_code, done.stdout)
        assert seen == (True, None, b"step 1\n"), seen
        assert time.monotonic() - begun < 5
        assert await sandbox.read_file("kept", max_bytes=9) == b"1"
        await _is_alone(sandbox)


async def nothing_outlives_its_call(provider: SandboxProvider) -> None:
    """However a process hides, it ends with its call; and nothing can harm the supervisor."""
    async with _opened(provider) as sandbox:
        for script in (
            "(setsid sleep 60 &); echo ok",
            "python3 -c 'import os,time; os.fork() or os.setsid() or os.fork() or time.sleep(60)'",
            "trap '' TERM HUP INT; sleep 60 & exit 0",
            "for i in 1 2 3 4 5 6 7 8; do (exit 0 &) ; done",
            "kill -9 -1",
            "kill -9 1",
            "kill -STOP 1",
            "kill -9 $PPID",
        ):
            await _sh(sandbox, script)
            await _is_alone(sandbox)


async def each_call_gives_its_own_output(provider: SandboxProvider) -> None:
    """Nothing of one call reaches the next."""
    async with _opened(provider) as sandbox:
        for number in range(100):
            done = await _sh(sandbox, f"echo {number}; echo {-number} >&2; exit {number % 7}")
            assert done.stdout == f"{number}\n".encode(), done
            assert done.stderr == f"{-number}\n".encode(), done
            assert done.exit_code == number % 7, done


async def a_fork_bomb_is_contained(provider: SandboxProvider) -> None:
    """It costs its own call; the sandbox and its neighbours answer."""
    async with _opened(provider) as sandbox, _opened(provider) as other:
        bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
        running = asyncio.ensure_future(_py(sandbox, bomb, timeout_s=1.5))
        assert (await _sh(other, "echo here")).stdout == b"here\n"
        assert (await running).timed_out
        await _is_alone(sandbox)


async def memory_runs_out_inside(provider: SandboxProvider) -> None:
    """A command that wants too much ends and says so; the session goes on."""
    async with _opened(provider) as sandbox:
        done = await _py(sandbox, "x = bytearray(10**9); print(sum(x[::4096]))")
        assert done.out_of_memory and done.exit_code not in (0, None), done
        assert (await _sh(sandbox, "echo on")).stdout == b"on\n"


async def a_flood_is_cut_and_counted(provider: SandboxProvider) -> None:
    """Output beyond the limit is counted, not kept, and never fills the host's memory."""
    async with _opened(provider) as sandbox:
        done = await _sh(sandbox, "head -c 100000000 /dev/zero; head -c 99999 /dev/zero >&2", 30)
        assert (done.stdout_bytes, done.stderr_bytes) == (100_000_000, 99_999), done.stdout_bytes
        assert len(done.stdout) == len(done.stderr) == SPEC.max_output_bytes
        assert done.cut
        endless = await _sh(sandbox, "cat /dev/zero", timeout_s=0.5)
        assert endless.timed_out and len(endless.stdout) == SPEC.max_output_bytes


async def the_disk_is_small_and_the_rest_read_only(provider: SandboxProvider) -> None:
    """Files have a limit, the workspace has one, and only the workspace and /tmp are written."""
    async with _opened(provider) as sandbox:
        await _sh(sandbox, "head -c 200000000 /dev/zero > big")
        for number in range(3):
            await _sh(
                sandbox, f"head -c 40000000 /dev/zero > big{number}; head -c 999 /dev/zero > x"
            )
        total = await _sh(sandbox, "cat * 2>/dev/null | wc -c")
        assert int(total.stdout) <= (SPEC.workspace_mb << 20), total
        for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/bin/x", "/usr/bin/python3"):
            done = await _sh(sandbox, f"echo x > {path}")
            assert done.exit_code != 0, path
        assert (await _sh(sandbox, "rm -f *; echo on > x; cat x")).stdout == b"on\n"


async def bytes_that_are_no_text_pass_through(provider: SandboxProvider) -> None:
    """Output, input, arguments and files are bytes."""
    async with _opened(provider) as sandbox:
        assert (await _sh(sandbox, r"printf '\377\376\000A'")).stdout == b"\xff\xfe\x00A"
        assert await sandbox.read_file("in/a.txt", max_bytes=100) == b"\xff\x00hello"
        every = bytes(range(256)) * 40
        assert (await sandbox.exec(["cat"], stdin=every, timeout_s=9)).stdout == every
        await sandbox.write_file("é/日本 x", every)
        assert await sandbox.read_file("é/日本 x", max_bytes=20_000) == every
        said = (await sandbox.exec(["printf", "%s", "é日本\n' \""], timeout_s=9)).stdout
        assert said == "é日本\n' \"".encode(), said


async def stdin_is_given_and_then_ends(provider: SandboxProvider) -> None:
    """No command waits for input for ever, and large input arrives whole."""
    async with _opened(provider) as sandbox:
        done = await sandbox.exec(["wc", "-c"], stdin=b"x" * 3_000_000, timeout_s=20)
        assert done.stdout.strip() == b"3000000", done
        assert (await sandbox.exec(["cat"], timeout_s=5)).stdout == b""
        # Who does not read its input is not waited for.
        assert (await sandbox.exec(["true"], stdin=b"x" * 3_000_000, timeout_s=9)).exit_code == 0
        here = await _sh(sandbox, "cat <<'END'\n$HOME `id`\nEND")
        assert here.stdout == b"$HOME `id`\n", here


async def a_command_that_is_not_there_is_a_result(provider: SandboxProvider) -> None:
    """The model's mistake, not a fault."""
    async with _opened(provider) as sandbox:
        done = await sandbox.exec(["no-such-program"], timeout_s=5)
        assert done.exit_code == 127 and b"no-such-program" in done.stderr, done
        done = await sandbox.exec(["/workspace"], timeout_s=5)
        assert done.exit_code == 127, done
        for argv in ([], ["a\0b"]):
            try:
                await sandbox.exec(argv, timeout_s=5)
            except ToolError:
                continue
            raise AssertionError(argv)


async def no_network_and_no_rare_sockets(provider: SandboxProvider) -> None:
    """Nobody is reached; vsock, AF_ALG, netlink and packet sockets can't even be made."""
    code = (
        "import socket\n"
        "def t(f,k,*a):\n"
        " try:\n  s=socket.socket(f,k); s.settimeout(2); a and s.connect(a[0]); print('open')\n"
        " except OSError as e: print(type(e).__name__, e.errno)\n"
        "t(2,1,('127.0.0.2',80)); t(2,2,('192.0.2.1',53)); t(40,1); t(38,5); t(16,3); t(17,3)\n"
        "t(1,1,'/var/run/docker.sock'); t(1,1,'/run/docker.sock'); t(1,1,'\\0agentrl')"
    )
    async with _opened(provider) as sandbox:
        said = (await _py(sandbox, code)).stdout.decode().split("\n")
        assert "open" not in said, said
        assert said[2:6] == ["PermissionError 1"] * 4, said


async def the_kernels_rare_doors_are_shut(provider: SandboxProvider) -> None:
    """Calls that have led out of containers before are refused by name."""
    if platform.machine() != "x86_64":
        return  # the numbers below are its
    code = (
        "import ctypes\nc=ctypes.CDLL(None,use_errno=True)\n"
        f"for name,n in {_SYSCALLS!r}.items():\n"
        " r=c.syscall(n,0,0,0,0,0); print(name,r,ctypes.get_errno())\n"
        "r=c.syscall(435,0,0); print('clone3',r,ctypes.get_errno())\n"
        "r=c.syscall(56,0x10000000|17,0,0,0,0); print('clone',r,ctypes.get_errno())"
    )
    async with _opened(provider) as sandbox:
        lines = (await _py(sandbox, code)).stdout.decode().splitlines()
    assert lines == [*(f"{name} -1 1" for name in _SYSCALLS), "clone3 -1 38", "clone -1 1"], lines


async def real_programs_run(provider: SandboxProvider) -> None:
    """The list of allowed calls is long enough for what agents do."""
    code = (
        "import asyncio, concurrent.futures, mmap, multiprocessing, os, select, signal, sqlite3\n"
        "import socket, subprocess, tempfile, threading, time\n"
        "with concurrent.futures.ThreadPoolExecutor(4) as p: assert sum(p.map(int,'123')) == 6\n"
        "with multiprocessing.get_context('fork').Pool(2) as p: assert p.map(abs,[-1]) == [1]\n"
        "assert asyncio.run(asyncio.sleep(0, 5)) == 5\n"
        "assert sqlite3.connect('x.db').execute('select 6*7').fetchone() == (42,)\n"
        "assert subprocess.check_output(['sh','-c','ls | sort | wc -l']).strip() == b'3'\n"
        "a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'\n"
        "with tempfile.TemporaryDirectory() as d: os.symlink('a', d+'/b'); os.unlink(d+'/b')\n"
        "m = mmap.mmap(-1, 4096); m[0] = 7; signal.alarm(0); os.urandom(9); os.getloadavg()\n"
        "print('all')"
    )
    async with _opened(provider) as sandbox:
        await sandbox.write_file("all.py", code.encode())
        done = await sandbox.exec(["python3", "all.py"], timeout_s=30)
        assert done.stdout == b"all\n", done.stderr.decode()[-2000:]


async def the_supervisor_can_not_be_read_or_traced(provider: SandboxProvider) -> None:
    """What it knows and writes is out of the command's reach, so no result can be forged."""
    async with _opened(provider) as sandbox:
        for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd/1", "/proc/1/maps"):
            done = await _sh(sandbox, f"cat {path}; echo x > {path}")
            assert done.exit_code != 0 and done.stdout == b"", (path, done)


async def the_supervisor_can_not_be_starved(provider: SandboxProvider) -> None:
    """A command that could break it from afar could turn a failing grade into a dropped episode."""
    async with _opened(provider) as sandbox:
        victim = int((await _py(sandbox, "import os; print(os.getppid())")).stdout)
        for trick in _STARVING:
            done = await _py(sandbox, f"import os, resource\n{trick.format(victim)}")
            assert b"PermissionError" in done.stderr, (trick, done)
        # A signal by way of a pipe's owner is sent and reaches nobody.
        await _py(sandbox, _SIGNAL_OF_A_PIPE.format(victim))
        for number in range(8):
            await sandbox.write_file(f"file{number}", b"x" * 1_000_000)
        assert (await _py(sandbox, "print('on')")).stdout == b"on\n"


async def nothing_of_the_host_shines_through(provider: SandboxProvider) -> None:
    """No environment, no arguments, no home, no user but nobody, no engine's socket."""
    secret = "swordfish-of-the-host"
    os.environ["AGENTRL_TEST_SECRET"] = secret
    try:
        async with _opened(provider) as sandbox:
            seen = await _sh(
                sandbox, "env; cat /proc/*/environ /proc/*/cmdline; ls -a / /root /home"
            )
            assert secret.encode() not in seen.stdout + seen.stderr
            listing = await _sh(sandbox, "find / -name '*.sock' 2>/dev/null; id -u; id -G")
            assert listing.stdout == b"65534\n65534\n", listing
            caps = await _sh(
                sandbox, "grep -E 'CapEff|CapPrm|NoNewPrivs|Seccomp:' /proc/self/status"
            )
            zero = b"0000000000000000"
            for line in (
                b"CapPrm:\t" + zero,
                b"CapEff:\t" + zero,
                b"NoNewPrivs:\t1",
                b"Seccomp:\t2",
            ):
                assert line in caps.stdout, caps
    finally:
        del os.environ["AGENTRL_TEST_SECRET"]


async def the_file_api_stays_in_the_workspace(provider: SandboxProvider) -> None:
    """Regular files alone: no link, no fifo, no `..`, no folder, nothing too large."""
    async with _opened(provider) as sandbox:
        await _sh(
            sandbox, "ln -s /usr/bin/python3 link; ln -s / out; mkfifo fifo; chmod 0 in/a.txt"
        )
        for path in ("../x", "a/../../x", "/proc/1/environ", "link", "fifo", "in", "", "a\0b"):
            for bad in (path, f"out/{path}"):
                await _refused(sandbox.read_file(bad, max_bytes=1 << 20), bad)
        for bad in ("out/usr/x", "../x", "in", "link", "fifo", "\ud800"):
            await _refused(sandbox.write_file(bad, b""), bad)
        await sandbox.write_file("large", b"x" * 100)
        await _refused(sandbox.read_file("large", max_bytes=99), "large")
        await _refused(sandbox.write_file("full", b"x" * ((SPEC.workspace_mb << 20) + 1)), "full")
        assert await sandbox.read_file("large", max_bytes=100) == b"x" * 100


async def a_snapshot_starts_another(provider: SandboxProvider) -> None:
    """Files, folders and permissions come back; equal workspaces have equal snapshots."""
    async with _opened(provider) as sandbox:
        made = await _sh(
            sandbox,
            "mkdir -p empty deep/er; echo é > 'deep/er/é x'; printf '#!/bin/sh\necho runs' > run;"
            "chmod 755 run; chmod 500 deep/er; chmod 600 in/a.txt; ln -s /usr link; mkfifo pipe;"
            "head -c 3000000 /dev/zero > big",
        )
        assert made.exit_code == 0, made
        taken = await sandbox.snapshot(max_bytes=8 << 20)
        assert await sandbox.snapshot(max_bytes=8 << 20) == taken
        await _refused(sandbox.snapshot(max_bytes=1000), "a small snapshot")
        held = {entry.path: (entry.mode, entry.data) for entry in unpack(taken)}
        assert held["in/a.txt"] == (0o600, b"\xff\x00hello"), held["in/a.txt"]
        assert set(held) == {
            "big",
            "deep",
            "deep/er",
            "deep/er/é x",
            "empty",
            "in",
            "in/a.txt",
            "run",
        }
        await _sh(sandbox, "echo changed > run")
    spec = replace(SPEC, files={"more": b"+"}, snapshot=taken)
    async with provider.session(spec) as one, provider.session(spec) as other:
        for sandbox in (one, other):
            done = await _sh(
                sandbox, "./run; cat 'deep/er/é x' more; stat -c %a deep/er in/a.txt; ls"
            )
            assert done.stdout == (
                "runs\né\n+500\n600\nbig\ndeep\nempty\nin\nmore\nrun\n".encode()
            ), done
        await _sh(one, "rm more")
        assert await one.snapshot(max_bytes=8 << 20) == taken
        assert await other.snapshot(max_bytes=8 << 20) != taken


async def a_snapshot_says_what_it_can_not_hold(provider: SandboxProvider) -> None:
    """What can't be read or told is an error that the agent has made; the session goes on."""
    async with _opened(provider) as sandbox:
        for harm, mend in (
            ("chmod 0 in/a.txt", "chmod 600 in/a.txt"),
            ("mkdir shut; chmod 0 shut", "rmdir shut"),
            ("cd in; for n in $(seq 21000); do : > $n; done", "rm in/[0-9]*"),
            ("printf x > \"$(printf '\\377')\"", "rm -f ?"),
        ):
            await _sh(sandbox, harm)
            await _refused(sandbox.snapshot(max_bytes=1 << 20), harm)
            await _sh(sandbox, f"{mend} || find in -name '[0-9]*' -delete")
            assert (await _sh(sandbox, "echo on")).stdout == b"on\n"
        assert await sandbox.snapshot(max_bytes=1 << 20)
    try:
        async with provider.session(replace(SPEC, snapshot=b"no tar")):
            raise AssertionError("it must not open")
    except ConfigError:
        return


async def sandboxes_share_nothing(provider: SandboxProvider) -> None:
    """Each starts empty, whatever others leave and while they live."""
    async with _opened(provider) as sandbox:
        await _sh(sandbox, "echo x > /tmp/left; echo x > left; echo x > /dev/shm/left; sleep 0")
        async with _opened(provider) as other:
            seen = (await _sh(other, "ls -A /tmp /workspace /dev/shm")).stdout
            assert b"left" not in seen, seen


async def a_call_that_is_given_up_ends_the_channel(provider: SandboxProvider) -> None:
    """Half an answer is never taken for the next one."""
    async with _opened(provider) as sandbox:
        with suppress(TimeoutError):
            await asyncio.wait_for(_sh(sandbox, "sleep 60", 60), 0.3)
        try:
            await _sh(sandbox, "echo late")
        except (SandboxFault, SandboxLost):
            return
        raise AssertionError("the sandbox was used again")


async def many_at_once_and_nothing_left(provider: SandboxProvider) -> None:
    """Each of 24 gets its own; the host's open files are as many as before."""

    async def one(number: int) -> bytes:
        async with provider.session(SandboxSpec()) as sandbox:
            return (await _sh(sandbox, f"echo {number}", 30)).stdout

    await asyncio.gather(*(one(number) for number in range(12)))  # connections that are kept
    before = len(os.listdir("/proc/self/fd"))
    said = await asyncio.gather(*(one(number) for number in range(24)))
    assert said == [f"{number}\n".encode() for number in range(24)]
    assert len(os.listdir("/proc/self/fd")) <= before + 8


SANDBOX_CHECKS: tuple[SandboxCheck, ...] = (
    a_timeout_keeps_the_output_and_the_session,
    nothing_outlives_its_call,
    each_call_gives_its_own_output,
    a_fork_bomb_is_contained,
    memory_runs_out_inside,
    a_flood_is_cut_and_counted,
    the_disk_is_small_and_the_rest_read_only,
    bytes_that_are_no_text_pass_through,
    stdin_is_given_and_then_ends,
    a_command_that_is_not_there_is_a_result,
    no_network_and_no_rare_sockets,
    the_kernels_rare_doors_are_shut,
    real_programs_run,
    the_supervisor_can_not_be_read_or_traced,
    the_supervisor_can_not_be_starved,
    nothing_of_the_host_shines_through,
    the_file_api_stays_in_the_workspace,
    a_snapshot_starts_another,
    a_snapshot_says_what_it_can_not_hold,
    sandboxes_share_nothing,
    a_call_that_is_given_up_ends_the_channel,
    many_at_once_and_nothing_left,
)

_SYSCALLS = {  # x86-64 numbers
    "ptrace": 101, "mount": 165, "unshare": 272, "keyctl": 250, "bpf": 321, "userfaultfd": 323,
    "io_uring_setup": 425, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310,
    "kexec_load": 246, "init_module": 175, "open_by_handle_at": 304, "pidfd_getfd": 438,
    "chroot": 161, "pivot_root": 155, "syslog": 103, "add_key": 248, "personality": 135,
    "fsopen": 430, "move_mount": 429, "quotactl": 179, "swapon": 167, "reboot": 169,
}  # fmt: skip

_STARVING = (
    "resource.prlimit({}, resource.RLIMIT_AS, (1 << 20, 1 << 20))",
    "resource.prlimit({}, resource.RLIMIT_NOFILE, (0, 0))",
    "os.setpriority(os.PRIO_PROCESS, {}, 19)",
    "os.setpriority(os.PRIO_USER, 0, 19)",
    "os.sched_setscheduler({}, os.SCHED_IDLE, os.sched_param(0))",
    "os.sched_setaffinity({}, {{0}})",
)
_SIGNAL_OF_A_PIPE = (
    "import fcntl, os\nr, w = os.pipe()\n"
    "fcntl.fcntl(r, fcntl.F_SETOWN, {}); fcntl.fcntl(r, 10, 9)\n"  # F_SETSIG
    "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')"
)


@asynccontextmanager
async def _opened(provider: SandboxProvider) -> AsyncGenerator[Sandbox]:
    async with provider.session(SPEC) as sandbox:
        yield sandbox


async def _sh(sandbox: Sandbox, script: str, timeout_s: float = 15) -> ExecResult:
    return await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)


async def _py(sandbox: Sandbox, code: str, timeout_s: float = 15) -> ExecResult:
    return await sandbox.exec(["python3", "-I", "-S", "-c", code], timeout_s=timeout_s)


async def _is_alone(sandbox: Sandbox) -> None:
    """Only the supervisor and the process that counts are there, and neither is a zombie."""
    done = await _py(sandbox, "import os; print(*(e for e in os.listdir('/proc') if e.isdigit()))")
    assert len(done.stdout.split()) == 2, done


async def _refused(call: Awaitable[object], what: str) -> None:
    try:
        await asyncio.wait_for(call, 20)
    except ToolError:
        return
    raise AssertionError(f"{what!r} was not refused")
