"""An episode's sandbox: opened when it is first needed, closed when the episode ends."""

import asyncio
from collections.abc import Sequence

from agentrl.errors import SandboxFault
from agentrl.guard import blaming
from agentrl.protocols import Sandbox, SandboxProvider
from agentrl.types import ExecResult, SandboxSpec


class SandboxOnDemand:
    """A sandbox that costs nothing until it is used: many episodes never call a tool.

    One task enters and leaves the provider's session, however many tasks wait for it, so a tool
    that runs out of time does not break the opening for the next one. `exit_codes` has what each
    command came to, in order. Raises SandboxFault when the sandbox can't be opened or closed.
    """

    def __init__(self, provider: SandboxProvider, spec: SandboxSpec) -> None:
        self._provider, self._spec = provider, spec
        self.exit_codes: list[int | None] = []
        self._done = asyncio.Event()
        self._opened: asyncio.Future[Sandbox] | None = None
        self._holder: asyncio.Task[None] | None = None

    @property
    def opening(self) -> bool:
        """Whether somebody has asked for the sandbox and it is not there yet."""
        return self._opened is not None and not self._opened.done()

    def begin(self) -> "asyncio.Future[Sandbox]":
        """Start opening, unless somebody has; what comes of it."""
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._opened))
        return self._opened

    async def opened(self) -> Sandbox:
        """The sandbox itself."""
        return await asyncio.shield(self.begin())

    async def close(self) -> None:
        """Close what was opened, give up what is being opened."""
        if self._opened is None or self._holder is None:
            return
        self._done.set()
        if not self._opened.done():
            self._opened.cancel()
            self._holder.cancel()
        await asyncio.wait({self._holder})
        if not self._holder.cancelled():
            with blaming(SandboxFault, "closing the sandbox"):
                self._holder.result()

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        user: str | None = None,
    ) -> ExecResult:
        """See `protocols.Sandbox`."""
        sandbox = await self.opened()
        done = await sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s, user=user)
        self.exit_codes.append(done.exit_code)
        return done

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """See `protocols.Sandbox`."""
        return await (await self.opened()).read_file(path, max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        """See `protocols.Sandbox`."""
        await (await self.opened()).write_file(path, data)

    async def snapshot(self, *, max_bytes: int) -> bytes:
        """See `protocols.Sandbox`."""
        return await (await self.opened()).snapshot(max_bytes=max_bytes)

    async def _hold(self, opened: asyncio.Future[Sandbox]) -> None:
        try:
            with blaming(SandboxFault, "opening the sandbox"):
                session = self._provider.session(self._spec)
                sandbox = await session.__aenter__()
        except SandboxFault as fault:
            opened.set_exception(fault)
            opened.exception()  # seen: nobody may be waiting any more
            return
        if not opened.cancelled():
            opened.set_result(sandbox)
        try:
            await self._done.wait()
        finally:
            await session.__aexit__(None, None, None)
