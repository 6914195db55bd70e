"""From the verdicts of a group to advantages: fp64, over trajectories, whatever their rows.

Sums are exactly rounded (`fsum`), so the order of the members changes no bit.
"""

from collections.abc import Sequence
from math import fsum, sqrt

from agentrl.algorithms import AlgorithmConfig
from agentrl.errors import RecordError
from agentrl.types import Group, Trajectory, Verdict

Numbers = Sequence[float]


def turn_advantages(
    groups: Sequence[Group], algorithm: AlgorithmConfig
) -> list[list[tuple[float, ...] | None]]:
    """The advantage of each turn of each trajectory, in the order of the groups.

    None for a member whose verdict is invalid: it takes no part. Raises RecordError when process
    supervision is asked for and a trajectory has not one step reward for each turn.
    """
    if algorithm.baseline == "steps":
        return [_process(group, algorithm) for group in groups]
    rewards = [
        [
            verdict.reward + overlong_penalty(trajectory.action_tokens, algorithm.length_tokens)
            for trajectory, verdict in zip(group.trajectories, group.verdicts, strict=True)
            if verdict.reward is not None
        ]
        for group in groups
    ]
    out: list[list[tuple[float, ...] | None]] = []
    for group, values in zip(groups, group_advantages(rewards, algorithm), strict=True):
        left = iter(values)
        out.append(
            [
                None if verdict.reward is None else (next(left),) * len(trajectory.turns)
                for trajectory, verdict in zip(group.trajectories, group.verdicts, strict=True)
            ]
        )
    return out


def group_advantages(
    rewards: Sequence[Numbers], algorithm: AlgorithmConfig
) -> list[tuple[float, ...]]:
    """The advantage of each group's members, in order.

    With a group or leave-one-out baseline, a group of one or of equal rewards gets exactly 0.
    Baselines: `group` 2402.03300 section 4.1.2, `leave_one_out` 2402.14740 equation 8, `batch`
    2501.03262. Scales: `group` 2402.03300, `batch` 2508.08221, `centred` 2501.03262, `others`:
    the deviation of the other members, not divided where they are all equal.
    """
    every = [reward for group in rewards for reward in group]
    if algorithm.baseline == "batch":
        mean = _mean(every)
        flat = _is_constant(every)
        centred = [[0.0 if flat else r - mean for r in group] for group in rewards]
    else:
        centred = [centre(group, algorithm.baseline) for group in rewards]
    match algorithm.scale:
        case "none":
            return [tuple(c) for c in centred]
        case "group":
            pairs = zip(centred, rewards, strict=True)
            return [tuple(_divide(c, group, algorithm)) for c, group in pairs]
        case "others":
            pairs = zip(centred, rewards, strict=True)
            return [tuple(_divide_by_others(c, group, algorithm)) for c, group in pairs]
        case "batch":
            return [tuple(_divide(c, every, algorithm)) for c in centred]
        case "centred":
            spread = [value for group in centred for value in group]
            return [tuple(_divide(c, spread, algorithm)) for c in centred]


def process_advantages(
    step_rewards: Sequence[Numbers], algorithm: AlgorithmConfig
) -> list[tuple[float, ...]]:
    """Process supervision for the members of one group, one number for each step.

    The sum of the normalised rewards of this and all later steps, with mean and deviation over
    all step rewards of the group (2402.03300 section 4.1.3). Longer episodes sum more terms.
    """
    every = [reward for steps in step_rewards for reward in steps]
    mean, flat = _mean(every), _is_constant(every)
    out: list[tuple[float, ...]] = []
    for steps in step_rewards:
        centred = [0.0 if flat else reward - mean for reward in steps]
        normal = _divide(centred, every, algorithm) if algorithm.scale == "group" else centred
        out.append(tuple(fsum(normal[j:]) for j in range(len(normal))))
    return out


def overlong_penalty(action_tokens: int, length_tokens: tuple[int, int]) -> float:
    """0 up to L - c action tokens, then linearly down to -1 at L (2503.14476 equation 13)."""
    length, buffer = length_tokens
    if not buffer:
        return 0.0
    return max(-1.0, min(0.0, (length - buffer - action_tokens) / buffer))


def has_signal(group: Group, algorithm: AlgorithmConfig) -> bool:
    """Whether members earned different rewards (or step rewards, if those are the baseline's)."""
    if algorithm.baseline != "steps":
        return group.has_signal
    graded = (verdict for verdict in group.verdicts if verdict.reward is not None)
    return len({reward for verdict in graded for reward in verdict.step_rewards}) > 1


def centre(rewards: Numbers, baseline: str) -> list[float]:
    """The rewards of one group minus its mean, or minus the mean of the other members."""
    if baseline == "none":
        return list(rewards)
    if _is_constant(rewards):
        return [0.0] * len(rewards)
    mean, size = _mean(rewards), len(rewards)
    factor = size / (size - 1) if baseline == "leave_one_out" else 1.0
    return [(reward - mean) * factor for reward in rewards]


def _process(group: Group, algorithm: AlgorithmConfig) -> list[tuple[float, ...] | None]:
    pairs = list(zip(group.trajectories, group.verdicts, strict=True))
    graded = [_step_rewards(t, v) for t, v in pairs if v.reward is not None]
    values = iter(process_advantages(graded, algorithm))
    return [None if verdict.reward is None else next(values) for _, verdict in pairs]


def _step_rewards(trajectory: Trajectory, verdict: Verdict) -> Numbers:
    if len(verdict.step_rewards) != len(trajectory.turns):
        raise RecordError(
            f"trajectory {trajectory.id}: {len(trajectory.turns)} turns and "
            f"{len(verdict.step_rewards)} step rewards; process supervision needs one for each "
            "turn: use a verifier that gives them, or another algorithm.preset"
        )
    return verdict.step_rewards


def _divide(centred: Numbers, spread: Numbers, algorithm: AlgorithmConfig) -> list[float]:
    deviation = _deviation(spread, algorithm.ddof)
    return [value / (deviation + algorithm.eps) if deviation else 0.0 for value in centred]


def _divide_by_others(
    centred: Numbers, rewards: Numbers, algorithm: AlgorithmConfig
) -> list[float]:
    out: list[float] = []
    for member, value in enumerate(centred):
        others = [*rewards[:member], *rewards[member + 1 :]]
        deviation = _deviation(others, algorithm.ddof)
        out.append(value / (deviation + algorithm.eps) if deviation else value)
    return out


def _mean(values: Numbers) -> float:
    return fsum(values) / len(values) if values else 0.0


def _deviation(values: Numbers, ddof: int) -> float:
    """0 exactly for equal values, where rounding would leave something tiny to divide by."""
    if _is_constant(values):
        return 0.0
    mean = _mean(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def _is_constant(values: Numbers) -> bool:
    return len(values) < 2 or min(values) == max(values)
