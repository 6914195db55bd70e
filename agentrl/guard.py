"""Keeps foreign code within its time, and its exceptions within the tree of errors."""

import asyncio
import time
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from agentrl.errors import EnvironmentFault, Fault

T = TypeVar("T")

_GRACE_S = 1.0
"""How long cancelled work may tidy up before its caller goes on without it."""


async def until(deadline: float, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` until `deadline` (monotonic seconds), then cancel it and raise TimeoutError.

    Work that swallows its cancellation is left behind: what it still brings is ignored. Raises
    EnvironmentFault if `work` ends as cancelled though nobody cancelled it.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=max(0.0, deadline - time.monotonic()))
        if task.cancelled():
            raise EnvironmentFault("foreign code cancelled itself")
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_ignore)
            await asyncio.wait({task}, timeout=_GRACE_S)


def _ignore(late: asyncio.Future[Any]) -> None:
    if not late.cancelled():
        late.exception()


@contextmanager
def blaming(
    fault: type[Fault], phase: str, *, but: tuple[type[Exception], ...] = ()
) -> Generator[None]:
    """Turn any exception (and sys.exit) into `fault`, except a Fault and the kinds in `but`."""
    try:
        yield
    except (Fault, *but):
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise fault(f"{phase}: {type(error).__name__}: {reason}") from error
