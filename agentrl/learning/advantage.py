"""From the verdicts of a group to advantages: fp64, over trajectories, whatever their rows.

Sums are exactly rounded, so the order of the members changes no bit.
"""

from collections.abc import Iterator, Sequence
from math import fsum

from agentrl.algorithms import AlgorithmConfig
from agentrl.errors import RecordError
from agentrl.learning.credit import (
    Member,
    check_whole,
    graded_members,
    process_advantages,
    step_rewards_of,
    turn_credit,
)
from agentrl.learning.moments import Numbers, centred, deviation_of, divided
from agentrl.types import Group

TurnAdvantages = list[tuple[float, ...] | None]


def turn_advantages(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[TurnAdvantages]:
    """The advantage of each turn of each trajectory, in the order of the groups.

    None for a member whose verdict is invalid: it takes no part. Raises RecordError when step
    rewards or reward parts are missing that the algorithm needs.
    """
    if algorithm.baseline == "steps" or algorithm.turn_credit != "none":
        for group in groups:
            check_whole(group)
    if algorithm.baseline == "steps":
        return [
            _placed(group, process_advantages(_step_rewards(group), algorithm)) for group in groups
        ]
    out: list[TurnAdvantages] = []
    for group, values in zip(groups, _outcomes(groups, algorithm), strict=True):
        rows = [(value,) * most for most, value in zip(_most_turns(group), values, strict=True)]
        if algorithm.turn_credit != "none":
            extra = turn_credit(group, algorithm)
            rows = [
                tuple(a + algorithm.turn_coef * b for a, b in zip(row, more, strict=True))
                for row, more in zip(rows, extra, strict=True)
            ]
        out.append(_placed(group, rows))
    return out


def group_advantages(
    rewards: Sequence[Numbers], algorithm: AlgorithmConfig
) -> list[tuple[float, ...]]:
    """The advantage of each group's members, in order.

    With a group or leave-one-out baseline, a group of one or of equal rewards gets exactly 0.
    Baseline `value` is the learner's: the outcomes come back as they are.
    Baselines: `group` 2402.03300 section 4.1.2, `leave_one_out` 2402.14740 equation 8, `batch`
    2501.03262. Scales: `group` 2402.03300, `batch` 2508.08221, `centred` 2501.03262, `others`:
    the deviation of the other members, not divided where they are all equal.
    """
    if algorithm.baseline == "value":
        return [tuple(group) for group in rewards]
    every = [reward for group in rewards for reward in group]
    if algorithm.baseline == "batch":
        apart = _split(centred(every), rewards)
    else:
        apart = [centre(group, algorithm.baseline) for group in rewards]
    pairs = zip(apart, rewards, strict=True)
    match algorithm.scale:
        case "none":
            return [tuple(c) for c in apart]
        case "group":
            return [tuple(_divide(c, group, algorithm)) for c, group in pairs]
        case "others":
            return [tuple(_divide_by_others(c, group, algorithm)) for c, group in pairs]
        case "batch":
            return [tuple(_divide(c, every, algorithm)) for c in apart]
        case "centred":
            spread = [value for group in apart for value in group]
            return [tuple(_divide(c, spread, algorithm)) for c in apart]


def part_advantages(
    groups: Sequence[Sequence[Numbers]], weights: Numbers, algorithm: AlgorithmConfig
) -> list[tuple[float, ...]]:
    """Each part of the reward normalised in its own group, then weighted and summed (GDPO).

    `groups` holds the parts of each member, in the order of `weights` (2601.05242). A rare part
    keeps its voice beside a loud one. The sum is not yet divided by the deviation of the batch.
    """
    columns = [group_advantages(list(zip(*members, strict=True)), algorithm) for members in groups]
    return [
        tuple(
            fsum(w * value for w, value in zip(weights, values, strict=True))
            for values in zip(*parts, strict=True)
        )
        for parts in columns
    ]


def overlong_penalty(action_tokens: int, length_tokens: tuple[int, int]) -> float:
    """0 up to L - c action tokens, then linearly down to -1 at L (2503.14476 equation 13)."""
    length, buffer = length_tokens
    if not buffer:
        return 0.0
    return max(-1.0, min(0.0, (length - buffer - action_tokens) / buffer))


def has_signal(group: Group, algorithm: AlgorithmConfig) -> bool:
    """Whether the members' rewards differ: the outcome, or what the algorithm reads in its place.

    Length shaping doesn't count: a group of right answers is no lesson in brevity alone
    (2503.14476 section 3.2).
    """
    members = graded_members(group)
    if algorithm.baseline == "steps":
        return len({reward for _, verdict in members for reward in verdict.step_rewards}) > 1
    if algorithm.turn_credit != "none":
        differs = (value != 0 for row in turn_credit(group, algorithm) for value in row)
        return group.has_signal or any(differs)
    if algorithm.reward == "total":
        return group.has_signal
    return len({_rewards(member, algorithm) for member in members}) > 1


def centre(rewards: Numbers, baseline: str) -> list[float]:
    """The rewards of one group minus its mean, or minus the mean of the other members."""
    if baseline == "none":
        return list(rewards)
    size = len(rewards)
    factor = size / (size - 1) if baseline == "leave_one_out" and size > 1 else 1.0
    return [value * factor for value in centred(rewards)]


def _outcomes(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[tuple[float, ...]]:
    """One number for each graded member of each group."""
    rewards = [[_rewards(m, algorithm) for m in graded_members(group)] for group in groups]
    if algorithm.reward != "parts":
        return group_advantages([[total for (total,) in group] for group in rewards], algorithm)
    weights = [algorithm.part_weights.get(name, 1.0) for name in _part_names(groups)]
    sums = part_advantages(rewards, weights, algorithm)
    every = [value for group in sums for value in group]
    return [tuple(row) for row in _split(_divide(centred(every), every, algorithm), sums)]


def _rewards(member: Member, algorithm: AlgorithmConfig) -> tuple[float, ...]:
    """The reward of a member: one number, or one for each part, in the order of their names."""
    trajectory, verdict = member
    if algorithm.reward == "passed":
        return (float(verdict.passed),)
    if algorithm.reward == "parts":
        return tuple(value for _, value in sorted(verdict.components.items()))
    shaped = overlong_penalty(trajectory.action_tokens, algorithm.length_tokens)
    return ((verdict.reward or 0.0) + shaped,)


def _part_names(groups: Sequence[Group]) -> list[str]:
    """The names of the parts, in order. Raises RecordError unless all members have the same."""
    wanted: list[str] | None = None
    for trajectory, verdict in (member for group in groups for member in graded_members(group)):
        names = sorted(verdict.components)
        wanted = names if wanted is None else wanted
        if not names or names != wanted:
            raise RecordError(
                f"trajectory {trajectory.id}: its verdict has the parts {names}, but "
                f"{wanted or 'at least one part'} is needed: use a verifier that gives the same "
                "components to every member, or set algorithm.reward total"
            )
    return wanted or []


def _step_rewards(group: Group) -> list[Numbers]:
    return [step_rewards_of(*member) for member in graded_members(group)]


def _most_turns(group: Group) -> list[int]:
    """The turns of each graded member's longest segment."""
    graded = [places for places in group.members if group.verdicts[places[0]].reward is not None]
    return [max(len(group.trajectories[p].turns) for p in places) for places in graded]


def _placed(group: Group, rows: Sequence[tuple[float, ...]]) -> TurnAdvantages:
    """The rows of the graded members at the places of their segments, None at the others."""
    left = iter(rows)
    out: TurnAdvantages = []
    for places in group.members:
        row = None if group.verdicts[places[0]].reward is None else next(left)
        out += [row and row[: len(group.trajectories[p].turns)] for p in places]
    return out


def _split(values: Numbers, like: Sequence[Numbers]) -> list[list[float]]:
    left: Iterator[float] = iter(values)
    return [[next(left) for _ in group] for group in like]


def _divide(apart: Numbers, spread: Numbers, algorithm: AlgorithmConfig) -> list[float]:
    return divided(apart, spread, ddof=algorithm.ddof, eps=algorithm.eps)


def _divide_by_others(apart: Numbers, rewards: Numbers, algorithm: AlgorithmConfig) -> list[float]:
    out: list[float] = []
    for member, value in enumerate(apart):
        others = [*rewards[:member], *rewards[member + 1 :]]
        deviation = deviation_of(others, algorithm.ddof)
        out.append(value / (deviation + algorithm.eps) if deviation else value)
    return out
