"""Was the answer right, and is the page that is cited one that was opened and says so?"""

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.protocols import SandboxProvider
from agentrl.types import Episode, Problem, Verdict
from agentrl.verifiers.answers import normalised
from agentrl.verifiers.base import each, invalid

OPENED = "opened.json"
"""The artifact with the pages that the policy has seen: texts by id."""
_CITED = re.compile(r"(.*)\[([^\[\]]+)\]\.?\s*\Z", re.DOTALL)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The private half of a question: answers (any will do), and the titles that lead there.

    `cite`: the answer must end in the id of a page, in brackets. `tags`: it stands between
    `<answer>` and `</answer>`.
    """

    answers: tuple[str, ...]
    path: tuple[str, ...] = ()
    cite: bool = True
    tags: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAnswer:
    """Passes with reward 1 for the right answer, if asked for with a page that holds it.

    Components: `exact` (the words of an answer, as SQuAD compares them), `f1` (their overlap,
    Rajpurkar et al. 2016) and `cited` (1 if the page that is cited was opened in this episode and
    holds an answer). Right without a citation that was asked for is `uncited`; an answer that is
    not exact earns the share `partial` of its F1.
    """

    uncited: float = 0.5
    partial: float = 0.0

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; invalid unless the reference is a Question with answers."""
        question = problem.reference
        if not isinstance(question, Question) or not all(map(_words, question.answers or ("",))):
            return invalid(episodes, "the reference is no Question with answers")
        return each(episodes, lambda e: self._verdict(e, question))

    def _verdict(self, episode: Episode, question: Question) -> Verdict:
        text, cited = _said(episode.trajectory.answer, question)
        opened: dict[str, str] = json.loads(episode.artifacts.get(OPENED, b"{}"))
        found = cited in opened and any(holds(opened[cited], a) for a in question.answers)
        exact = any(_words(text) == _words(a) for a in question.answers)
        f1 = max(_f1(_words(text), _words(a)) for a in question.answers)
        passed = exact and (found or not question.cite)
        wrong = self.uncited if exact else self.partial * f1
        return Verdict(
            reward=1.0 if passed else wrong,
            passed=passed,
            components={"exact": float(exact), "f1": f1, "cited": float(found)},
        )


def holds(text: str, answer: str) -> bool:
    """Whether a page says the answer: its words in a row."""
    return f" {' '.join(_words(answer))} " in f" {' '.join(_words(text))} "


def _said(text: str, question: Question) -> tuple[str, str]:
    """The answer and the id that it cites ("" for none)."""
    if question.tags:
        text = next(reversed(_TAGGED.findall(text)), "")
    match = _CITED.fullmatch(text.strip()) if question.cite else None
    return (match[1], match[2].strip()) if match else (text, "")


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _words(text: str) -> list[str]:
    """Words without case, punctuation and articles."""
    plain = normalised(text).translate(_PUNCTUATION)
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def _f1(answer: list[str], reference: list[str]) -> float:
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference)) if common else 0.0
