"""Tool results as a model reads them."""

import json
from typing import Any


def as_text(result: Any) -> str:
    """A tool's result: text as it is, bytes as UTF-8, None as nothing, the rest as JSON.

    Bytes that are no UTF-8 become replacement signs.
    """
    if isinstance(result, str):
        return result
    if isinstance(result, bytes):
        return result.decode(errors="replace")
    if result is None:
        return ""
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def cut_bytes(text: str, limit: int) -> tuple[str, int]:
    """The text cut to `limit` bytes with a note, and its size in bytes before."""
    data = whole_characters(text).encode()
    if len(data) <= limit:
        return data.decode(), len(data)
    kept = data[:limit].decode(errors="ignore")
    return f"{kept}\n[output cut: first {limit} of {len(data)} bytes shown]", len(data)


def whole_characters(text: str) -> str:
    """The text with lone surrogates (which no encoding takes) as replacement signs."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters in one line, for error messages."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"
