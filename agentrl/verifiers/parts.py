"""Verifiers made of verifiers, and the part that looks at form alone."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.errors import ConfigError
from agentrl.protocols import SandboxProvider, Verifier
from agentrl.types import Episode, Problem, Verdict
from agentrl.verifiers.base import each
from agentrl.verifiers.boxes import last_boxed


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatPart:
    """1 if the last action has the wanted form, else 0; never a pass. A part for `Weighted`.

    `box`: the answer holds exactly one `\\boxed{…}`, and it is not empty. `reasoning_words`: the
    thinking block holds at least that many different words. Form can be had without being right
    (filler words pass): give it a small weight beside a part that decides.
    """

    box: bool = True
    reasoning_words: int = 0

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode."""
        return each(episodes, lambda e: Verdict(reward=float(self._fits(e))))

    def _fits(self, episode: Episode) -> bool:
        turns = episode.trajectory.turns
        if not turns:
            return False
        message = turns[-1].message
        boxes = len(re.findall(r"\\boxed\s*\{", message.content))
        boxed = boxes == 1 and bool((last_boxed(message.content) or "").strip())
        words = set(re.findall(r"\w{2,}", message.reasoning.casefold()))
        return (boxed or not self.box) and len(words) >= self.reasoning_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """The weighted sum of named parts: `{"correct": (1.0, NumericMatch()), …}`.

    Each part's reward is a component of the verdict; `decides` names the part whose `passed`
    counts as success. Where a part is invalid, the verdict is invalid and names it.

    Raises ConfigError when `decides` is no part, or a weight is not finite.
    """

    parts: Mapping[str, tuple[float, Verifier]]
    decides: str

    def __post_init__(self) -> None:
        if self.decides not in self.parts:
            raise ConfigError(f"decides={self.decides!r} is none of {', '.join(self.parts)}")
        for name, (weight, _) in self.parts.items():
            if not abs(weight) < float("inf"):
                raise ConfigError(f"the weight of {name} must be finite")

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode."""
        names = list(self.parts)
        graded = await asyncio.gather(
            *(self.parts[name][1].grade(problem, episodes, sandboxes) for name in names)
        )
        return [
            self._sum(dict(zip(names, verdicts, strict=True)))
            for verdicts in zip(*graded, strict=True)
        ]

    def _sum(self, verdicts: Mapping[str, Verdict]) -> Verdict:
        components: dict[str, float] = {}
        for name, verdict in verdicts.items():
            if verdict.reward is None:
                return Verdict(invalid=f"{name}: {verdict.invalid}")
            components[name] = verdict.reward
        return Verdict(
            reward=sum(self.parts[name][0] * part for name, part in components.items()),
            passed=verdicts[self.decides].passed,
            components=components,
            note="; ".join(v.note for v in verdicts.values() if v.note),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """Grades what a final tool was given: `argument` of the last call of `tool`, not the text.

    An episode whose last action does not call the tool has the empty answer.
    """

    tool: str
    argument: str
    verifier: Verifier

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """The inner verifier's verdicts."""
        return await self.verifier.grade(
            problem, [self._with_argument(e) for e in episodes], sandboxes
        )

    def _with_argument(self, episode: Episode) -> Episode:
        trajectory = episode.trajectory
        if not trajectory.turns:
            return episode
        *earlier, last = trajectory.turns
        shown = replace(last, message=replace(last.message, content=self._given(episode)))
        return replace(episode, trajectory=replace(trajectory, turns=(*earlier, shown)))

    def _given(self, episode: Episode) -> str:
        calls = [c for c in episode.trajectory.turns[-1].message.tool_calls if c.name == self.tool]
        if not calls or calls[-1].error is not None:
            return ""
        try:
            arguments = json.loads(calls[-1].arguments)
        except (ValueError, RecursionError):
            return ""
        value = arguments.get(self.argument, "") if isinstance(arguments, dict) else arguments
        return value if isinstance(value, str) else json.dumps(value)
