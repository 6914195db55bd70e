"""Keeps secrets out of records, and text storable."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from agentrl.types import ActionTokens, ObservationTokens, Trajectory, Turn

REDACTED = "[redacted]"
REDACTED_ID = 0
"""Stands for an id that spelled a part of a secret."""
REDACTED_TOKENS = "redacted_tokens"
"""The metric that counts such ids: a trajectory that has it can't be scored again."""

Decode = Callable[[Sequence[int]], str]

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


class Redactor:
    """Makes texts, bytes and ids storable: secrets become `REDACTED`, broken Unicode U+FFFD.

    A secret is also found as JSON would write it. `decode` turns ids into text; without it ids
    are stored as they are, whatever they spell.
    """

    def __init__(self, secrets: Iterable[str], *, decode: Decode | None = None) -> None:
        forms = sorted({form for s in secrets for form in _forms(s)}, key=len, reverse=True)
        whole = "|".join(map(re.escape, forms))
        self._text = re.compile(whole) if forms else None
        self._bytes = re.compile(whole.encode(errors="replace")) if forms else None
        self._decode = decode

    def text(self, text: str) -> str:
        """The text without secrets."""
        if not text.isascii():
            # A model can spell half of a surrogate pair, which UTF-8 can't hold.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._text.sub(REDACTED, text) if self._text else text

    def data(self, data: bytes) -> bytes:
        """The bytes without secrets."""
        return self._bytes.sub(REDACTED.encode(), data) if self._bytes else data

    def tokens(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with `REDACTED_ID` for each id that spells a part of a secret.

        Lengths, authors and logprobs stay; how many ids were replaced is in its metrics.
        """
        if self._text is None or self._decode is None:
            return trajectory
        ids = list(trajectory.token_ids)
        spelled = self._spelling(ids, self._text, self._decode)
        if not spelled:
            return trajectory
        for place in spelled:
            ids[place] = REDACTED_ID
        left = iter(ids)
        return replace(
            trajectory,
            turns=tuple(_with_ids(turn, left) for turn in trajectory.turns),
            metrics={**trajectory.metrics, REDACTED_TOKENS: float(len(spelled))},
        )

    def _spelling(self, ids: list[int], pattern: re.Pattern[str], decode: Decode) -> set[int]:
        """The places of the ids that spell secrets. Long only where there is one."""
        spelled: set[int] = set()
        begin = 0
        while pattern.search(decode(ids[begin:])):
            end = _least(
                begin + 1, len(ids), lambda n, b=begin: bool(pattern.search(decode(ids[b:n])))
            )
            first = _least(
                0, end - begin, lambda n, e=end: bool(pattern.search(decode(ids[e - n : e])))
            )
            spelled.update(range(end - first, end))
            begin = end - first + 1  # not at its end: another may begin inside it
        return spelled


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number in low … high for which `holds`, which must hold for `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _with_ids(turn: Turn, ids: Iterator[int]) -> Turn:
    observation: ObservationTokens = replace(
        turn.observation, token_ids=tuple(next(ids) for _ in turn.observation.token_ids)
    )
    action: ActionTokens = replace(
        turn.action, token_ids=tuple(next(ids) for _ in turn.action.token_ids)
    )
    return replace(turn, observation=observation, action=action)


def _forms(secret: str) -> Iterator[str]:
    yield secret
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
