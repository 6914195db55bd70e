"""Second rung: does a verifier, the same or another, still say so?

It sees what it saw then: the trajectories and the recorded artifacts. A verifier that runs code
opens its own fresh sandbox, as in training.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import RecordError
from agentrl.grading import grade_group
from agentrl.protocols import SandboxProvider, Verifier
from agentrl.types import Episode, Group, Problem, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Regraded:
    """One trajectory's verdict then and now."""

    trajectory_id: str
    before: Verdict
    after: Verdict

    @property
    def changed(self) -> bool:
        """Whether anything but the note differs."""
        return _what_counts(self.before) != _what_counts(self.after)


async def regrade(
    group: Group,
    problem: Problem,
    verifier: Verifier,
    *,
    sandboxes: SandboxProvider | None = None,
    timeout_s: float,
) -> Sequence[Regraded]:
    """Grade a recorded group again, at most `timeout_s` seconds for all of it.

    Raises RecordError when the problem names artifacts and the record has kept none.
    """
    if problem.task.artifacts and not group.artifacts:
        raise RecordError(
            f"group {group.task_id}: its verifier reads {', '.join(problem.task.artifacts)}, but "
            "the record was written before artifacts were kept"
        )
    artifacts = group.artifacts or ({},) * len(group.trajectories)
    episodes = [
        Episode(
            trajectory=group.trajectories[first],
            segments=tuple(group.trajectories[place] for place in further),
            artifacts=artifacts[first],
        )
        for first, *further in group.members
    ]
    again = await grade_group(problem, episodes, verifier, sandboxes=sandboxes, timeout_s=timeout_s)
    return [
        Regraded(trajectory_id=trajectory.id, before=before, after=after)
        for trajectory, before, after in zip(
            group.trajectories, group.verdicts, again.verdicts, strict=True
        )
    ]


def _what_counts(verdict: Verdict) -> object:
    return (
        verdict.reward,
        verdict.passed,
        verdict.invalid is None,
        dict(verdict.components),
        verdict.step_rewards,
    )
