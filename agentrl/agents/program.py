"""A program of the author's, beside the sandbox: run, listened to, ended."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import EnvironmentFault

MAX_STDOUT_BYTES = 1 << 20
STDERR_BYTES = 2000
"""The end of a traceback is what says what went wrong."""
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")
"""What a program gets of this process's variables: no keys, no tokens."""


@dataclass(slots=True)
class Heard:
    """What a program has written so far: the first of stdout, the last of stderr."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)


async def run_program(
    argv: Sequence[str], *, environ: Mapping[str, str], stdin: bytes, folder: Path, heard: Heard
) -> int:
    """Run a program in `folder` and give its exit code; cancelled, none of its group is left.

    Raises EnvironmentFault if it can't be started.
    """
    own = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env={**own, **environ},
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentFault(f"the agent program {argv[0]}: {error.strerror}") from None
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_feed(process, stdin))
            tasks.create_task(_keep_first(process.stdout, heard.stdout))
            tasks.create_task(_keep_last(process.stderr, heard.stderr))
            return await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _keep_first(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    while stream is not None and (data := await stream.read(1 << 16)):
        kept += data[: MAX_STDOUT_BYTES - len(kept)]


async def _keep_last(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    while stream is not None and (data := await stream.read(1 << 16)):
        kept += data
        del kept[:-STDERR_BYTES]
