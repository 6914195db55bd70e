"""Programs that mean harm, and steps at random: in every backend the session answers afterwards."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox_cases import EVERY

from agentrl.errors import ToolError
from agentrl.protocols import Sandbox, SandboxProvider
from agentrl.types import ExecResult, SandboxSpec

Make = Callable[[], SandboxProvider]
SPEC = SandboxSpec(memory_mb=256)


def tries(*statements: str) -> str:
    """A program that prints the error number of each, or `done`."""
    body = "".join(
        f"try:\n {statement}\n print('done')\nexcept OSError as e: print(e.errno)\n"
        for statement in statements
    )
    return f"import fcntl, os, socket, stat\n{body}"


REFUSED = {
    "device nodes": tries(
        "os.mknod('memory', stat.S_IFCHR | 0o666, os.makedev(1, 1))",
        "os.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(8, 0))",
        "open('/dev/mem')",
        "open('/dev/kmsg')",
        "open('/dev/sda')",
    ),
    "the kernel's switches": tries(
        "open('/proc/sys/kernel/core_pattern', 'w')",
        "open('/proc/sysrq-trigger', 'w')",
        "open('/proc/kcore', 'rb')",
        "open('/proc/kmsg')",
        "open('/sys/kernel/uevent_helper', 'w')",
        "open('/sys/fs/cgroup/cgroup.procs', 'w')",
        "open('/sys/fs/cgroup/release_agent', 'w')",
    ),
    "hard links to what is not its own": tries(
        "os.link('/usr/bin/python3', 'python')",
        "os.link('/proc/1/environ', 'environ')",
        "os.link('/etc/shadow', 'shadow')",
    ),
    "another user": tries("os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.chroot('.')"),
    "the supervisor's streams": tries(
        "open(f'/proc/{os.getppid()}/fd/0')",
        "open(f'/proc/{os.getppid()}/fd/1', 'w')",
        "open(f'/proc/{os.getppid()}/mem', 'r+b')",
        "open(f'/proc/{os.getppid()}/oom_score_adj', 'w')",
        "os.listdir(f'/proc/{os.getppid()}/fd')",
    ),
}
SPENT = {
    "zombies": (
        "import os\nwhile True:\n try:\n  if os.fork() == 0: os._exit(0)\n except OSError: break"
    ),
    "pipes full of data": (
        "import os\nwhile True:\n try: r, w = os.pipe()\n except OSError: break\n"
        " os.set_blocking(w, False)\n os.write(w, b'x' * 65536)"
    ),
    "memory files": (
        "import os\nfor n in range(9):\n f = os.memfd_create('x')\n"
        " try:\n  while True: os.write(f, b'x' * 1000000)\n except OSError: pass\n"
        " os.close(f)"
    ),
    "a tree too deep": "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')",
    "a stopped self": "import os; os.kill(os.getpid(), 19)",
    "closed streams": "import os, time\nfor n in range(3): os.close(n)\ntime.sleep(0.2)",
    "threads": (
        "import threading, time\nwhile True:\n"
        " try: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        " except RuntimeError: break"
    ),
    "every descriptor": "import os\nwhile True:\n try: os.dup(1)\n except OSError: break",
    "two floods at once": (
        "import os, threading\ndef flood(n):\n while True: os.write(n, b'x' * 65536)\n"
        "for n in (1, 2): threading.Thread(target=flood, args=(n,)).start()"
    ),
}


async def py(sandbox: Sandbox, code: str, timeout_s: float = 10) -> ExecResult:
    return await sandbox.exec(["python3", "-I", "-S", "-c", code], timeout_s=timeout_s)


async def answers(sandbox: Sandbox) -> None:
    assert (await py(sandbox, "print('on')")).stdout == b"on\n"
    await sandbox.write_file("after", b"x" * 1_000_000)
    assert await sandbox.read_file("after", max_bytes=1_000_000) == b"x" * 1_000_000


@pytest.mark.parametrize("make", EVERY)
async def test_what_is_not_a_programs_own_is_refused(make: Make) -> None:
    async with make().session(SPEC) as sandbox:
        for what, code in REFUSED.items():
            done = await py(sandbox, code)
            said = done.stdout.split()
            assert len(said) == code.count("try:") and b"done" not in said, (what, done)
        await answers(sandbox)


@pytest.mark.parametrize("make", EVERY)
async def test_what_it_may_spend_is_its_own_loss(make: Make) -> None:
    """Whatever it uses up, the next command has all of it again."""
    async with make().session(SPEC) as sandbox:
        for what, code in SPENT.items():
            await py(sandbox, code, timeout_s=1)
            try:
                await answers(sandbox)
            except (AssertionError, ToolError) as error:
                raise AssertionError(what) from error


@pytest.mark.parametrize("make", EVERY)
async def test_links_of_every_kind_lead_nowhere(make: Make) -> None:
    """No command runs while files move, so there is no race; what lies there has to deceive."""
    async with make().session(SPEC) as sandbox:
        done = await py(
            sandbox,
            "import os\nos.mkdir('real')\nwith open('real/x', 'w') as file: file.write('mine')\n"
            "os.symlink('real', 'folder'); os.symlink('real/x', 'file')\n"
            "os.symlink('file', 'file2'); os.symlink('loop', 'loop')\n"
            "os.link('real/x', 'hard'); os.mkfifo('fifo')",
        )
        assert done.exit_code == 0, done
        for path in ("folder/x", "file", "file2", "loop", "loop/x", "fifo", "real"):
            with pytest.raises(ToolError):
                await sandbox.read_file(path, max_bytes=99)
            with pytest.raises(ToolError):
                await sandbox.write_file(path, b"forged")
        assert await sandbox.read_file("hard", max_bytes=99) == b"mine"
        assert await sandbox.read_file("./real/./x", max_bytes=99) == b"mine"


@pytest.mark.parametrize("make", EVERY)
async def test_64_at_once(make: Make) -> None:
    """All are open together, each answers for itself; the host has as many open files as before."""
    provider, many = make(), 64
    all_open = asyncio.Barrier(many)

    async def one(number: int) -> bytes:
        async with provider.session(SPEC) as sandbox:
            await all_open.wait()
            return (await py(sandbox, f"print({number})", timeout_s=60)).stdout

    async def opened() -> None:
        async with provider.session(SPEC):
            pass

    await asyncio.gather(*(opened() for _ in range(12)))  # connections that are kept
    before = len(os.listdir("/proc/self/fd"))
    said = await asyncio.gather(*(one(number) for number in range(many)))
    assert said == [f"{number}\n".encode() for number in range(many)]
    assert len(os.listdir("/proc/self/fd")) <= before + 8


COMMAND = "sh -c python3 cat ls rm -rf / . .. /proc/self/mem kill -9 -1 1 ln -s a b mkdir mv yes"
WORDS = st.sampled_from(COMMAND.split())
PATHS = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from(["a", "b", "..", ".", "", "é"]), max_size=4).map("/".join),
)
STEPS = st.one_of(
    st.tuples(st.just("exec"), st.lists(st.one_of(WORDS, st.text(max_size=8)), max_size=5)),
    st.tuples(st.just("read"), PATHS),
    st.tuples(st.just("write"), PATHS, st.binary(max_size=200)),
)


async def do(sandbox: Sandbox, step: tuple[object, ...]) -> None:
    """One step. All that it may raise is a ToolError; what was written is read back."""
    try:
        match step:
            case ("exec", argv):
                done = await sandbox.exec(argv, stdin=b"x", timeout_s=0.3)  # type: ignore[arg-type]
                assert done.timed_out == (done.exit_code is None)
                assert len(done.stdout) <= min(done.stdout_bytes, SPEC.max_output_bytes)
            case ("read", path):
                assert len(await sandbox.read_file(str(path), max_bytes=100)) <= 100
            case ("write", path, bytes(data)):
                await sandbox.write_file(str(path), data)
                assert await sandbox.read_file(str(path), max_bytes=200) == data
            case _:
                raise AssertionError(step)
    except ToolError:
        return


@pytest.mark.parametrize("make", EVERY)
def test_steps_at_random_leave_a_sandbox_that_answers(make: Make, tmp_path: Path) -> None:
    host = tmp_path / "of-the-host"
    host.write_text("kept")

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(STEPS, min_size=1, max_size=8))
    def at_random(steps: list[tuple[object, ...]]) -> None:
        async def play() -> None:
            async with make().session(SPEC) as sandbox:
                for step in steps:
                    await do(sandbox, step)
                done = await py(sandbox, "print('on')")
                assert done.stdout == b"on\n" or b"/workspace" in done.stderr, done

        asyncio.run(play())

    at_random()
    assert host.read_text() == "kept"
