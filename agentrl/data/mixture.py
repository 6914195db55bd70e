"""Several environments as one."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Annotated, Any

from pydantic import Field

from agentrl.data.files import Share
from agentrl.errors import EnvironmentFault, PluginError
from agentrl.plugins import find_environment, problems_of
from agentrl.protocols import (
    Environment,
    EnvironmentClass,
    Harness,
    Sandbox,
    SandboxProvider,
    Script,
    Split,
    Tool,
    Verifier,
)
from agentrl.types import Episode, Message, Messages, Problem, Step, Task, Verdict

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def mix(**environments: EnvironmentClass | str) -> "MixedEnvironment":
    """One environment of several (classes, or names as in `environment.name`), by family.

    Each problem is played and graded by its own environment; only its tools are shown. Raises
    PluginError for a name that there is not, and for an environment that an agent program leads.
    """
    if not environments:
        raise PluginError("mix needs one environment at least")
    found = {
        family: find_environment(given) if isinstance(given, str) else given
        for family, given in environments.items()
    }
    led = [family for family, one in found.items() if isinstance(one(sandbox=None), Harness)]
    if led:
        raise PluginError(f"mix: {led[0]} is led by an agent program: train it by itself")
    return MixedEnvironment(found)


@dataclass(frozen=True, slots=True)
class MixedEnvironment:
    """An EnvironmentClass of several; see `mix`."""

    families: Mapping[str, EnvironmentClass]

    def __call__(self, *, sandbox: Sandbox | None) -> "MixedEpisode":
        """One episode, whose family its task says."""
        return MixedEpisode(self.families, sandbox)

    def problems(
        self,
        split: Split,
        *,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        weights: Mapping[str, Weight] | None = None,
        pass_band: tuple[Share, Share] = (0.0, 1.0),
    ) -> Iterator[Problem]:
        """The problems of all families in turn; `each` has the options of each by its name.

        `weights` are the shares of the groups that families get in training (1 where none is
        given); without any, each gets as many as it has problems. `pass_band`: see `from_files`.
        """
        each, weights = each or {}, weights or {}
        odd = sorted({*each, *weights} - set(self.families))
        if odd:
            raise ValueError(f"there is no family {odd[0]!r}: {', '.join(self.families)}")
        found: list[list[Problem]] = []
        for family, environment in self.families.items():
            own = problems_of(environment, split, each.get(family, {}))
            weight = weights.get(family, 1.0) / len(own) if weights else 1.0
            found.append([_outer(p, family, weight, pass_band) for p in own])
        # In turn, so that the first few are of all families.
        for row in zip_longest(*found):
            yield from (problem for problem in row if problem is not None)

    @property
    def verifier(self) -> Verifier:
        """Each group is graded by its family's verifier."""
        return _MixedVerifier(self.families)

    @property
    def scripts(self) -> Mapping[str, Script]:
        """The scripts that every family has."""
        first, *others = (set(one.scripts) for one in self.families.values())
        return {name: self._script(name) for name in sorted(first.intersection(*others))}

    def _script(self, name: str) -> Script:
        def script(problem: Problem) -> Generator[Message, Messages, None]:
            inner = _inner(problem)
            return self.families[problem.task.family].scripts[name](inner)

        return script


class MixedEpisode:
    """One episode of one of several environments."""

    def __init__(self, families: Mapping[str, EnvironmentClass], sandbox: Sandbox | None) -> None:
        self._families, self._sandbox = families, sandbox
        self._own: Environment | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        """The episode's tools; before its reset, those of all families."""
        if self._own is not None:
            return self._own.tools
        made = [one(sandbox=None) for one in self._families.values()]
        return tuple({tool.name: tool for one in made for tool in one.tools}.values())

    async def reset(self, task: Task, *, seed: int) -> tuple[Messages, Mapping[str, Any]]:
        """Start the episode in the environment of the task's family."""
        self._own = self._families[task.family](sandbox=self._sandbox)
        return await self._own.reset(_inner_task(task), seed=seed)

    async def step(self, action: Message) -> Step:
        """What the episode's own environment answers."""
        return await self._playing().step(action)

    async def artifacts(self) -> Mapping[str, bytes]:
        """What the episode's own environment leaves."""
        return await self._playing().artifacts()

    def _playing(self) -> Environment:
        if self._own is None:
            raise EnvironmentFault("step before reset")
        return self._own


@dataclass(frozen=True, slots=True)
class _MixedVerifier:
    families: Mapping[str, EnvironmentClass]

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        own = self.families[problem.task.family].verifier
        return await own.grade(_inner(problem), episodes, sandboxes)


def _outer(problem: Problem, family: str, weight: float, pass_band: tuple[float, float]) -> Problem:
    task = replace(problem.task, id=f"{family}/{problem.task.id}", family=family)
    return replace(problem, task=task, weight=weight, pass_band=pass_band)


def _inner(problem: Problem) -> Problem:
    return replace(problem, task=_inner_task(problem.task))


def _inner_task(task: Task) -> Task:
    """The task under the name that its own environment gave it."""
    return replace(task, id=task.id.removeprefix(f"{task.family}/"), family="")
