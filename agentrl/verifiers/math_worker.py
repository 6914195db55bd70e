"""The process that math expressions are compared in; run as a script, by `agentrl.verifiers.math`.

A line of JSON on standard input is a question: `{"gold": text, "answer": text or null,
"limit_s": seconds}`; a line on standard output is its reply: `{"result": word}` with `equal`,
`different`, `unreadable` (the gold), `too_slow` or `failed`. Without an answer, the question is
whether the gold can be read and equals itself. Each question has a process of its own: what hangs
or eats memory is killed, and the next question is answered at once. Imports nothing of agentrl.
"""

import json
import logging
import math
import os
import resource
import select
import signal
import sys
import time
from typing import Any

MEMORY_BYTES = 1 << 30
FLOAT_DIGITS = 15
"""Rounding before floats are compared: what a double holds, so no hidden tolerance."""


def main() -> None:
    """Answer questions until standard input ends."""
    logging.disable(logging.CRITICAL)
    _load()
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps({"result": _guarded(question)}), flush=True)  # noqa: T201


def _load() -> None:
    """Import and use the library once, so that every child starts with it ready."""
    _compare("1", "x^2")


def _guarded(question: dict[str, Any]) -> str:
    """The result, from a child that lives `limit_s` seconds at most."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(question, writing)
    os.close(writing)
    try:
        deadline = time.monotonic() + question["limit_s"]
        ready, _, _ = select.select([reading], [], [], question["limit_s"])
        said = os.read(reading, 64).decode() if ready else ""
        if not said:
            return "too_slow" if time.monotonic() >= deadline else "failed"
        return said
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _in_child(question: dict[str, Any], writing: int) -> None:
    """Say the result and end, whatever happens; its own limits hold though the parent be gone."""
    try:
        seconds = math.ceil(question["limit_s"]) + 1
        limits = {
            resource.RLIMIT_CPU: seconds,
            resource.RLIMIT_AS: MEMORY_BYTES,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
        }
        for name, value in limits.items():
            resource.setrlimit(name, (value, value))
        os.write(writing, _compare(question["gold"], question["answer"]).encode())
    except BaseException:
        os._exit(1)
    os._exit(0)


def _compare(gold: str, answer: str | None) -> str:
    wanted = _parse(gold)
    if not wanted:
        return "unreadable"
    given = wanted if answer is None else _parse(answer)
    return "equal" if given and _equal(wanted, given) else "different"


def _parse(text: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    wrapped = "\\boxed{" + text + "}"
    config = LatexExtractionConfig(boxed_match_priority=0)
    return parse(wrapped, [config], fallback_mode="no_fallback", parsing_timeout=0)


def _equal(wanted: Any, given: Any) -> bool:
    from math_verify import verify

    return verify(wanted, given, float_rounding=FLOAT_DIGITS, strict=True, timeout_seconds=0)


if __name__ == "__main__":
    main()
