"""Docker sandboxes: a hardened container whose PID 1 is the supervisor, spoken to over its stdin.

No port, no network, no `docker exec`: one attached stream a container. A container ends when its
stdin does, so nothing outlives a killed owner. Limits are the engine's control groups: memory and
processes are those of the whole tree.
"""

import asyncio
import os
import struct
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from agentrl.errors import ConfigError, SandboxFault, SandboxLost
from agentrl.protocols import Isolation
from agentrl.types import SandboxSpec
from agentrl_sandboxes.channel import NOBODY, SUPERVISOR, SupervisedSandbox, rlimits
from agentrl_sandboxes.images import build_image, find_image, tag_of
from agentrl_sandboxes.owner import is_gone, this_process
from agentrl_sandboxes.seccomp import docker_profile

T = TypeVar("T")

RUN, OWNER, DEADLINE = "agentrl.run", "agentrl.owner", "agentrl.deadline"
"""Labels: the run that a container belongs to, the process that owns it, the end of its lease."""
ENGINE_TIMEOUT_S = 60
_SPARE_PROCESSES = 4
_SHM = 16 << 20
_FILES = 65_536
"""In /workspace, and in /tmp: an empty file costs memory, too."""
_STDOUT = 1


class DockerProvider:
    """Opens containers. Raises ConfigError where no engine answers.

    `runtime` names another OCI runtime of the engine, such as `runsc`. A built-in image that is
    missing is built at its first use. A container older than `lease_s` seconds may be pruned,
    whoever owns it: whether a process of another machine is alive can't be seen.
    """

    isolation: Isolation = "container"

    def __init__(
        self, *, runtime: str | None = None, run_id: str = "", lease_s: int = 86_400
    ) -> None:
        self._calls = ThreadPoolExecutor(2 * (os.cpu_count() or 1), "docker")
        self._client = connect()
        self._runtime, self._run_id, self._lease_s = runtime, run_id, lease_s
        self._images = asyncio.Lock()

    @asynccontextmanager
    async def session(self, spec: SandboxSpec) -> AsyncGenerator[SupervisedSandbox]:
        """A fresh container; when the block ends it is removed."""
        if spec.egress:
            raise ConfigError("docker sandboxes have no network: leave SandboxSpec.egress empty")
        image = await self._image(spec.image)
        container = await self._call(lambda: self._create(spec, image))
        streams: _Attached | None = None
        try:
            streams = await self._attach(container)
            sandbox = SupervisedSandbox(streams, spec, rlimits(spec))
            await sandbox.begin()
            yield sandbox
        finally:
            if streams is not None:
                streams.close()
            await asyncio.shield(self._call(lambda: self._remove(container)))

    async def prune(self, run_id: str) -> int:
        """Remove containers whose owner or lease is gone: of this run, or of any with ""."""
        return await self._call(lambda: self._prune(run_id))

    def describe(self) -> Mapping[str, str]:
        """The engine's version, the runtime, and the digest of the default image if it is there."""
        version = self._client.version()
        found = find_image(self._client, "python")
        return {
            "backend": "docker",
            "engine": f"docker {version['Version']}",
            "runtime": self._runtime or "default",
            **({"image": f"{found.tag}@{found.digest}"} if found else {}),
        }

    async def _call(self, work: Callable[[], T]) -> T:
        """One request to the engine, in a thread: few at once, since more only lengthen its queue.

        Raises SandboxFault when the engine fails, ConfigError stays.
        """
        import docker.errors
        import requests

        try:
            return await asyncio.get_running_loop().run_in_executor(self._calls, work)
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise SandboxFault(f"docker: {' '.join(str(error).split())[:300]}") from error

    async def _image(self, name: str) -> str:
        found = await self._call(lambda: find_image(self._client, name))
        if found is None:
            if tag_of(name) == name:
                raise ConfigError(
                    f"SandboxSpec.image {name}: the engine has no such image; pull it"
                )
            async with self._images:  # one build, however many wait for it
                found = await self._call(lambda: build_image(self._client, name))
        return found.digest

    def _create(self, spec: SandboxSpec, image: str) -> str:
        api = self._client.api
        memory = spec.memory_mb << 20
        tmp = f"rw,exec,nosuid,nodev,mode=1777,size={spec.workspace_mb << 20},nr_inodes={_FILES}"
        extra = {"runtime": self._runtime} if self._runtime else {}
        host = api.create_host_config(
            network_mode="none",
            read_only=True,
            tmpfs={"/tmp": tmp, "/workspace": f"{tmp},uid={NOBODY},gid={NOBODY}"},
            shm_size=_SHM,
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=int(spec.cpus * 1e9),
            pids_limit=spec.processes + _SPARE_PROCESSES,
            cap_drop=["ALL"],
            # Of the supervisor alone: to make commands nobody's, and to end all of them.
            cap_add=["SETUID", "SETGID", "KILL"],
            security_opt=["no-new-privileges:true", f"seccomp={docker_profile()}"],
            log_config={"type": "none"},
            auto_remove=True,
            init=False,
            **extra,
        )
        made = api.create_container(
            image=image,
            entrypoint=["python3"],
            command=["-I", "-S", "-u", "-c", SUPERVISOR],
            user="0:0",
            working_dir="/workspace",
            hostname="sandbox",
            environment={"HOME": "/workspace", "LANG": "C.UTF-8"},
            stdin_open=True,
            detach=False,
            network_disabled=True,
            labels={
                RUN: self._run_id,
                OWNER: this_process(),
                DEADLINE: str(int(time.time()) + self._lease_s),
            },
            host_config=host,
            use_config_proxy=False,
        )
        return str(made["Id"])

    async def _attach(self, container: str) -> "_Attached":
        """Attach first, then start: nothing that it says is missed."""
        api = self._client.api
        params = {"stdin": 1, "stdout": 1, "stderr": 0, "stream": 1}
        attached = await self._call(lambda: api.attach_socket(container, params=params))
        streams = _Attached(attached, lambda: self._ending(container))
        try:
            await self._call(lambda: api.start(container))
            await streams.open()
        except BaseException:
            streams.close()
            raise
        return streams

    async def _ending(self, container: str) -> SandboxFault | SandboxLost:
        """Why a container's stream has ended: the agent's memory, or the engine."""
        import docker.errors

        def look() -> Mapping[str, Any]:
            try:
                return self._client.api.inspect_container(container)["State"]
            except docker.errors.NotFound:
                return {}

        try:
            state = await self._call(look)
        except SandboxFault as fault:
            return fault
        if state.get("OOMKilled"):
            return SandboxLost("the sandbox ran out of memory as a whole")
        return SandboxFault("the container is gone, or its engine was restarted")

    def _remove(self, container: str) -> None:
        import docker.errors

        try:
            self._client.api.remove_container(container, force=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            if error.status_code != 409:  # it is being removed already
                raise
            with suppress(docker.errors.NotFound):
                self._client.api.wait(container, condition="removed", timeout=ENGINE_TIMEOUT_S)

    def _prune(self, run_id: str) -> int:
        wanted = [OWNER, f"{RUN}={run_id}"] if run_id else [OWNER]
        found = self._client.api.containers(all=True, filters={"label": wanted})
        left = [c["Id"] for c in found if _is_left(c["Labels"])]
        for container in left:
            self._remove(container)
        return len(left)


def _is_left(labels: Mapping[str, str]) -> bool:
    deadline = labels.get(DEADLINE, "")
    return is_gone(labels[OWNER]) or (deadline.isdecimal() and int(deadline) < time.time())


class _Attached:
    """The supervisor's streams inside the engine's attach protocol: frames of 8 bytes and data."""

    def __init__(self, attached: Any, ending: Callable[[], Any]) -> None:
        self._attached = attached  # keeps the response, and with it the socket, alive
        self._socket = getattr(attached, "_sock", attached)
        self._ending = ending
        self._left = bytearray()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        self._socket.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)

    async def send(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self, size: int) -> bytes:
        assert self._reader is not None
        while len(self._left) < size:
            head = await self._reader.readexactly(8)
            stream, length = struct.unpack(">BxxxI", head)
            data = await self._reader.readexactly(length)
            if stream == _STDOUT:
                self._left += data
        data = bytes(self._left[:size])
        del self._left[:size]
        return data

    async def why_lost(self) -> SandboxFault | SandboxLost:
        return await self._ending()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        with suppress(OSError):
            self._attached.close()


def connect() -> Any:
    """A client of the engine that DOCKER_HOST names, or the local one. Raises ConfigError."""
    try:
        import docker
        import docker.errors
    except ImportError:
        raise ConfigError("docker sandboxes need the package docker: pip install docker") from None
    try:
        client = docker.from_env(timeout=ENGINE_TIMEOUT_S, max_pool_size=4 * (os.cpu_count() or 1))
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        raise ConfigError(
            f"no Docker engine answers ({' '.join(str(error).split())[:200]}): start it, or set "
            "sandbox.name to bwrap"
        ) from None
    return client
