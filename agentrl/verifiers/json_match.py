"""Answers that are JSON: equal to a value, or as a schema wants them."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

from agentrl.errors import PluginError, VerifierFault
from agentrl.protocols import SandboxProvider
from agentrl.types import Episode, Problem, Verdict
from agentrl.verifiers.base import each, invalid, outcome
from agentrl.verifiers.killable import KillablePool, Reply

MAX_CHARACTERS = 200_000
_WORKER = Path(__file__).with_name("json_worker.py")
_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL | re.IGNORECASE)


def strict_json(text: str) -> Any:
    """The value of a text that is one JSON document (RFC 8259) and nothing else.

    Code fences around the whole of it are taken off. Raises ValueError also for what Python's own
    reader lets pass: NaN and Infinity, numbers that overflow a double, a name twice in an object,
    half a surrogate pair, and nesting or numbers without end.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    fenced = _FENCE.fullmatch(text)
    try:
        value = json.loads(
            fenced[1] if fenced else text,
            object_pairs_hook=_without_repeats,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonMatch:
    """1 if the answer is JSON that equals the reference (or fits it as a schema), else 0.

    The answer must be one strict JSON document and nothing else (see `strict_json`). A reference
    that is a text is read as JSON too; anything else is the value. By equality the order of names
    does not matter and that of lists does; 1 is 1.0, and true is no 1. By schema the reference is a
    JSON schema (`format` is not checked, and `$ref` reaches only into the schema itself); a check
    that takes more than `limit_s` seconds fails. `concurrency` checks of a group run at once.

    Raises PluginError for schemas without jsonschema.
    """

    by: Literal["equality", "schema"] = "equality"
    limit_s: float = 3.0
    concurrency: int = 2
    _pool: KillablePool = field(
        default_factory=lambda: KillablePool(_WORKER), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.by == "schema" and find_spec("jsonschema") is None:
            raise PluginError("schemas need jsonschema: pip install 'agentrl[json]'")
        if self.limit_s <= 0 or self.concurrency < 1:
            raise ValueError("limit_s must be above 0 and concurrency at least 1")

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; invalid when the reference is no JSON, or no schema."""
        try:
            wanted = _reference(problem.reference)
        except (TypeError, ValueError) as error:
            return invalid(episodes, f"the reference is no JSON: {error}")
        if self.by == "equality":
            return each(episodes, lambda e: self._equals(e.trajectory.answer, wanted))
        return await self._fit(wanted, episodes)

    def _equals(self, answer: str, wanted: Any) -> Verdict:
        try:
            value = strict_json(answer)
        except ValueError as error:
            return outcome(False, f"no JSON: {error}")
        return outcome(_same(value, wanted))

    async def _fit(self, schema: Any, episodes: Sequence[Episode]) -> Sequence[Verdict]:
        (reply,) = await self._pool.ask([(schema, None)], limit_s=self.limit_s)
        if isinstance(reply, VerifierFault) or reply.value != "":
            found = reply if isinstance(reply, VerifierFault) else reply.value or reply.note
            return invalid(episodes, f"the reference is no JSON schema that can be used: {found}")
        texts = [e.trajectory.answer for e in episodes]
        verdicts: dict[str, Verdict] = {}
        values: dict[str, Any] = {}
        for text in texts:
            try:
                values[text] = strict_json(text)
            except ValueError as error:
                verdicts[text] = outcome(False, f"no JSON: {error}")
        replies = await self._pool.ask(
            [(schema, json.dumps(value)) for value in values.values()],
            limit_s=self.limit_s,
            concurrency=self.concurrency,
        )
        verdicts |= zip(values, map(_fitted, replies), strict=True)
        return [verdicts[text] for text in texts]


def _fitted(reply: Reply | VerifierFault) -> Verdict:
    if isinstance(reply, VerifierFault):
        return Verdict(invalid=f"VerifierFault: {reply}")
    if reply.status == "done":
        return outcome(reply.value == "", reply.value)
    return outcome(False, reply.note or "not checked within the limit")


def _reference(reference: Any) -> Any:
    return strict_json(reference if isinstance(reference, str) else json.dumps(reference))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (one, other))
    return one == other and (numbers or type(one) is type(other))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number
