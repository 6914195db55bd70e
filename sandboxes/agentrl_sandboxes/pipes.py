"""A supervisor that is a process of this machine: how it starts, is spoken to and ends."""

import asyncio
import os
import signal
from contextlib import suppress

from agentrl.errors import SandboxFault, SandboxLost


class Pipes:
    """The supervisor's streams as pipes of its process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None, "started with pipes"
        self._writer, self._reader = process.stdin, process.stdout
        self.lost: SandboxLost | None = None
        """What the agent has done, if it was that which ended the streams."""

    async def send(self, data: bytes) -> None:
        """Write all of it."""
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self, size: int) -> bytes:
        """Exactly `size` bytes."""
        return await self._reader.readexactly(size)

    async def why_lost(self) -> SandboxFault | SandboxLost:
        """By default a fault: nothing inside can end the supervisor, so it was not the agent."""
        return self.lost or SandboxFault("the sandbox's supervisor is gone")


async def started(
    starting: "asyncio.Task[asyncio.subprocess.Process]",
) -> asyncio.subprocess.Process:
    """The process; if this is cancelled, it is ended as soon as it is there, and with its child."""
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(end_process(await starting))
        raise


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Kill its group, close its pipes, wait until it is gone."""
    # In its first moments bwrap has a child that does not die with it: at first one of its group,
    # then, until the kernel is told, one of a group of its own, which ends with its input.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdin is not None, "started with pipes"
    if not process.stdin.is_closing():  # it is, once the other end is gone
        process.stdin.transport.abort()
    await process.wait()
    process._transport.close()  # type: ignore[attr-defined]  # its pipes, at once
