"""Calls that may hang or eat all memory, in processes that are killed when late.

A time limit inside a thread stops the waiting, not the work, and a pool of such threads is soon
used up. Here every call has its own process, and what it may cost is bounded.
"""

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any, Literal

from agentrl.errors import VerifierFault

START_S = 60.0
"""How long a worker may take to load its file, beyond the limit of a call."""
MEMORY_BYTES = 1 << 30

_WORKER = Path(__file__).with_name("killable_worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a call: its value (JSON) if it is done; `note` says why it failed."""

    status: Literal["done", "too_slow", "failed"]
    value: Any = None
    note: str = ""


class KillablePool:
    """Worker processes for the function `answer` of one Python file, started when needed, reused.

    The file has two functions and imports nothing of agentrl: `load()` prepares (imports, tables),
    once for each worker; `answer(question)` maps a JSON value to a JSON value. The workers see no
    variable of the environment but PATH and LANG. `memory_bytes` is the address space of a call.
    """

    def __init__(self, file: Path, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._file = file
        self._memory_bytes = memory_bytes
        self._idle: LifoQueue[subprocess.Popen[bytes]] = LifoQueue()

    def __del__(self) -> None:
        self.close()

    async def ask(
        self, questions: Sequence[Any], *, limit_s: float, concurrency: int = 1
    ) -> list[Reply | VerifierFault]:
        """The reply to each question, or the fault of a worker that has none.

        A question takes at most `limit_s` seconds, and `concurrency` are asked at once. What the
        question causes (time, memory, an exception) is a reply, never a fault.
        """
        gate = asyncio.Semaphore(concurrency)

        async def one(question: Any) -> Reply | VerifierFault:
            async with gate:
                try:
                    return await asyncio.to_thread(self._ask, question, limit_s)
                except VerifierFault as fault:
                    return fault

        return list(await asyncio.gather(*map(one, questions)))

    def close(self) -> None:
        """End the workers."""
        while True:
            try:
                _end(self._idle.get_nowait())
            except Empty:
                return

    def _ask(self, question: Any, limit_s: float) -> Reply:
        call = {"question": question, "limit_s": limit_s, "memory_bytes": self._memory_bytes}
        with self._worker() as worker:
            return _talk(worker, json.dumps(call).encode() + b"\n", limit_s + START_S)

    @contextmanager
    def _worker(self) -> Generator["subprocess.Popen[bytes]"]:
        """A worker; it goes back to the others unless something went wrong."""
        try:
            worker = self._idle.get_nowait()
        except Empty:
            worker = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER), str(self._file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            )
        try:
            yield worker
        except BaseException:
            _end(worker)
            raise
        self._idle.put(worker)


def _talk(worker: "subprocess.Popen[bytes]", call: bytes, timeout_s: float) -> Reply:
    assert worker.stdin is not None and worker.stdout is not None, "started with pipes"
    deadline, said = time.monotonic() + timeout_s, b""
    try:
        worker.stdin.write(call)
        worker.stdin.flush()
        handle = worker.stdout.fileno()
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(handle, 1 << 16) if ready else b""
            if not piece:
                raise VerifierFault("the worker process ended or is late")
            said += piece
        return Reply(**json.loads(said))
    except (OSError, ValueError, TypeError) as error:
        raise VerifierFault(f"the worker process failed: {error}") from error


def _end(worker: "subprocess.Popen[bytes]") -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was still to be written has nobody to read it
                pipe.close()
