"""Groups of earlier steps, learned from once more."""

from collections.abc import Iterator
from random import Random

from agentrl.protocols import TrajectoryStore
from agentrl.types import Group


def earlier_groups(
    store: TrajectoryStore, *, version: int, groups: int, seed: int
) -> Iterator[Group]:
    """One group each of `groups` different steps before `version` (as many as there are).

    The draw depends on seed and version alone, so a resumed run draws the same. Raises RecordError
    when a step that was drawn can't be read.
    """
    draw = Random(f"earlier:{seed}:{version}")
    for step in sorted(draw.sample(range(version), min(groups, version))):
        found = list(store.read(version=step))
        if found:
            yield draw.choice(found)
