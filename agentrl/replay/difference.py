"""Where what an environment says now departs from what it said then, and what may be the cause."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from agentrl.types import Message, Messages

_CUT = re.compile(r"\n\[(\d+) characters left out\]\n")
_EXCERPT = 120
_NETWORK = re.compile(
    r"connection|resolv|unreachable|network|\bssl\b|\bhttps?\b|\bsocket\b", re.IGNORECASE
)
_TIME_LIMIT = re.compile(r"timed out|ran out of its \d|took too long", re.IGNORECASE)
_CLOCK = re.compile(
    r"\d{4}-\d\d-\d\d|\b\d{1,2}:\d\d\b|\b1[6-9]\d{8}(\.\d+)?\b|\b\d+(\.\d+)?\s?(ms|s|seconds)\b"
    r"|\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\b"
)
_READS_CLOCK = re.compile(r"\btime\b|datetime|\bdate\b|perf_counter|monotonic")
_READS_CHANCE = re.compile(r"random|uuid|urandom|secrets|\bhash\(|\bid\(|0x[0-9a-f]{6,}|shuf\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Message number `message` differs in the bytes `begin` … `end` of its recorded content.

    `recorded` and `seen` are what stands there, cut to a line's length.
    """

    message: int
    begin: int
    end: int
    recorded: str
    seen: str


def first_difference(
    recorded: Messages, seen: Messages, ignore: Sequence[re.Pattern[str]] = ()
) -> Difference | None:
    """The first message that differs; None if all are the same. Matches of `ignore` don't count.

    A recorded message whose middle was left out is compared by what is left, and by its length.
    """
    for number, (then, now) in enumerate(zip_longest(recorded, seen)):
        before, after = _text(then), _text(now)
        same_shape = then is not None and now is not None and then.role == now.role
        if same_shape and (before == after or _fits_cut(before, after)):
            continue
        if same_shape and _without(before, ignore) == _without(after, ignore):
            continue
        return _difference(number, before, after)
    return None


def likely_cause(difference: Difference, action: str, *, repeats: bool) -> str:
    """A guess in words. `repeats`: another fresh run said the same as the first one did."""
    both = f"{difference.recorded}\n{difference.seen}"
    if _TIME_LIMIT.search(both):
        return "a time limit: one of the two ran out of time"
    if _NETWORK.search(both):
        return "the network: it was reached in one of the two and not in the other"
    if _is_reordered(difference.recorded, difference.seen):
        return "ordering: the same words in another order (a set, a directory, threads)"
    if _CLOCK.search(both) or (_READS_CLOCK.search(action) and _shape(both)):
        return "the clock: it shows a date, a time or a duration"
    if repeats:
        return "a change: two fresh runs agree, so the environment, a tool or the image is another"
    if _READS_CHANCE.search(f"{action}\n{both}"):
        return "randomness: the call draws random values, hashes or addresses"
    return "randomness: two fresh runs differ from each other"


def _difference(number: int, before: str, after: str) -> Difference:
    a, b = before.encode(errors="replace"), after.encode(errors="replace")
    begin = _shared(a, b)
    rest = min(len(a), len(b)) - begin
    tail = _shared(a[::-1][:rest], b[::-1][:rest])
    return Difference(
        message=number,
        begin=begin,
        end=len(a) - tail,
        recorded=_around(a, begin, len(a) - tail),
        seen=_around(b, begin, len(b) - tail),
    )


def _shared(a: bytes, b: bytes) -> int:
    """How many bytes are the same from the start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def _around(data: bytes, begin: int, end: int) -> str:
    """The bytes, widened to whole words, so that one digit of a date still looks like a date."""
    while begin > 0 and not data[begin - 1 : begin].isspace():
        begin -= 1
    while end < len(data) and not data[end : end + 1].isspace():
        end += 1
    return data[begin:end][:_EXCERPT].decode(errors="replace")


def _text(message: Message | None) -> str:
    return "" if message is None else message.content


def _without(text: str, ignore: Sequence[re.Pattern[str]]) -> str:
    for pattern in ignore:
        text = pattern.sub("", text)
    return text


def _fits_cut(before: str, after: str) -> bool:
    """Whether `before` is `after` with its middle left out, as rollouts cut long replies."""
    for note in _CUT.finditer(before):
        head, tail = before[: note.start()], before[note.end() :]
        left_out = len(after) - len(head) - len(tail)
        if after.startswith(head) and after.endswith(tail) and left_out == int(note[1]):
            return True
    return False


def _is_reordered(a: str, b: str) -> bool:
    words = [sorted(re.findall(r"\w+", text)) for text in (a, b)]
    return bool(a) and words[0] == words[1] and sorted(a) == sorted(b)


def _shape(text: str) -> bool:
    """Whether there are numbers in it."""
    return any(character.isdigit() for character in text)
