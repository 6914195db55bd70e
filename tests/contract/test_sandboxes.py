"""Every backend holds the sandbox contract; and what each promises beyond it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentrl_sandboxes.bwrap import BwrapProvider
from agentrl_sandboxes.docker import DEADLINE, OWNER, RUN, DockerProvider
from agentrl_sandboxes.images import build_image
from agentrl_sandboxes.owner import is_gone, this_process
from sandbox_cases import needs_docker

from agentrl.errors import ConfigError, SandboxFault
from agentrl.protocols import SandboxProvider
from agentrl.testing.sandbox import SANDBOX_CHECKS, SandboxCheck
from agentrl.types import SandboxSpec

START_DOCKER = Path(__file__).parents[2] / "scripts" / "start-docker"
STARTED_HERE = Path("/var/log/agentrl-dockerd.log")


BACKENDS = [
    pytest.param(BwrapProvider, id="bwrap"),
    pytest.param(DockerProvider, id="docker", marks=needs_docker),
]
Make = Callable[[], SandboxProvider]


@pytest.mark.parametrize("check", SANDBOX_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", BACKENDS)
async def test_the_contract(make: Make, check: SandboxCheck) -> None:
    await check(make())


@pytest.mark.parametrize("make", BACKENDS)
async def test_egress_is_refused_rather_than_ignored(make: Make) -> None:
    with pytest.raises(ConfigError, match="egress"):
        async with make().session(SandboxSpec(egress=("example.org",))):
            raise AssertionError("must not open")


@pytest.mark.parametrize("make", [BwrapProvider])
async def test_an_opening_that_is_cancelled_ends_at_once_and_leaves_no_process(make: Make) -> None:
    """Ctrl-C comes at any moment of an opening: before the process is there, or as it sets up."""
    provider = make()

    async def cancelled_after(delay_s: float) -> None:
        async def hold() -> None:
            async with provider.session(SandboxSpec()):
                await asyncio.sleep(60)

        opening = asyncio.create_task(hold())
        await asyncio.sleep(delay_s)
        opening.cancel()
        _, late = await asyncio.wait({opening}, timeout=20)
        assert not late, f"cancelled after {delay_s} s, it is still not closed"

    for number in range(12):
        await asyncio.gather(*(cancelled_after((number + n / 8) / 100) for n in range(8)))
    alive = subprocess.run(["ps", "-eo", "ppid,stat,args"], capture_output=True, text=True).stdout
    left = [line.split(None, 2) for line in alive.splitlines() if BWRAP_ARGS in line]
    parents = ("1", str(os.getpid()))
    assert [row for row in left if row[1][0] != "Z" and row[0] in parents] == []


BWRAP_ARGS = "--die-with-parent --new-session --as-pid-1"


def containers() -> list[str]:
    made = ["docker", "ps", "-aq", "--filter", f"label={OWNER}"]
    return subprocess.run(made, capture_output=True, text=True).stdout.split()


# ---------------------------------------------------------------- docker


@needs_docker
async def test_a_container_is_as_hard_as_it_says() -> None:
    """The configuration matters more than any escape: this is what the engine was told."""
    provider = DockerProvider()
    spec = SandboxSpec(memory_mb=200, cpus=0.5, processes=30)
    async with provider.session(spec):
        (container,) = containers()
        inspect = subprocess.run(["docker", "inspect", container], capture_output=True)
        (seen,) = json.loads(inspect.stdout)
    host, config = seen["HostConfig"], seen["Config"]
    wanted: dict[str, Any] = {
        "NetworkMode": "none", "Privileged": False, "ReadonlyRootfs": True, "Binds": None,
        "CapDrop": ["ALL"], "Memory": 200 << 20, "MemorySwap": 200 << 20, "NanoCpus": 5 * 10**8,
        "PidMode": "", "UsernsMode": "", "AutoRemove": True, "PublishAllPorts": False,
    }  # fmt: skip
    assert {name: host[name] for name in wanted} == wanted
    assert set(host["CapAdd"]) == {"SETUID", "SETGID", "KILL"}
    assert host["PidsLimit"] <= 40 and host["Devices"] in (None, [])
    assert seen["Mounts"] == [] and host["LogConfig"]["Type"] == "none"
    assert any(option.startswith("seccomp={") for option in host["SecurityOpt"])
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert {variable.partition("=")[0] for variable in config["Env"]} <= {"HOME", "LANG", "PATH"}
    assert config["Image"].startswith("sha256:"), "what runs is known by its content"


@needs_docker
async def test_memory_is_that_of_the_whole_tree() -> None:
    """Eight processes of 50 MB each fit one by one, but not together."""
    hog = (
        "import os, time\n"
        "for _ in range(7):\n"
        "  if os.fork() == 0: break\n"
        "x = bytearray(50 << 20); x[::4096] = b'1' * len(x[::4096]); time.sleep(1)"
    )
    async with DockerProvider().session(SandboxSpec(memory_mb=200)) as sandbox:
        done = await sandbox.exec(["python3", "-c", hog], timeout_s=10)
        assert done.out_of_memory
        assert (await sandbox.exec(["echo", "on"], timeout_s=5)).stdout == b"on\n"


@needs_docker
async def test_prune_takes_what_a_dead_owner_left_and_nothing_else() -> None:
    provider = DockerProvider()
    image = build_image(provider._client, "python").digest
    dead = subprocess.Popen(["true"])
    owner = this_process().replace(f":{os.getpid()}:", f":{dead.pid}:")
    dead.wait()
    assert is_gone(owner) and not is_gone(this_process()) and not is_gone("elsewhere:1:2")
    for labels in (
        {OWNER: owner, RUN: "dead run"},
        {OWNER: "another machine:1:2", DEADLINE: str(int(time.time()) - 1)},
        {OWNER: "another machine:1:2", DEADLINE: str(int(time.time()) + 60)},
    ):
        words = [word for label in labels.items() for word in ("--label", "=".join(label))]
        subprocess.run(["docker", "create", *words, image, "true"], check=True, capture_output=True)
    async with provider.session(SandboxSpec()) as sandbox:
        assert await provider.prune("another run") == 0
        assert await provider.prune("dead run") == 1
        assert await provider.prune("") == 1
        assert (await sandbox.exec(["echo", "mine"], timeout_s=5)).stdout == b"mine\n"
    (of_another,) = containers()
    subprocess.run(["docker", "rm", of_another], check=True, capture_output=True)


@needs_docker
async def test_an_image_that_nobody_has_is_named() -> None:
    with pytest.raises(ConfigError, match="no-such-image"):
        async with DockerProvider().session(SandboxSpec(image="no-such-image:1")):
            raise AssertionError("must not open")


DOOMED = """
import asyncio, sys
from agentrl.plugins import open_sandboxes
from agentrl.types import SandboxSpec
async def main():
    async with open_sandboxes("docker", run_id="of a dead owner").session(SandboxSpec()) as sandbox:
        print("up", flush=True)
        await sandbox.exec(["sleep", "98765"], timeout_s=9999)
asyncio.run(main())
"""


@pytest.mark.skipif(not STARTED_HERE.exists(), reason="the engine is not this test's to kill")
@needs_docker
async def test_an_engine_that_is_killed_is_a_fault_and_the_next_one_serves() -> None:
    """What it left of an owner that was killed with it goes at the next run's start."""
    provider = DockerProvider()
    owner = subprocess.Popen([sys.executable, "-c", DOOMED], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
    engine = int(Path("/var/run/docker.pid").read_text())
    with pytest.raises(SandboxFault):
        async with provider.session(SandboxSpec()) as sandbox:
            call = asyncio.ensure_future(sandbox.exec(["sleep", "60"], timeout_s=60))
            await asyncio.sleep(0.5)
            os.kill(engine, signal.SIGKILL)
            owner.kill()
            await call
    await asyncio.to_thread(subprocess.run, [str(START_DOCKER)], check=True)
    for _ in range(2):  # the client may still hold a connection to the old one
        try:
            async with provider.session(SandboxSpec()) as sandbox:
                done = await sandbox.exec(["echo", "back"], timeout_s=9)
            break
        except SandboxFault:
            continue
    assert done.stdout == b"back\n"
    owner.wait()
    owner.stdout.close()
    await provider.prune("")
    assert containers() == []
    seen = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "sleep 98765" not in seen.splitlines()


PROGRAMS = {
    "git": "git init -q . && git -c user.name=a -c user.email=b commit -q --allow-empty -m x && git log --format=%s && python3 -m pytest --version",  # noqa: E501
    "python-tests": "printf 'def test(): assert 1' > test_x.py && python3 -m pytest -q -p no:cacheprovider",  # noqa: E501
    "sqlite": "sqlite3 x.db 'select 6*7'",
}


@needs_docker
@pytest.mark.parametrize("image", PROGRAMS)
async def test_the_programs_of_an_image_run_under_all_limits(image: str) -> None:
    async with DockerProvider().session(SandboxSpec(image=image)) as sandbox:
        done = await sandbox.exec(["sh", "-c", PROGRAMS[image]], timeout_s=60)
        assert done.exit_code == 0, done.stderr.decode()
        assert done.stdout.strip()
