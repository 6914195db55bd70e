"""Boxed answers."""

import re

_PIECE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def last_boxed(text: str) -> str | None:
    """What stands in the last complete `\\boxed{…}`, braces balanced; None without one.

    The last box is the one that opens last. One pass, whatever the text.
    """
    opened: list[tuple[bool, int]] = []
    last: tuple[int, int] | None = None
    for piece in _PIECE.finditer(text):
        mark = piece[0]
        if mark in ("\\{", "\\}"):
            continue
        if mark != "}":
            opened.append((mark != "{", piece.end()))
        elif opened:
            is_box, start = opened.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, piece.start())
    return None if last is None else text[last[0] : last[1]]
