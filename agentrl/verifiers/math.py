"""Mathematical equivalence, judged by math-verify in processes that can be killed.

Model-written expressions may hang a computer algebra system or eat all memory (9^9^9^9).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

from agentrl.errors import PluginError, VerifierFault
from agentrl.protocols import SandboxProvider
from agentrl.types import Episode, Problem, Verdict
from agentrl.verifiers.base import candidate, each, invalid, outcome
from agentrl.verifiers.killable import KillablePool, Reply
from agentrl.verifiers.numbers import only_number

MAX_CHARACTERS = 4000

_WORKER = Path(__file__).with_name("math_worker.py")
_EQUAL, _DIFFERENT = (Reply(status="done", value=word) for word in ("equal", "different"))
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "max", "min", "gcd", "lcm")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathMatch:
    """1 if the answer's expression equals the reference's, else 0.

    The expression is that of the last `\\boxed{…}`; without a box it is the whole answer, which
    must be an expression and nothing else (`require_box`: there must be one). Numbers are compared
    exactly: 50/3 is not 16.7. What can't be compared within `limit_s` seconds is not equal.
    `concurrency` bounds the comparisons of a group that run at once.

    Raises PluginError without math-verify.
    """

    require_box: bool = False
    limit_s: float = 3.0
    concurrency: int = 2
    _pool: KillablePool = field(
        default_factory=lambda: KillablePool(_WORKER), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if find_spec("math_verify") is None:
            raise PluginError("MathMatch needs math-verify: pip install math-verify")
        if self.limit_s <= 0 or self.concurrency < 1:
            raise ValueError("limit_s must be above 0 and concurrency at least 1")

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; invalid when the reference can't be read as an expression."""
        gold = _bare(str(problem.reference))
        if not await self._readable(gold):
            return invalid(episodes, "the reference is no expression that can be read")
        answers = {id(e): self._expression(e) for e in episodes}
        results: dict[str | None, Reply | VerifierFault] = {None: _DIFFERENT}
        for expression in answers.values():
            if expression is not None and (known := _compared(gold, expression)) is not None:
                results[expression] = known
        asked = [a for a in dict.fromkeys(answers.values()) if a not in results]
        questions = [(gold, a) for a in asked]
        results |= zip(
            asked,
            await self._pool.ask(questions, limit_s=self.limit_s, concurrency=self.concurrency),
            strict=True,
        )
        return each(episodes, lambda e: _verdict(results[answers[id(e)]]))

    async def _readable(self, gold: str) -> bool:
        if not gold or _has_words(gold) or not _balanced(gold) or len(gold) > MAX_CHARACTERS:
            return False
        if only_number(gold) is not None:
            return True
        (reply,) = await self._pool.ask([(gold, None)], limit_s=self.limit_s)
        if isinstance(reply, VerifierFault):
            raise reply
        return reply.value == "equal"

    def _expression(self, episode: Episode) -> str | None:
        """The answer's expression; None if there is nothing that could be one."""
        text = candidate(episode, require_box=self.require_box)
        bare = _bare(text or "")
        return bare if bare and len(bare) <= MAX_CHARACTERS and _balanced(bare) else None


def _compared(gold: str, expression: str) -> Reply | None:
    """What is known without the algebra system, if it is."""
    if expression == gold:
        return _EQUAL
    wanted, given = only_number(gold), only_number(expression)
    if wanted is None or given is None:
        return None
    return _EQUAL if given.equals(wanted, Decimal(0)) else _DIFFERENT


def _verdict(reply: Reply | VerifierFault) -> Verdict:
    if isinstance(reply, VerifierFault):
        raise reply
    notes = {"too_slow": "not comparable within the limit", "failed": "not comparable"}
    return outcome(reply.value == "equal", notes.get(reply.status, ""))


def _bare(text: str) -> str:
    """Without the marks of inline mathematics around it."""
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening):
            return text[len(opening) : -len(closing)].strip()
    return text


def _has_words(text: str) -> bool:
    """Whether there is prose in it: letters in a row that are neither command nor function."""
    return any(
        len(word) > 2 and word.casefold() not in _FUNCTIONS
        for word in re.findall(r"[^\W\d_]+", _COMMAND.sub(" ", text))
    )


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0
