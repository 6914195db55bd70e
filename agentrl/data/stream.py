"""Which problem is next: an endless stream, with shares for families and a band of pass rates."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from random import Random
from typing import TypeVar

from agentrl.errors import ConfigError
from agentrl.types import Group, Problem

T = TypeVar("T")

_ANY = (0.0, 1.0)
_TRIES = 64
"""Problems looked at for one in the band; then any will do."""
_LOOK_AGAIN = 0.1
"""How often a problem outside the band is taken all the same: its pass rate has changed since."""


class ProblemStream:
    """An endless stream over problems: place `index` always has the same one, bands aside.

    Where weights differ, each family is a stream of its own (fresh permutations), drawn with its
    share of all weight; otherwise all problems are one. Problems whose last measured pass rate lies
    outside their band are passed over in most cases: which, follows from what `learn` was told.

    Raises ConfigError unless every weight is above 0 and they are the same within a family.
    """

    def __init__(self, problems: Sequence[Problem], *, seed: int) -> None:
        self._seed = seed
        self._rates: dict[str, float] = {}
        self._families: dict[str, list[Problem]] = {"": list(problems)}
        if len({p.weight for p in problems}) > 1:
            self._families = _by_family(problems)
        self._shares = [sum(p.weight for p in own) for own in self._families.values()]
        self._counts = dict.fromkeys(self._families, 0)
        self._order: list[tuple[str, int]] = []

    @property
    def has_band(self) -> bool:
        """Whether pass rates matter."""
        return any(p.pass_band != _ANY for own in self._families.values() for p in own)

    def at(self, index: int) -> Problem:
        """The problem at this place."""
        found = self._plain(index)
        for number in range(1, _TRIES):
            draw = Random(f"band:{self._seed}:{index}:{number}")
            if self._is_wanted(found) or draw.random() < _LOOK_AGAIN:
                return found
            others = self._families[self._family_at(index)[0]]
            found = others[draw.randrange(len(others))]
        return found

    def learn(self, groups: Iterable[Group]) -> None:
        """Take the pass rates of graded groups."""
        for group in groups:
            passed = [v.passed for v in group.member_verdicts if v.reward is not None]
            if passed:
                self._rates[group.task_id] = sum(passed) / len(passed)

    def _is_wanted(self, problem: Problem) -> bool:
        low, high = problem.pass_band
        return low <= self._rates.get(problem.task.id, low) <= high

    def _plain(self, index: int) -> Problem:
        family, place = self._family_at(index)
        # Without weights, the stream is the one that the seed alone gives.
        seed = f"{self._seed}:{family}" if len(self._families) > 1 else str(self._seed)
        return _problem_at(self._families[family], place, seed)

    def _family_at(self, index: int) -> tuple[str, int]:
        """The family of a place, and how many places before it have that family."""
        names = list(self._families)
        if len(names) == 1:
            return names[0], index
        while len(self._order) <= index:
            draw = Random(f"family:{self._seed}:{len(self._order)}")
            (family,) = draw.choices(names, self._shares)
            self._order.append((family, self._counts[family]))
            self._counts[family] += 1
        return self._order[index]


def _by_family(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    found: dict[str, list[Problem]] = {}
    for problem in problems:
        found.setdefault(problem.task.family, []).append(problem)
    for family, own in found.items():
        weights = {p.weight for p in own}
        if len(weights) > 1 or min(weights) <= 0:
            raise ConfigError(
                f"the problems of family {family!r} have different weights, or none above 0: "
                "give each kind of problem a family of its own"
            )
    return dict(sorted(found.items()))


def problem_at(problems: Sequence[T], index: int, seed: int) -> T:
    """Problem number `index` of an endless stream: a fresh permutation for each epoch."""
    return _problem_at(problems, index, str(seed))


def _problem_at(problems: Sequence[T], index: int, seed: str) -> T:
    epoch, place = divmod(index, len(problems))
    return problems[_permutation(seed, epoch, len(problems))[place]]


@lru_cache(maxsize=16)
def _permutation(seed: str, epoch: int, size: int) -> tuple[int, ...]:
    return tuple(Random(f"problems:{seed}:{epoch}").sample(range(size), size))
