"""How a backend talks to the supervisor inside: one request, one answer, over two byte streams.

A handle that has lost its place in the stream is never used again. Whether the loss is the
agent's doing (SandboxLost) or infrastructure's (SandboxFault) only the backend can know.
"""

import asyncio
import base64
import json
import struct
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Protocol

from agentrl.errors import ConfigError, SandboxFault, SandboxLost, ToolError
from agentrl.snapshot import Entry, pack, unpack
from agentrl.types import ExecResult, SandboxSpec

NOBODY = 65534
START_TIMEOUT_S = 20.0
GRACE_S = 10.0
"""How long past a command's own limit the supervisor may take to answer."""
MAX_ANSWER_BYTES = 64 << 20
MOST_FILES = 20_000
"""In a snapshot, folders too."""
FILE_MODE = 0o644
"""What a file has that was just written."""
PART_BYTES = 1 << 20
"""Files travel in parts: the supervisor's memory is the sandbox's own."""

SUPERVISOR = files("agentrl_sandboxes").joinpath("supervisor.py").read_text(encoding="utf-8")
"""What runs inside as PID 1, as source for `python3 -c`."""


class Streams(Protocol):
    """The supervisor's standard input and output."""

    async def send(self, data: bytes) -> None:
        """Write all of it. Raises OSError."""
        ...

    async def receive(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises OSError or EOFError."""
        ...

    async def why_lost(self) -> SandboxFault | SandboxLost:
        """What ended the streams."""
        ...


class SupervisedSandbox:
    """A handle on one sandbox: requests to its supervisor, one at a time."""

    def __init__(self, streams: Streams, spec: SandboxSpec, rlimits: Mapping[str, int]) -> None:
        self._streams, self._spec = streams, spec
        self._limits = {"output_bytes": spec.max_output_bytes, "rlimits": dict(rlimits)}
        self._turn = asyncio.Lock()
        self._broken: SandboxFault | SandboxLost | None = None

    async def begin(self) -> None:
        """Wait for the supervisor and lay down the spec's files. Raises SandboxFault, ToolError."""
        await self._request({"op": "ping"}, timeout_s=START_TIMEOUT_S)
        if self._spec.snapshot:
            await self._restore(self._spec.snapshot)
        for path, data in self._spec.files.items():
            await self.write_file(path, data)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command; everything it started ends with it. See `protocols.Sandbox`."""
        if user not in (None, "nobody"):
            raise ToolError(f"sandboxes run everything as nobody, not {user}")
        if any("\0" in word for word in argv) or not argv:
            raise ToolError("a command is at least one word, without NUL bytes")
        request = {
            "op": "exec",
            "argv": [word.encode(errors="replace").decode() for word in argv],
            "stdin": base64.b64encode(stdin).decode(),
            "timeout_s": timeout_s,
            "limits": self._limits,
        }
        answer = await self._request(request, timeout_s=timeout_s + GRACE_S)
        stderr = base64.b64decode(answer["stderr"])
        failed = answer["exit_code"] not in (0, None)
        return ExecResult(
            stdout=base64.b64decode(answer["stdout"]),
            stderr=stderr,
            exit_code=answer["exit_code"],
            seconds=answer["seconds"],
            stdout_bytes=answer["stdout_bytes"],
            stderr_bytes=answer["stderr_bytes"],
            timed_out=answer["timed_out"],
            out_of_memory=answer["oom_kills"] > 0 or (failed and b"MemoryError" in stderr[-200:]),
        )

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """A regular file of the workspace. Raises ToolError."""
        data = bytearray()
        while True:
            part = {"op": "read", "path": path, "offset": len(data), "size": PART_BYTES}
            answer = await self._file(part)
            size = answer["size"]
            if size > max_bytes:
                raise ToolError(f"{path}: its {size} bytes are more than {max_bytes}")
            data += base64.b64decode(answer["data"])
            if len(data) >= size or not answer["data"]:
                return bytes(data)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file of the workspace, with its folders. Raises ToolError."""
        if len(data) > self._spec.workspace_mb << 20:
            raise ToolError(f"{path}: the workspace holds {self._spec.workspace_mb} MB")
        for start in range(0, max(1, len(data)), PART_BYTES):
            part = base64.b64encode(data[start : start + PART_BYTES]).decode()
            await self._file({"op": "write", "path": path, "data": part, "append": start > 0})

    async def snapshot(self, *, max_bytes: int) -> bytes:
        """The workspace's regular files and folders, packed by the host. Raises ToolError."""
        answer = await self._file({"op": "list", "path": ".", "most": MOST_FILES})
        listed: list[tuple[str, int, int | None]] = answer["files"]
        total = sum(size or 0 for _, _, size in listed)
        if total > max_bytes:
            raise ToolError(f"the workspace's {total} bytes are more than {max_bytes}")
        entries: list[Entry] = []
        for path, mode, size in listed:
            data = None if size is None else await self.read_file(path, max_bytes=size)
            entries.append(Entry(path=path, mode=mode, data=data))
        return pack(entries)

    async def _restore(self, snapshot: bytes) -> None:
        """Lay down what it holds. Permissions come last, inner ones first: they may shut folders.

        Raises ToolError when it does not fit, ConfigError when it is none.
        """
        try:
            entries = unpack(snapshot)
        except ValueError as error:
            raise ConfigError(f"SandboxSpec.{error}") from None
        for entry in entries:
            if entry.data is not None:
                await self.write_file(entry.path, entry.data)
        for entry in reversed(entries):
            folder = entry.data is None
            if folder or entry.mode != FILE_MODE:
                mode = {"op": "mode", "path": entry.path, "mode": entry.mode, "folder": folder}
                await self._file(mode)

    async def _file(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "\0" in request["path"]:
            raise ToolError("a path has no NUL bytes")
        answer = await self._request(request, timeout_s=START_TIMEOUT_S)
        if "error" in answer:
            raise ToolError(f"{request['path']}: {answer['error']}")
        return answer

    async def _request(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """One question to the supervisor. Raises SandboxFault or SandboxLost without an answer."""
        async with self._turn:
            if self._broken is not None:
                raise self._broken
            # Unless the answer is read whole, the channel is out of step: never use it again.
            self._broken = SandboxFault("the sandbox was given up in the middle of a call")
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._exchange(request)
            except TimeoutError:
                self._broken = SandboxFault(f"the sandbox did not answer within {timeout_s:g} s")
                raise self._broken from None
            except (OSError, EOFError) as error:
                self._broken = await self._streams.why_lost()
                raise self._broken from error
            except ValueError as error:
                self._broken = SandboxFault(f"the sandbox's supervisor talks nonsense: {error}")
                raise self._broken from error
            self._broken = None
            return answer

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        payload = json.dumps(request).encode()
        await self._streams.send(struct.pack(">I", len(payload)) + payload)
        (size,) = struct.unpack(">I", await self._streams.receive(4))
        if size > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {size} bytes")
        return json.loads(await self._streams.receive(size))


def rlimits(spec: SandboxSpec) -> dict[str, int]:
    """The limits that every backend sets on each process, by name of the resource."""
    return {"RLIMIT_FSIZE": spec.max_file_mb << 20, "RLIMIT_NOFILE": 256, "RLIMIT_CORE": 0}
