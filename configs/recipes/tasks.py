"""The tasks of the recipes that no built-in environment covers: mathematics, reversal, a grid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from random import Random
from string import ascii_lowercase
from typing import Any

import gymnasium

from agentrl.data import from_files
from agentrl.gym import from_gymnasium
from agentrl.protocols import SandboxProvider, Split
from agentrl.tools import ToolEnvironment, answer, problem, run_python, tool
from agentrl.types import Episode, Problem, SandboxSpec, Verdict
from agentrl.verifiers import MathMatch

BOX = "Reason step by step, and put the final answer in \\boxed{}."


def mathematics(split: Split, **options: Any) -> Iterator[Problem]:
    """Problems from files; of an answer with "####" in it (GSM8K) what follows is the reference."""
    for given in from_files(split, **{"system_prompt": BOX, "reference": "answer"} | options):
        last = str(given.reference).rpartition("####")[2].strip()
        yield replace(given, reference=last.replace(",", "") if last[-1:].isdigit() else last)


class Mathematics(ToolEnvironment):
    """A question, answered in one action."""

    verifier = MathMatch(require_box=True)

    @staticmethod
    def problems(split: Split, *, train: str, test: str = "", prompt: str = "question"):
        return mathematics(split, train=train, test=test, prompt=prompt)


class ToolMathematics(Mathematics):
    """The same with a Python tool."""

    @tool(timeout_s=30)
    async def python(self, code: str) -> str:
        """Run Python code in a fresh interpreter and see what it prints."""
        return await run_python(self.sandbox, code, timeout_s=10)

    @staticmethod
    def problems(split: Split, *, train: str, test: str = "", prompt: str = "question"):
        for given in mathematics(split, train=train, test=test, prompt=prompt):
            yield replace(given, task=replace(given.task, sandbox=SandboxSpec(memory_mb=256)))


@dataclass(frozen=True)
class EachTurn:
    """A turn whose calls all worked earns `worked`, the last one the outcome."""

    outcome: MathMatch
    worked: float = 0.1

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        verdicts = await self.outcome.grade(problem, episodes, sandboxes)
        return [self._add(v, e) for v, e in zip(verdicts, episodes, strict=True)]

    def _add(self, verdict: Verdict, episode: Episode) -> Verdict:
        if verdict.reward is None:
            return verdict
        *earlier, _ = range(len(episode.trajectory.turns))
        bad = {e.turn for e in episode.trajectory.events if e.status != "ok" or e.exit_code}
        steps = [0.0 if turn in bad else self.worked for turn in earlier]
        return replace(verdict, step_rewards=(*steps, verdict.reward))


class StepwiseMathematics(ToolMathematics):
    """The same with a reward for each turn."""

    verifier = EachTurn(MathMatch(require_box=True))


class Alike:
    """The share of characters that agree in order; alike throughout is a pass."""

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        given = [e.trajectory.answer.strip() for e in episodes]
        shares = [
            SequenceMatcher(None, problem.reference, a, autojunk=False).ratio() for a in given
        ]
        return [Verdict(reward=s, passed=s == 1.0) for s in shares]


def reversed_text(problem: Problem):
    """The oracle."""
    yield answer(problem.reference)


class Reverse(ToolEnvironment):
    """A text of invented words, to be written backwards."""

    verifier = Alike()
    scripts = {"oracle": reversed_text}  # noqa: RUF012

    @staticmethod
    def problems(split: Split, *, words: int = 8, count: int = 2000, seed: int = 0):
        draw = Random(f"{split}:{seed}")
        for _ in range(count):
            text = " ".join(
                "".join(draw.choices(ascii_lowercase, k=draw.randint(3, 8))) for _ in range(words)
            )
            yield problem(
                f"Write this text backwards, letter by letter, and nothing else:\n{text}",
                text[::-1],
            )


def lake(size: int = 8) -> gymnasium.Env[Any, Any]:
    """A grid with holes, the same for everybody: rooms that come back, as GiGPO compares them."""
    return gymnasium.make("FrozenLake-v1", map_name=f"{size}x{size}", is_slippery=False)


Lake = from_gymnasium(
    lake,
    prompt="You cross a frozen lake of 8x8 fields, numbered from 0, row by row. Some have holes. "
    "Reach field 63: say one move at a time, left, down, right or up, and nothing else.",
    actions=("left", "down", "right", "up"),
)
