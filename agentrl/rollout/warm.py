"""Sandboxes opened ahead of their use, so that an episode does not wait for one."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Self

from agentrl.errors import SandboxFault, SandboxLost, ToolError
from agentrl.protocols import Isolation, Sandbox, SandboxProvider
from agentrl.rollout.sandbox import SandboxOnDemand
from agentrl.types import SandboxSpec

_NOWHERE = ".agentrl-is-anybody-there"


class WarmSandboxes:
    """A SandboxProvider around another: the next `size` sandboxes are open before they are asked.

    Each is used once. They are of the kind that was asked for last, since the tasks of an
    environment seldom differ in it. Use it as a context: what nobody took is closed at its end.
    """

    def __init__(self, provider: SandboxProvider, *, size: int) -> None:
        self.isolation: Isolation = provider.isolation
        self._provider, self._size = provider, size
        self._spec: SandboxSpec | None = None
        self._ready: deque[SandboxOnDemand] = deque()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._spec = None
        self._drop_all()
        await asyncio.gather(*self._closing, return_exceptions=True)

    @asynccontextmanager
    async def session(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        """One that is ready, if there is one; else a fresh one."""
        held = await self._take(spec)
        try:
            yield await held.opened()
        finally:
            await held.close()

    def describe(self) -> Mapping[str, str]:
        """As the inner provider, and how many are kept ready."""
        return {**self._provider.describe(), "warm": str(self._size)}

    async def prune(self, run_id: str) -> int:
        """As the inner provider."""
        return await self._provider.prune(run_id)

    async def _take(self, spec: SandboxSpec) -> SandboxOnDemand:
        if spec != self._spec:
            self._drop_all()
            self._spec = spec
        # No more than were ready: where all are dead, the fresh one tells why.
        for _ in range(len(self._ready)):
            if spec != self._spec or not self._ready:  # others have asked meanwhile
                break
            held = self._ready.popleft()
            if await _answers(held):
                self._refill()
                return held
            self._drop(held)
        self._refill()
        return SandboxOnDemand(self._provider, spec)

    def _refill(self) -> None:
        if self._spec is None:
            return
        while len(self._ready) < self._size:
            held = SandboxOnDemand(self._provider, self._spec)
            held.begin()
            self._ready.append(held)

    def _drop_all(self) -> None:
        while self._ready:
            self._drop(self._ready.popleft())

    def _drop(self, held: SandboxOnDemand) -> None:
        task = asyncio.create_task(held.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _answers(held: SandboxOnDemand) -> bool:
    """Whether it can be used: its engine may have been restarted since it was opened."""
    try:
        await held.read_file(_NOWHERE, max_bytes=1)
    except ToolError:
        return True  # alive enough to say that there is no such file
    except (SandboxFault, SandboxLost):
        return False
    return True
