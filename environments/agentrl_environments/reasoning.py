"""Puzzles, arithmetic, logic and text tasks of reasoning-gym, one answer each, without a tool."""

import base64
import pickle
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from agentrl.errors import VerifierFault
from agentrl.protocols import SandboxProvider, Split
from agentrl.tools import ToolEnvironment, answer, problem
from agentrl.types import Episode, Message, Messages, Problem, Verdict, system, user
from agentrl.verifiers import KillablePool, Reply, last_boxed
from agentrl_environments.python_math import library, stream_seed
from agentrl_environments.reasoning_families import FAMILIES, LEFT_OUT

INSTRUCTIONS = "Solve the task. Reply with the answer alone, or end with \\boxed{the answer}."
MAX_CHARACTERS = 20_000
_SCORER = Path(__file__).with_name("reasoning_scorer.py")
_SIZE = 5000
"""Generated questions of a family and seed; small families run out of new ones before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The reference: a family, its own answer, and the generator's entry (pickled, base64)."""

    family: str
    answer: str
    entry: str = field(repr=False)

    def __str__(self) -> str:
        return self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningScore:
    """1 if the family's own scorer gives the answer its full score, else 0.

    The answer is what stands in the last box, else all of it. Partial scores are worth nothing:
    many families give some for any text. The scorer runs in a process that is killed after
    `limit_s` seconds and may run no code; what it can't score in time is wrong.
    """

    limit_s: float = 20.0
    concurrency: int = 2
    _pool: KillablePool = field(
        default_factory=lambda: KillablePool(_SCORER, memory_bytes=4 << 30),
        init=False, repr=False, compare=False,
    )  # fmt: skip

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; invalid if the scorer does not take the gold, or has died."""
        wanted: Question = problem.reference
        given = [_said(e.trajectory.answer) for e in episodes]
        asked = [t for t in dict.fromkeys(given) if t.strip() and len(t) <= MAX_CHARACTERS]
        replies = await self._pool.ask(
            [(wanted.family, wanted.entry, [text]) for text in asked],
            limit_s=self.limit_s,
            concurrency=self.concurrency,
        )
        found = dict(zip(asked, map(_verdict, replies), strict=True))
        nothing = Verdict(reward=0.0, note="empty, or too long")
        return [found.get(text, nothing) for text in given]


def _said(text: str) -> str:
    box = last_boxed(text)
    return text if box is None else box


def _verdict(reply: Reply | VerifierFault) -> Verdict:
    if isinstance(reply, VerifierFault):
        return Verdict(invalid=f"VerifierFault: {reply}")
    if reply.status != "done":
        return Verdict(reward=0.0, note="not scored within time and memory")
    if reply.value is None:
        return Verdict(invalid="the gold does not get the full score")
    (full,) = reply.value
    return Verdict(reward=float(full), passed=full)


class Reasoning(ToolEnvironment):
    """One question of a family, answered in one action."""

    verifier = ReasoningScore()

    @staticmethod
    def problems(
        split: Split,
        *,
        families: Sequence[str] = FAMILIES,
        count: int = 1000,
        seed: int = 0,
    ) -> Iterator[Problem]:
        """`count` problems at most, the families in turn; the same for the same options.

        A question is in the test split when its own hash says so (one in five), whatever the seed.
        """
        if not families or count < 1:
            raise ValueError("families must name one at least, and count be at least 1")
        for family in families:
            _check(family)
        streams = [_problems(family, seed, split) for family in dict.fromkeys(families)]
        given = 0
        while streams:
            for stream in list(streams):
                made = next(stream, None)
                if made is None:
                    streams.remove(stream)
                    continue
                yield made
                given += 1
                if given == count:
                    return

    @staticmethod
    def oracle(problem: Problem) -> Generator[Message, Messages, None]:
        """Say the generator's own answer."""
        yield answer(problem.reference.answer)

    @staticmethod
    def guess(problem: Problem) -> Generator[Message, Messages, None]:
        """Answer at once, with what many families could have as an answer."""
        yield answer(Random(problem.task.id).choice(("0", "1", "2", "True", "False", "Yes", "No")))

    @staticmethod
    def not_a_number(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: NaN equals nothing, and is below no tolerance."""
        yield answer("nan")

    @staticmethod
    def hedge(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: the answer, and that it may be another."""
        yield answer(f"{problem.reference.answer} or maybe not")

    @staticmethod
    def code(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: an expression that would be the answer if it were run."""
        yield answer(f"(lambda: {problem.reference.answer!r})()")

    scripts = {  # noqa: RUF012
        "oracle": oracle,
        "guess": guess,
        "not_a_number": not_a_number,
        "hedge": hedge,
        "code": code,
    }


def _check(family: str) -> None:
    if family in LEFT_OUT:
        raise ValueError(f"family {family} is left out: {LEFT_OUT[family]}")
    if family not in FAMILIES:
        near = get_close_matches(family, FAMILIES, n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/environments.md lists them"
        raise ValueError(f"there is no family {family!r}; {hint}")


def _problems(family: str, seed: int, split: Split) -> Iterator[Problem]:
    items: Any = library().create_dataset(family, seed=stream_seed(family, seed), size=_SIZE)
    seen: set[str] = set()
    for index in range(_SIZE):
        entry: Any = items[index]
        text, gold = str(entry["question"]).strip(), str(entry["answer"])
        digest = sha256(text.encode()).digest()
        in_test = digest[0] % 5 == 0
        if text in seen or in_test != (split == "test"):
            continue
        seen.add(text)
        packed = base64.b64encode(pickle.dumps(dict(entry))).decode()
        made = problem(
            (system(INSTRUCTIONS), user(text)),
            Question(family=family, answer=gold, entry=packed),
            id=f"{family}-{digest.hex()[:16]}",
        )
        yield replace(made, task=replace(made.task, family=family))
