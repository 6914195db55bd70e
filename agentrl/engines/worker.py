"""The one thread that owns a model: whatever others want of it runs between two of its steps.

A request, a new set of weights or a question is a function in the thread's inbox; answers travel
back as futures, and each future is answered whatever happens.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sized
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from agentrl.errors import EngineFault

T = TypeVar("T")


class Stepper(Protocol):
    """What the thread drives. All of it is called on that thread only."""

    held: bool
    """While it is set, no waiting request may begin."""

    @property
    def running(self) -> Sized:
        """The requests that have begun."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        ...

    def step(self) -> None:
        """One turn of continuous batching; settles the futures of what has ended."""
        ...

    def forget(self, future: "Future[Any]") -> None:
        """Drop the request behind a cancelled future and free its place."""
        ...


class EngineWorker:
    """Runs a `Stepper` on a thread of its own, from `open` to `close`."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._drained: list[Future[None]] = []
        self._holds = 0
        self._closing = False
        self._why_not: str | None = "the engine is not open: use it as `async with engine:`"

    async def open(self, build: Callable[[], Stepper], close: Callable[[], None]) -> None:
        """Start the thread and build the stepper on it; `close` is the last that runs there.

        Raises what `build` raises.
        """
        built: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(build, close, built), name="agentrl-engine", daemon=True
        )
        self._thread.start()
        try:
            await asyncio.shield(asyncio.wrap_future(built))
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        """End the thread. Who still waits is answered with an EngineFault, as is who comes."""
        with self._lock:
            self._why_not = self._why_not or "the engine was closed"
        self._inbox.put(self._close)
        await asyncio.to_thread(self._thread.join)

    async def promise(self, begin: Callable[[Future[T]], None]) -> T:
        """Have the thread call `begin` with a future, and wait for it.

        Raises EngineFault if the engine is closed or its thread fails.
        """
        return await asyncio.wrap_future(self._promised(begin))

    async def between_steps(self, function: Callable[[], T]) -> T:
        """The result of `function`, run between two steps. Raises what it raises."""

        def begin(future: Future[T]) -> None:
            try:
                result = function()
            except Exception as error:
                settle(future, error=error)
            else:
                settle(future, result)

        return await self.promise(begin)

    @asynccontextmanager
    async def released(
        self, free: Callable[[], None], regain: Callable[[], None]
    ) -> AsyncGenerator[None]:
        """Let what runs end, `free`, and `regain` at the end; new requests wait outside."""
        drained = self._promised(self._hold)
        try:
            await asyncio.wrap_future(drained)
            await self.between_steps(free)
            try:
                yield
            finally:
                await self.between_steps(regain)
        finally:
            self._inbox.put(self._unhold)

    def _promised(self, begin: Callable[[Future[T]], None]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._why_not is not None:
                raise EngineFault(self._why_not)
            self._open.add(future)
            self._inbox.put(partial(begin, future))
        future.add_done_callback(self._settled)
        return future

    def _settled(self, future: Future[Any]) -> None:
        self._open.discard(future)
        if future.cancelled():
            self._inbox.put(lambda: self._stepper.forget(future))

    # What follows runs on the thread.

    def _work(
        self, build: Callable[[], Stepper], close: Callable[[], None], built: Future[None]
    ) -> None:
        try:
            with torch.inference_mode():
                self._stepper = build()
                self._why_not = None
                settle(built)
                while not self._closing:
                    self._read_inbox()
                    self._stepper.step()
                    self._tell_drained()
        except BaseException as error:
            self._why_not = f"the engine's worker failed: {type(error).__name__}: {_line(error)}"
            settle(built, error=error)
        finally:
            self._refuse_all()
            close()

    def _read_inbox(self) -> None:
        if not self._stepper.has_work:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _refuse_all(self) -> None:
        with self._lock:
            self._why_not = self._why_not or "the engine was closed"
            left = list(self._open)
        for future in left:
            settle(future, error=EngineFault(self._why_not))

    def _close(self) -> None:
        self._closing = True

    def _hold(self, future: "Future[None]") -> None:
        self._holds += 1
        self._stepper.held = True
        self._drained.append(future)

    def _unhold(self) -> None:
        self._holds -= 1
        self._stepper.held = self._holds > 0

    def _tell_drained(self) -> None:
        if self._drained and not self._stepper.running:
            for future in self._drained:
                settle(future)
            self._drained.clear()


def settle(
    future: "Future[Any]", result: object = None, *, error: BaseException | None = None
) -> None:
    """Answer a future once, unless whoever waited has gone."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
