"""From the rewards of a group to one advantage for each trajectory."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.algorithms import AlgorithmConfig

Floats = NDArray[np.float64]


def group_advantages(
    rewards: Sequence[Sequence[float]], algorithm: AlgorithmConfig
) -> list[Floats]:
    """The advantages of each group's members, fp64, in order.

    Over trajectories, whatever their number of turns, tokens or rows. A group of one, or whose
    rewards are all equal, gets exactly 0. Baseline and scale as in 2402.03300 equation 3
    (`group`), 2402.14740 (`leave_one_out`), 2508.08221 (`batch` scale).
    """
    centred = [_centre(np.asarray(group, np.float64), algorithm.baseline) for group in rewards]
    if algorithm.scale == "none":
        return centred
    if algorithm.scale == "group":
        return [_divide(c, group, algorithm) for c, group in zip(centred, rewards, strict=True)]
    everything = [reward for group in rewards for reward in group]
    return [_divide(c, everything, algorithm) for c in centred]


def _centre(rewards: Floats, baseline: str) -> Floats:
    if baseline == "none":
        return rewards
    if _is_constant(rewards):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if baseline == "leave_one_out":
        centred *= len(rewards) / (len(rewards) - 1)
    return centred


def _divide(centred: Floats, rewards: Sequence[float], algorithm: AlgorithmConfig) -> Floats:
    """Rounding would make the deviation of equal rewards tiny and not 0: equal is asked for."""
    spread = np.asarray(rewards, np.float64)
    if _is_constant(spread):
        return np.zeros_like(centred)
    return centred / (spread.std(ddof=algorithm.ddof) + algorithm.eps)


def _is_constant(rewards: Floats) -> bool:
    return len(rewards) < 2 or rewards.min() == rewards.max()
