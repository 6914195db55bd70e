"""What the verifiers share: one verdict for each episode, and failures that stay with theirs."""

from collections.abc import Callable, Sequence

from agentrl.types import Episode, Verdict
from agentrl.verifiers.boxes import last_boxed


def each(episodes: Sequence[Episode], grade: Callable[[Episode], Verdict]) -> Sequence[Verdict]:
    """Grade the episodes one by one; what `grade` raises makes that one verdict invalid."""

    def one(episode: Episode) -> Verdict:
        try:
            return grade(episode)
        except Exception as error:
            return Verdict(invalid=f"{type(error).__name__}: {' '.join(str(error).split())}")

    return [one(episode) for episode in episodes]


def invalid(episodes: Sequence[Episode], reason: str) -> Sequence[Verdict]:
    """The same invalid verdict for every episode."""
    return [Verdict(invalid=reason)] * len(episodes)


def outcome(passed: bool, note: str = "") -> Verdict:
    """Reward 1 for a pass, else 0."""
    return Verdict(reward=float(passed), passed=passed, note=note)


def candidate(episode: Episode, *, require_box: bool) -> str | None:
    """What is compared: the last box of the answer, else the answer (None if a box is required)."""
    answer = episode.trajectory.answer
    box = last_boxed(answer)
    if box is not None:
        return box
    return None if require_box else answer
