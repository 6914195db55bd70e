"""Why each trajectory of a step taught something, or nothing."""

from collections.abc import Sequence

from agentrl.algorithms import AlgorithmConfig
from agentrl.learning.advantage import has_signal, turn_advantages
from agentrl.lesson import Lesson
from agentrl.types import Ending, Group, Trajectory, Verdict


def lessons(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[Lesson]:
    """One lesson for each trajectory, in order: the advantages that `collate` gave its tokens.

    Raises RecordError as `collate` does.
    """
    dropping = algorithm.zero_variance == "drop"
    kept = [group for group in groups if not dropping or has_signal(group, algorithm)]
    taken = iter(turn_advantages(kept, algorithm))
    out: list[Lesson] = []
    for number, group in enumerate(groups):
        flat = not has_signal(group, algorithm)
        members = [None] * len(group.trajectories) if dropping and flat else next(taken)
        for place, (trajectory, verdict) in enumerate(
            zip(group.trajectories, group.verdicts, strict=True)
        ):
            advantages = members[place] or ()
            silent = _untrained(trajectory, verdict, algorithm, flat=flat)
            trained = 0 if silent else trajectory.action_tokens
            if silent is None and not any(advantages) and not _has_other_terms(algorithm):
                silent = "every member earned the same" if flat else "it earned the baseline"
            out.append(
                Lesson(
                    group=number,
                    trajectory_id=trajectory.id,
                    member=trajectory.member,
                    advantages=tuple(advantages),
                    trained_tokens=trained,
                    silent=silent,
                )
            )
    return out


def histogram(advantages: Sequence[float]) -> dict[str, int]:
    """How many turns had an advantage of which size; 0 stands alone, since it teaches nothing."""
    bins = {"< -2": 0, "-2 .. -1": 0, "-1 .. 0": 0, "0": 0, "0 .. 1": 0, "1 .. 2": 0, "> 2": 0}
    names = list(bins)
    for value in advantages:
        side = min(2, int(abs(value))) + 1 if value else 0
        bins[names[3 + (side if value > 0 else -side)]] += 1
    return bins


def _has_other_terms(algorithm: AlgorithmConfig) -> bool:
    """Whether a token with advantage 0 still has a gradient: from the KL or the entropy bonus."""
    return bool(algorithm.kl_coef or algorithm.entropy_coef)


def _untrained(
    trajectory: Trajectory, verdict: Verdict, algorithm: AlgorithmConfig, *, flat: bool
) -> str | None:
    """Why none of its tokens is in the loss; None if they are."""
    if verdict.invalid is not None:
        return f"no verdict: {verdict.invalid}"
    if not trajectory.turns:
        return "it ended before the first action"
    if flat and algorithm.zero_variance == "drop":
        return "its group was dropped: every member earned the same"
    if algorithm.mask_truncated and trajectory.ending is not Ending.ANSWERED:
        return f"it ended as {trajectory.ending.value}, and algorithm.mask_truncated is on"
    return None
