"""A ready tool body: Python in the episode's sandbox."""

from agentrl.errors import ToolError
from agentrl.protocols import Sandbox
from agentrl.tools.text import whole_characters
from agentrl.types import ExecResult

STDERR_CHARACTERS = 2000
"""The end of a traceback is what says what went wrong."""


async def run_python(sandbox: Sandbox, code: str, *, timeout_s: float) -> str:
    """Run code in a fresh Python of the sandbox; what it printed, as a model should read it.

    Standard output, then (if the code failed) the end of standard error or the exit code, then
    what ended it: its time limit, its memory limit, or a cut output. Raises ToolError for code
    with a NUL character, at which Python would stop reading.
    """
    if "\0" in code:
        raise ToolError("the code holds a NUL character")
    # By standard input: a command line has room for 128 KiB only.
    source = whole_characters(code).encode()
    done = await sandbox.exec(["python3", "-I", "-S", "-"], stdin=source, timeout_s=timeout_s)
    parts = [done.stdout.decode(errors="replace").rstrip("\n"), *_how_it_ended(done, timeout_s)]
    if done.cut:
        parts.append(f"[output cut: {done.stdout_bytes + done.stderr_bytes} bytes in all]")
    return "\n".join(part for part in parts if part)


def _how_it_ended(done: ExecResult, timeout_s: float) -> list[str]:
    if done.exit_code == 0:
        return []
    said = [done.stderr.decode(errors="replace").strip()[-STDERR_CHARACTERS:]]
    if done.timed_out:
        said.append(f"timed out after {timeout_s:g} s")
    elif done.out_of_memory:
        said.append("out of memory")
    elif not said[0]:
        said.append(f"[exit code {done.exit_code}]")
    return said
