"""Replay, sixth rung: the learner alone, on a recorded step.

The batch is built again from the record, and the update is taken by the learner as it was: on the
machine that trained, loss and gradient norm come out as they were. With another algorithm it says
what that would have made of the same trajectories.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from agentrl.algorithms import AlgorithmConfig
from agentrl.learning.batch import Batch, collate
from agentrl.learning.learner import PolicyLearner
from agentrl.learning.lessons import lessons
from agentrl.lesson import Lesson
from agentrl.types import Group

SAME = ("loss", "grad_norm", "action_tokens", "ratio_mean", "clip_share", "mismatch_k3")
"""What is compared with the record; the rest follows from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """How hard one sampled token pulls at the weights: d loss / d logprob (below 0: likelier)."""

    turn: int
    token: int
    id: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one trajectory contributes: the sum of |pull|, its part of the batch, its hardest pulls.

    `lesson` says why it is silent, if it is.
    """

    lesson: Lesson
    pull: float
    share: float
    hardest: tuple[Pull, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relearned:
    """One update taken again. `recorded` is empty where nobody kept its statistics."""

    version: int
    stats: Mapping[str, float]
    recorded: Mapping[str, float]
    shares: tuple[Share, ...]

    def differences(self, *, tolerance: float = 1e-5) -> dict[str, tuple[float, float]]:
        """Statistics that are not as recorded: then and now. Relative, absolute below 1e-3."""
        return {
            name: (self.recorded[name], self.stats[name])
            for name in SAME
            if name in self.recorded
            and abs(self.stats[name] - self.recorded[name])
            > tolerance * max(abs(self.recorded[name]), 1e-3)
        }


def relearn(
    learner: PolicyLearner,
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    recorded: Mapping[str, float],
    earlier: Iterable[Group] = (),
    hardest: int = 5,
) -> Relearned:
    """Take the step of `learner.version` on recorded groups; the learner goes on by one version.

    `algorithm` is the learner's own, `earlier` are groups of other steps that were in the batch.
    Raises what `collate` and `PolicyLearner.update` raise.
    """
    version, batch = learner.version, collate([*groups, *earlier], algorithm)
    pulls = learner.pulls(batch)
    shares = _shares(lessons(groups, algorithm), batch, pulls, hardest)
    stats = learner.update(batch)
    return Relearned(version=version, stats=stats, recorded=recorded, shares=tuple(shares))


def _shares(taught: Sequence[Lesson], batch: Batch, pulls: Tensor, hardest: int) -> list[Share]:
    total = float(pulls.abs().sum())
    row = 0
    out: list[Share] = []
    for lesson in taught:
        if not lesson.advantages:
            out.append(Share(lesson=lesson, pull=0.0, share=0.0, hardest=()))
            continue
        columns = batch.columns([row])
        row += 1
        own = float(pulls[columns].abs().sum())
        out.append(
            Share(
                lesson=lesson,
                pull=own,
                share=own / total if total else 0.0,
                hardest=tuple(_hardest(batch, columns, pulls, hardest)),
            )
        )
    return out


def _hardest(batch: Batch, columns: Tensor, pulls: Tensor, count: int) -> list[Pull]:
    values, turns, ids = (x[columns].tolist() for x in (pulls, batch.turns, batch.input_ids))
    order = sorted(range(len(values)), key=lambda n: -abs(values[n]))[:count]
    return [
        Pull(turn=turns[n], token=n - turns.index(turns[n]), id=ids[n], value=values[n])
        for n in order
        if values[n]
    ]
