"""Calls a candidate's functions inside a sandbox and tells their values. Standard library alone.

It is given as source to `python3 -c`, and the calls as JSON on its standard input. It knows no
expected value and gives no verdict: whatever the candidate does to this process, it can only say
values, and saying the right ones is solving the problem. The host uses `encode` and `decode` too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

TYPE_CHECKING = False  # as in typing, whose import would cost each run some milliseconds
if TYPE_CHECKING:
    from typing import Any

_CONTAINERS = {list: "list", tuple: "tuple", set: "set", frozenset: "set"}


def encode(value: Any) -> Any:
    """The value as JSON keeps it: plain types alone, each container with its kind.

    Raises TypeError for anything else: a subclass may claim to equal everything.
    """
    kind: Any = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in _CONTAINERS:
        return {_CONTAINERS[kind]: [encode(v) for v in value]}
    if kind is dict:
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    raise TypeError(f"a value of type {kind.__name__} can't be compared")


def decode(data: Any) -> Any:
    """The value of what `encode` wrote. Raises ValueError, TypeError for what it did not write."""
    if not isinstance(data, dict):
        if isinstance(data, list):
            raise ValueError("a list without its kind")
        return data
    ((kind, items),) = data.items()
    if kind == "dict":
        return {decode(k): decode(v) for k, v in items}
    return {"list": list, "tuple": tuple, "set": set}[kind](decode(v) for v in items)


def main() -> None:
    """Make the calls of standard input and write a line for each: nonce, id, outcome."""
    asked = json.loads(sys.stdin.buffer.read())
    say = os.fdopen(os.dup(1), "w", encoding="ascii", errors="strict")
    # What the candidate prints is nobody's business, however much it is.
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    sys.path.insert(0, "/workspace")
    sys.dont_write_bytecode = True
    for case in asked["cases"]:
        outcome = json.dumps(_outcome(case))
        say.write(f"{asked['nonce']} {case['id']} {outcome}\n")
        say.flush()


def _outcome(case: Any) -> Any:
    """`{"value": …}`, or `{"error": the exception's kind}`."""
    module, _, name = case["call"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        return {"value": encode(function(*decode(case["arguments"])))}
    except BaseException as error:  # also SystemExit: leaving early is no pass
        return {"error": type(error).__name__}


if __name__ == "__main__":
    main()
