"""Answers compared with a reference by stated rules."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from agentrl.types import Episode, Problem, Verdict

_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?[$€£]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?%?|(?<![\w.\d])[-+−]?\.\d+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch:
    """1 if the answer is the reference after Unicode, case and space normalisation, else 0."""

    async def grade(self, problem: Problem, episodes: Sequence[Episode]) -> Sequence[Verdict]:
        """One verdict an episode; invalid when the reference is no text."""
        wanted = problem.reference
        if not isinstance(wanted, str) or not normalised(wanted):
            return [Verdict(invalid="the reference is no text")] * len(episodes)
        return [_verdict(normalised(e.trajectory.answer) == normalised(wanted)) for e in episodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericMatch:
    """1 if the answer's number equals the reference's, else 0.

    The number is that of the last `\\boxed{…}` if there is a box, else the last one in the answer;
    with `only_number` the answer must be that number and nothing else. Thousands' commas,
    currency signs and typographic minus are understood; 13.2% equals 13.2 and 0.132. `tolerance`
    is absolute.
    """

    only_number: bool = False
    tolerance: float = 0.0

    async def grade(self, problem: Problem, episodes: Sequence[Episode]) -> Sequence[Verdict]:
        """One verdict an episode; invalid when the reference holds no number."""
        wanted = numbers_in(str(problem.reference))
        if len(wanted) != 1:
            return [Verdict(invalid="the reference is not one number")] * len(episodes)
        return [_verdict(self._equal(e.trajectory.answer, wanted[0])) for e in episodes]

    def _equal(self, answer: str, wanted: tuple[Decimal, ...]) -> bool:
        box = last_boxed(answer)
        text = answer if box is None else box
        found = numbers_in(text)
        if not found or (self.only_number and _NUMBER.fullmatch(text.strip()) is None):
            return False
        tolerance = Decimal(str(self.tolerance))
        return any(abs(a - w) <= tolerance for a in found[-1] for w in wanted)


def numbers_in(text: str) -> list[tuple[Decimal, ...]]:
    """The numbers of a text, each as the values it may stand for (a percentage for two)."""
    out: list[tuple[Decimal, ...]] = []
    for match in _NUMBER.finditer(text):
        plain = match[0].replace("−", "-").replace(",", "").translate({ord(c): None for c in "$€£"})
        try:
            value = Decimal(plain.rstrip("%"))
        except InvalidOperation:
            continue
        out.append((value, value / 100) if plain.endswith("%") else (value,))
    return out


def last_boxed(text: str) -> str | None:
    """What stands in the last complete `\\boxed{…}`, braces balanced; None without one."""
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for at, character in enumerate(text[start:], start):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return text[start:at]
    return None


def normalised(text: str) -> str:
    """NFKC, lower case, spaces collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _verdict(passed: bool) -> Verdict:
    return Verdict(reward=float(passed), passed=passed)
