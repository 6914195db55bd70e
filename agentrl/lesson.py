"""What the learner made of a trajectory: recorded beside it once the step is taken."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One trajectory as the learner saw it.

    `group` is the place of its group in the step. `advantages` has one number for each turn (before
    a KL in the reward), empty if it took no part; `trained_tokens` counts the tokens whose loss was
    summed. `silent` says why it gave no gradient; None if it gave one.
    """

    group: int
    trajectory_id: str
    member: int
    advantages: tuple[float, ...]
    trained_tokens: int
    silent: str | None = None
