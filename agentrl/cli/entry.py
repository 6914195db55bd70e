"""Runs the command line and turns whatever goes wrong into one line and an exit code.

0: done · 1: what was checked is not in order · 2: wrong usage, configuration or file · 3: the run
had to stop (training error, too many faults, or an error of agentrl itself) · 130: interrupted (a
whole checkpoint is left).
"""

import errno
import io
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.errors import AgentRLError, Fault, SandboxLost, TrainingError
from agentrl.show import printable

WRONG, USAGE, STOPPED, INTERRUPTED = 1, 2, 3, 130
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a full disk says, often without the name of a file."""
TRACEBACK = "AGENTRL_TRACEBACK"
"""Set this variable to see the traceback of an error."""


def main() -> None:
    """Run the command line and exit with its code."""
    for bars in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):  # the display is ours
        os.environ.setdefault(bars, "1")
    warnings.showwarning = _warn
    # Schedulers stop a job by SIGTERM: it ends as Ctrl-C ends it, with a whole checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    for stream in (sys.stdout, sys.stderr):  # a terminal without Unicode is no reason to fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Never raises, but for AGENTRL_TRACEBACK."""
    try:
        from agentrl.cli.app import app

        code = app(list(arguments) or ["--help"], prog_name="agentrl", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _close_stdout()  # the reader has seen enough
        return 0
    except (Exception, BaseExceptionGroup) as error:
        if isinstance(error, OSError) and error.errno in FULL:
            _close_stdout()
        return _explain(error)


def _close_stdout() -> None:
    """What could not be written must not be tried again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error: BaseException) -> int:
    """Say in one line what happened; returns the exit code."""
    causes = list(_leaves(error))
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return INTERRUPTED
    # Of several errors at once, one that is not of agentrl's making matters most.
    cause = min(causes, key=lambda cause: isinstance(cause, AgentRLError))
    usage: Any = getattr(cause, "format_message", None)  # an error of the option parser
    if usage:
        _say(f"{usage()} (see agentrl --help)")
        return USAGE
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    if isinstance(cause, AgentRLError):
        _say(str(cause))
        return STOPPED if isinstance(cause, TrainingError | Fault | SandboxLost) else USAGE
    if isinstance(cause, OSError) and (cause.filename or cause.errno in FULL):
        _say(f"{cause.filename or 'a file or stdout'}: {cause.strerror}")
        return USAGE
    _say(
        f"agentrl itself failed ({type(cause).__name__}: {cause}); please report it with the "
        f"traceback in {_save_traceback(error)}"
    )
    return STOPPED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside an exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        inner: BaseException
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _say(text: str) -> None:
    print(f"error: {printable(' '.join(text.split()))}", file=sys.stderr)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)


def _save_traceback(error: BaseException) -> str:
    with tempfile.NamedTemporaryFile(
        "w", prefix="agentrl-", suffix=".traceback", delete=False, encoding="utf-8"
    ) as file:
        file.write("".join(traceback.format_exception(error)))
    return file.name
