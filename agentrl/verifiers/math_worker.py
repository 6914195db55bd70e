"""What `agentrl.verifiers.math` asks in a killable process: whether two expressions are equal.

A question is `[gold, answer]`; without an answer (null) it is whether the gold can be read and
equals itself. The answer is `equal`, `different` or `unreadable` (the gold).
"""

from typing import Any

FLOAT_DIGITS = 15
"""Rounding before floats are compared: what a double holds, so no hidden tolerance."""


def load() -> None:
    """Import and use the library once, so that every call starts with it ready."""
    answer(["1", "x^2"])


def answer(question: tuple[str, str | None] | list[str]) -> str:
    """Compare by math-verify."""
    gold, given_text = question
    wanted = _parse(gold)
    if not wanted:
        return "unreadable"
    given = wanted if given_text is None else _parse(given_text)
    return "equal" if given and _equal(wanted, given) else "different"


def _parse(text: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    wrapped = "\\boxed{" + text + "}"
    config = LatexExtractionConfig(boxed_match_priority=0)
    return parse(wrapped, [config], fallback_mode="no_fallback", parsing_timeout=0)


def _equal(wanted: Any, given: Any) -> bool:
    from math_verify import verify

    return verify(wanted, given, float_rounding=FLOAT_DIGITS, strict=True, timeout_seconds=0)
