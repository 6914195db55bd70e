"""The quickstart made small: a real run in seconds."""

from collections.abc import Iterable
from pathlib import Path

from agentrl.types import Group

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SMALL = (
    "model.tiny_layers=1", "model.tiny_hidden=32", "warm_start.steps=60", "warm_start.traces=48",
    "warm_start.batch=16", "rollout.groups=2", "rollout.group_size=4", "run.eval_problems=4",
    "run.eval_every=2", "run.steps=2", "environment.options={digits: 1, count: 50}",
)  # fmt: skip

COIN = """
from agentrl_environments.calculator import Calculator
from agentrl.types import Verdict


class Coin:
    async def grade(self, problem, episodes, sandboxes):
        sums = [sum(e.trajectory.token_ids) for e in episodes]
        return [Verdict(reward=s % 3 / 2, passed=s % 3 == 2) for s in sums]


class Gamble(Calculator):
    verifier = Coin()
"""
"""A verifier that any policy pleases now and then, so that groups have signal at once."""


def masks_are_the_sampled_tokens(groups: Iterable[Group]) -> None:
    """What a trajectory's mask marks is what was sampled, by another way of counting."""
    for trajectory in (t for group in groups for t in group.trajectories):
        sampled = [i for turn in trajectory.turns for i in turn.action.token_ids]
        masked = [i for i, m in zip(trajectory.token_ids, trajectory.action_mask, strict=True) if m]
        assert sampled == masked
