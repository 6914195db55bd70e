"""An asynchronous conversation, held by synchronous code."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

Said = TypeVar("Said")
Told = TypeVar("Told")


class EpisodeThread(Generic[Said, Told]):
    """Runs an async generator in an event loop and thread of its own.

    One task drives it from beginning to end, so what it opens it closes in the same task. The
    thread ends with the generator, with an exception, or by `close`.
    """

    def __init__(self, conversation: AsyncGenerator[Said, Told]) -> None:
        self._said: SimpleQueue[Said | BaseException] = SimpleQueue()
        self._told: asyncio.Queue[Told] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._drive(conversation))
        self._thread = threading.Thread(target=self._run, name="agentrl-episode", daemon=True)
        self._thread.start()

    def send(self, told: Told) -> None:
        """Give the generator what it waits for."""
        self._loop.call_soon_threadsafe(self._told.put_nowait, told)

    def receive(self) -> Said:
        """What the generator yields next; raises what it raises."""
        said = self._said.get()
        if isinstance(said, BaseException):
            raise said
        return said

    def close(self) -> None:
        """End the generator wherever it is, and wait until nothing of it is left."""
        with suppress(RuntimeError):  # the loop has closed already
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_done())

    async def _until_done(self) -> None:
        await asyncio.wait({self._task})

    async def _drive(self, conversation: AsyncGenerator[Said, Told]) -> None:
        try:
            async with aclosing(conversation):
                said = await anext(conversation)
                while True:
                    self._said.put(said)
                    said = await conversation.asend(await self._told.get())
        except StopAsyncIteration:
            self._said.put(RuntimeError("the conversation is over"))
        except BaseException as error:
            self._said.put(error)
