"""The process for calls that may hang; run as a script, by `agentrl.verifiers.killable`.

Its argument is a Python file with two functions: `load()`, called once, and `answer(question)`,
which gives a JSON value. A line of JSON on standard input is a call: `{"question": value,
"limit_s": seconds, "memory_bytes": n}`; a line on standard output is its reply: `{"status": word,
"value": value, "note": text}` with `done`, `too_slow` or `failed`. Each call has a forked process
of its own, which starts with all that `load` prepared: what hangs or eats memory is killed, and
the next call is answered at once. Imports nothing of agentrl.
"""

import importlib.util
import json
import logging
import math
import os
import resource
import select
import signal
import sys
import time
from types import ModuleType
from typing import Any

MAX_VALUE_BYTES = 1 << 20


def main(file: str) -> None:
    """Answer calls until standard input ends."""
    logging.disable(logging.CRITICAL)
    calls, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)  # what the file's own code reads or prints is no part of the talk
    os.dup2(nowhere, 1)
    module = _module(file)
    module.load()
    for line in calls:
        replies.write(json.dumps(_guarded(module, json.loads(line))) + "\n")
        replies.flush()


def _module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("killable_file", file)
    assert spec is not None and spec.loader is not None, f"{file} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _guarded(module: ModuleType, call: dict[str, Any]) -> dict[str, Any]:
    """The reply, from a child that lives `limit_s` seconds at most."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _in_child(module, call, writing)
    os.close(writing)
    try:
        said = _read(reading, time.monotonic() + call["limit_s"])
        if said is None:
            return {"status": "too_slow"}
        return json.loads(said) if said else {"status": "failed", "note": "it died"}
    except ValueError:
        return {"status": "failed", "note": "its answer was cut"}
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _read(handle: int, deadline: float) -> bytes | None:
    """All that is written until the other end closes; None if that is too late."""
    said = b""
    while len(said) <= MAX_VALUE_BYTES:
        ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        piece = os.read(handle, 1 << 16)
        if not piece:
            break
        said += piece
    return said


def _in_child(module: ModuleType, call: dict[str, Any], writing: int) -> None:
    """Say the reply and end, whatever happens; its own limits hold though the parent be gone."""
    try:
        seconds = math.ceil(call["limit_s"]) + 1
        limits = {
            resource.RLIMIT_CPU: seconds,
            resource.RLIMIT_AS: call["memory_bytes"],
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
        }
        for name, value in limits.items():
            resource.setrlimit(name, (value, value))
        _write(writing, {"status": "done", "value": module.answer(call["question"])})
    except BaseException as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        _write(writing, {"status": "failed", "note": reason[:300]})
    finally:
        os._exit(0)


def _write(handle: int, reply: dict[str, Any]) -> None:
    said = json.dumps(reply).encode()
    while said:
        said = said[os.write(handle, said) :]


if __name__ == "__main__":
    main(sys.argv[1])
