"""Credit for single turns of a group's trajectories: steps, shared states, turn rewards.

Everything stays inside one group, and every function returns one number for each turn of each
graded member.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import fsum

from agentrl.algorithms import AlgorithmConfig
from agentrl.errors import RecordError
from agentrl.learning.moments import Numbers, centred, divided
from agentrl.types import Group, Trajectory, Verdict

Member = tuple[Trajectory, Verdict]


def graded_members(group: Group) -> list[Member]:
    """The members that have a reward, in order: of several segments, the first stands for all."""
    firsts = [places[0] for places in group.members]
    pairs = [(group.trajectories[p], group.verdicts[p]) for p in firsts]
    return [(trajectory, verdict) for trajectory, verdict in pairs if verdict.reward is not None]


def check_whole(group: Group) -> None:
    """Raise RecordError if a member has several segments: their turns can't be put in one row."""
    for places in group.members:
        if len(places) > 1:
            raise RecordError(
                f"trajectory {group.trajectories[places[0]].id} has {len(places)} segments, and "
                "credit for single turns needs one: use an algorithm.preset that reads outcomes"
            )


def step_rewards_of(trajectory: Trajectory, verdict: Verdict) -> Numbers:
    """One reward for each turn. Raises RecordError when the verdict has not as many."""
    if len(verdict.step_rewards) != len(trajectory.turns):
        raise RecordError(
            f"trajectory {trajectory.id}: {len(trajectory.turns)} turns and "
            f"{len(verdict.step_rewards)} step rewards; this algorithm.preset needs one for each "
            "turn: use a verifier that gives them, or another preset"
        )
    return verdict.step_rewards


def process_advantages(
    step_rewards: Sequence[Numbers], algorithm: AlgorithmConfig
) -> list[tuple[float, ...]]:
    """Process supervision for the members of one group, one number for each step.

    The sum of the normalised rewards of this and all later steps, with mean and deviation over
    all step rewards of the group (2402.03300 section 4.1.3). Longer episodes sum more terms.
    """
    every = [reward for steps in step_rewards for reward in steps]
    left = iter(_normal(every, algorithm))
    normal = [[next(left) for _ in steps] for steps in step_rewards]
    return [tuple(fsum(steps[j:]) for j in range(len(steps))) for steps in normal]


def state_advantages(
    states: Sequence[Sequence[object]],
    step_rewards: Sequence[Numbers],
    algorithm: AlgorithmConfig,
) -> list[tuple[float, ...]]:
    """Discounted returns compared among turns of one group that start from the same state.

    `states` and `step_rewards` hold one (hashable) state and one reward for each turn of each
    member. A state that was visited once gets exactly 0 (2505.10978 section 4). `scale
    none` is the paper's F_norm 1, `scale group` its deviation.
    """
    returns = [discounted(rewards, algorithm.discount) for rewards in step_rewards]
    visits: defaultdict[object, list[tuple[int, int]]] = defaultdict(list)
    for member, seen in enumerate(states):
        for turn, state in enumerate(seen):
            visits[state].append((member, turn))
    out = [[0.0] * len(seen) for seen in states]
    for places in visits.values():
        values = _normal([returns[m][t] for m, t in places], algorithm)
        for (member, turn), value in zip(places, values, strict=True):
            out[member][turn] = value
    return [tuple(row) for row in out]


def turn_reward_advantages(
    step_rewards: Sequence[Numbers], algorithm: AlgorithmConfig
) -> list[tuple[float, ...]]:
    """The reward of each turn but the last, normalised among the members that took that turn.

    The last turn has the outcome alone, so 0 here (2505.11821, here for any
    number of turns).
    """
    out = [[0.0] * len(rewards) for rewards in step_rewards]
    for turn in range(max((len(rewards) for rewards in step_rewards), default=0)):
        members = [m for m, rewards in enumerate(step_rewards) if turn < len(rewards) - 1]
        values = _normal([step_rewards[m][turn] for m in members], algorithm)
        for member, value in zip(members, values, strict=True):
            out[member][turn] = value
    return [tuple(row) for row in out]


def discounted(rewards: Numbers, discount: float) -> list[float]:
    """The return of each step: its reward and the discounted ones of all later steps."""
    out: list[float] = []
    value = 0.0
    for reward in reversed(rewards):
        value = reward + discount * value
        out.append(value)
    return out[::-1]


def turn_credit(group: Group, algorithm: AlgorithmConfig) -> list[tuple[float, ...]]:
    """What `algorithm.turn_credit` adds to each turn of each graded member, before its weight.

    `states`: a state is what the observation showed, token for token; a verdict without step
    rewards counts as its outcome on the last turn. `rewards` needs one step reward for each turn.
    """
    members = graded_members(group)
    if algorithm.turn_credit == "states":
        states = [[turn.observation.token_ids for turn in t.turns] for t, _ in members]
        return state_advantages(states, [_rewards_or_outcome(*m) for m in members], algorithm)
    return turn_reward_advantages([step_rewards_of(*m) for m in members], algorithm)


def _rewards_or_outcome(trajectory: Trajectory, verdict: Verdict) -> Numbers:
    if verdict.step_rewards or not trajectory.turns:
        return step_rewards_of(trajectory, verdict)
    return (*[0.0] * (len(trajectory.turns) - 1), verdict.reward or 0.0)


def _normal(values: Numbers, algorithm: AlgorithmConfig) -> list[float]:
    """Minus the mean and, with `scale group`, over the deviation."""
    apart = centred(values)
    if algorithm.scale != "group":
        return apart
    return divided(apart, values, ddof=algorithm.ddof, eps=algorithm.eps)
