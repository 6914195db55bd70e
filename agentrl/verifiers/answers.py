"""Answers compared with a reference by stated rules."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from agentrl.protocols import SandboxProvider
from agentrl.types import Episode, Problem, Verdict
from agentrl.verifiers.base import candidate, each, invalid, outcome
from agentrl.verifiers.boxes import last_boxed
from agentrl.verifiers.numbers import (
    Number,
    final_number,
    only_number,
    whole_number,
    without_markup,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch:
    """1 if the answer is the reference after Unicode, case and space normalisation, else 0.

    With `normalise` off, the texts must be equal as they are.
    """

    normalise: bool = True

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; invalid when the reference is no text or empty."""
        wanted = problem.reference
        if not isinstance(wanted, str) or not normalised(wanted):
            return invalid(episodes, "the reference is no text")
        same = normalised if self.normalise else str
        return each(episodes, lambda e: outcome(same(e.trajectory.answer) == same(wanted)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericMatch:
    """1 if the answer's number equals the reference's, else 0.

    The number is that of the last `\\boxed{…}` if there is a box (which must hold one number, a
    variable's name or a unit at most), else the last one in the answer. With `only_number` an
    answer without a box must be that number and nothing else; with `require_box` there must be
    one. An answer that lists or hedges (`5 or 6`, `1 2 3`), or that ends in a sum or a fraction,
    has no number. How numbers are read is stated in `agentrl.verifiers.numbers`; 13.2% equals
    13.2 and 0.132. `tolerance` is absolute.

    Raises ValueError for a negative tolerance.
    """

    only_number: bool = False
    require_box: bool = False
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError("tolerance must be finite and at least 0")

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; invalid unless the reference is one number and nothing else."""
        wanted = whole_number(str(problem.reference))
        if wanted is None:
            return invalid(episodes, "the reference is not one number")
        return each(episodes, lambda e: outcome(self._equal(e.trajectory.answer, wanted)))

    def _equal(self, answer: str, wanted: Number) -> bool:
        found = self._number(answer)
        return found is not None and found.equals(wanted, Decimal(str(self.tolerance)))

    def _number(self, answer: str) -> Number | None:
        box = last_boxed(answer)
        if box is not None:
            return only_number(box)
        if self.require_box:
            return None
        return whole_number(answer) if self.only_number else final_number(answer)


_ANNOUNCED = re.compile(r"(?:answer|choice|option)\s*(?:is|:|=)?\s*:?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMatch:
    """1 if the answer names the one right letter of `choices`, else 0.

    Looked at is the last box; without one, what follows the last "answer is", "answer:", "choice"
    or "option"; without that, the whole answer. Exactly one different choice may stand there
    alone, as a capital letter (`D`, `(D)`, `\\text{D}`, `D.`): naming several is a hedge.
    """

    choices: str = "ABCD"
    require_box: bool = False

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; invalid when the reference is none of the choices."""
        wanted = problem.reference
        if not isinstance(wanted, str) or len(wanted) != 1 or wanted not in self.choices:
            return invalid(episodes, f"the reference is not one of {self.choices}")
        return each(episodes, lambda e: outcome(self._named(e) == {wanted}))

    def _named(self, episode: Episode) -> set[str]:
        text = candidate(episode, require_box=self.require_box)
        if text is None:
            return set()
        if last_boxed(episode.trajectory.answer) is None:
            announced = list(_ANNOUNCED.finditer(text))
            text = text[announced[-1].end() :] if announced else text
        letters = re.findall(
            rf"(?<!\w)[{re.escape(self.choices)}](?!\w|['’])", without_markup(text)
        )
        return set(letters)


@dataclass(frozen=True, slots=True, kw_only=True)
class F1Match:
    """Token overlap of answer and reference: F1, the best over several references.

    Words are compared as in SQuAD (Rajpurkar et al. 2016): lower case, no punctuation, no
    articles. `passed` from `pass_at` on.
    """

    pass_at: float = 1.0

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; invalid unless the reference is text, or a list of texts."""
        references = _texts(problem.reference)
        if not references:
            return invalid(episodes, "the reference is no text")
        return each(episodes, lambda e: self._verdict(e.trajectory.answer, references))

    def _verdict(self, answer: str, references: Sequence[str]) -> Verdict:
        best = max(_f1(_words(answer), _words(r)) for r in references)
        return Verdict(reward=best, passed=best >= self.pass_at)


def normalised(text: str) -> str:
    """NFKC, lower case, spaces collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _texts(reference: Any) -> list[str]:
    """The reference as texts that have words; nothing if any of them has none."""
    texts = [reference] if isinstance(reference, str) else reference
    if not isinstance(texts, list | tuple):
        return []
    return [*texts] if all(isinstance(t, str) and _words(t) for t in texts) else []


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _words(text: str) -> list[str]:
    plain = normalised(text).translate(_PUNCTUATION)
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def _f1(answer: list[str], reference: list[str]) -> float:
    """F1 = 2PR/(P+R) = 2·common/(len + len)."""
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference)) if common else 0.0
