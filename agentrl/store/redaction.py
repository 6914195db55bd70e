"""Keeps secrets out of records, and text storable."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"(^|_)(api_?key|key|token|secret|passw(or)?d|passphrase|credentials?|pat)(_|$)", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
_SHORTEST = 8
"""Shorter values are no secrets, and taking them out would damage ordinary text."""


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values that look like secrets: by the variable's name, or a password inside a URL."""
    found: set[str] = set()
    for name, value in environ.items():
        if _SECRET_NAME.search(name):
            found.add(value)
        found.update(_PASSWORD_IN_URL.findall(value))
    return tuple(sorted(value for value in found if len(value) >= _SHORTEST))


def cleaner(secrets: Iterable[str]) -> Callable[[str], str]:
    """A function that makes a text storable: secrets become `REDACTED`, broken Unicode U+FFFD.

    A secret is also found as JSON would write it.
    """
    forms = sorted({form for secret in secrets for form in _forms(secret)}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, forms))) if forms else None

    def clean(text: str) -> str:
        if not text.isascii():
            # A model can spell half of a surrogate pair, which UTF-8 can't hold.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return pattern.sub(REDACTED, text) if pattern else text

    return clean


def _forms(secret: str) -> Iterator[str]:
    yield secret
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
