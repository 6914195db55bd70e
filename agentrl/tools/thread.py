"""Where an episode's blocking tools run: in one thread of its own."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

_Job: TypeAlias = Callable[[], None]


class ToolThread:
    """A thread that runs one blocking call after the other until it is closed.

    All calls of an episode share it, so that what is bound to its thread (a database connection)
    still works; no other episode waits for it, and a call that never returns holds up neither
    other episodes nor the end of the process.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="agentrl-tool", daemon=True).start()

    async def run(self, function: Callable[[], Any]) -> Any:
        """What `function` returns or raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()
        self._jobs.put(lambda: _do(lambda: context.run(function), loop, done))
        return await done

    def close(self, *, last: Callable[[], object] | None = None) -> None:
        """Let the thread end after what it is doing now, and after `last`; nobody waits."""
        if last is not None:
            self._jobs.put(lambda: _quietly(last))
        self._jobs.put(None)


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # while it waits, the thread keeps nothing of the episode alive


def _quietly(function: Callable[[], object]) -> None:
    with suppress(Exception):
        function()


def _do(
    function: Callable[[], Any], loop: asyncio.AbstractEventLoop, done: "asyncio.Future[Any]"
) -> None:
    result, failure = None, None
    try:
        result = function()
    except BaseException as error:
        failure = error if isinstance(error, Exception) else RuntimeError(repr(error))

    def report() -> None:
        if done.done():
            return
        if failure is None:
            done.set_result(result)
        elif isinstance(failure, StopIteration):  # a future can't hold one
            done.set_exception(RuntimeError("the tool raised StopIteration"))
        else:
            done.set_exception(failure)

    try:
        loop.call_soon_threadsafe(report)
    except RuntimeError:
        return  # the loop has closed: nobody waits any more
