"""Grades finished groups, and sums up what a step's groups were like.

A verdict that can't be had is invalid, never 0: the member is left out of baseline, loss and
success, and counted.
"""

import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any, TypeAlias

from agentrl.errors import Fault, VerifierFault
from agentrl.guard import blaming, until
from agentrl.protocols import SandboxProvider, Verifier
from agentrl.types import Episode, Group, Problem, Trajectory, Verdict

Outcome: TypeAlias = Episode | Fault
"""What became of a member: its episode, or the fault that took it."""
_EXAMPLE = 300
"""Characters of a fault that are kept as an example."""


async def grade_group(
    problem: Problem,
    outcomes: Sequence[Outcome],
    verifier: Verifier,
    *,
    sandboxes: SandboxProvider | None = None,
    timeout_s: float,
) -> Group:
    """Grade the members that have an episode, at most `timeout_s` seconds for all of them.

    The verifier gets `sandboxes` if the problem says that it runs code.

    Never raises for what a verifier does: if it raises, runs late or returns something else than
    one verdict for each episode, the verdicts are invalid and say why.
    """
    episodes = [o for o in outcomes if isinstance(o, Episode)]

    async def grade() -> Sequence[Any]:
        with blaming(VerifierFault, "grading"):
            opened_by = sandboxes if problem.grading is not None else None
            return list(await verifier.grade(problem, tuple(episodes), opened_by))

    verdicts = await _verdicts(episodes, grade, timeout_s) if episodes else ()
    graded = [row for e, v in zip(episodes, verdicts, strict=True) for row in _segments(e, v)]
    return Group(
        task_id=problem.task.id,
        trajectories=tuple(trajectory for trajectory, _, _ in graded),
        verdicts=tuple(verdict for _, verdict, _ in graded),
        faults=tuple(f"{type(o).__name__}: {o}" for o in outcomes if isinstance(o, Fault)),
        task=problem.task,
        artifacts=tuple(artifacts for _, _, artifacts in graded),
    )


def _segments(
    episode: Episode, verdict: Verdict
) -> Iterator[tuple[Trajectory, Verdict, Mapping[str, bytes]]]:
    """An episode's trajectories, each with the verdict: the step rewards are those of the first."""
    yield episode.trajectory, verdict, episode.artifacts
    for segment in episode.segments:
        yield segment, replace(verdict, step_rewards=()), episode.artifacts


async def _verdicts(
    episodes: Sequence[Episode],
    grade: Callable[[], Coroutine[Any, Any, Sequence[Any]]],
    timeout_s: float,
) -> Sequence[Verdict]:
    try:
        verdicts = await until(time.monotonic() + timeout_s, grade())
    except Fault as fault:
        return [_invalid(str(fault))] * len(episodes)
    except TimeoutError:
        return [_invalid(f"no verdict within {timeout_s:g} s")] * len(episodes)
    if len(verdicts) != len(episodes):
        reason = f"{len(verdicts)} verdicts for {len(episodes)} episodes"
        return [_invalid(reason)] * len(episodes)
    return [_checked(v, e.trajectory) for v, e in zip(verdicts, episodes, strict=True)]


def _checked(verdict: Any, trajectory: Trajectory) -> Verdict:
    if not isinstance(verdict, Verdict):
        return _invalid(f"a {type(verdict).__name__} is not a Verdict")
    steps, turns = len(verdict.step_rewards), len(trajectory.turns)
    if steps not in (0, turns):
        return _invalid(f"{steps} step rewards for {turns} turns")
    return verdict


def _invalid(reason: str) -> Verdict:
    return Verdict(invalid=f"VerifierFault: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """What the groups of a step were like.

    `episodes` counts all members, `faults` those without a verdict (lost, or invalid), by kind in
    `fault_kinds`. `group_kinds` counts groups that are `mixed` (different rewards), `solved` (all
    passed), `failed` (equal rewards, not all passed) or `faulted` (nobody graded). Rewards and
    success are over the graded members; `reward_stderr` is the standard error of the mean with
    groups as clusters (members of a group are not independent). Tokens are totals; `turns` is the
    mean number of actions, `length_passed` and `length_failed` the mean action tokens of graded
    episodes by outcome (0 without one); `tools_s` sums over episodes, which run side by side.
    `endings` and `tool_calls` (by status) are counts, `family_reward` and `family_success` means by
    the tasks' families, if they have any.
    """

    episodes: int
    groups: int
    groups_with_signal: int
    group_kinds: Mapping[str, int]
    reward_mean: float
    reward_stderr: float
    success_rate: float
    action_tokens: int
    observation_tokens: int
    turns: float
    length_passed: float
    length_failed: float
    tools_s: float
    faults: int
    fault_kinds: Mapping[str, int]
    endings: Mapping[str, int]
    tool_calls: Mapping[str, int]
    family_reward: Mapping[str, float]
    family_success: Mapping[str, float]
    fault_example: str
    """A fault of the kind that took most members; empty without faults."""

    def as_row(self) -> dict[str, Any]:
        """The fields by name, as a line of metrics."""
        return asdict(self)


def statistics(groups: Sequence[Group]) -> GroupStatistics:
    """Sum up groups; empty input gives zeros."""
    trajectories = [t for g in groups for t in g.trajectories]
    verdicts = [v for g in groups for v in g.member_verdicts]
    first = [g.trajectories[places[0]] for g in groups for places in g.members]
    graded = [v for v in verdicts if v.reward is not None]
    lost = [fault for g in groups for fault in g.faults]
    lost += [v.invalid for v in verdicts if v.invalid is not None]
    fault_kinds = _counted(map(_kind, lost))
    action_tokens = sum(t.action_tokens for t in trajectories)
    families = _by_family(groups)
    mean, stderr = _clustered_mean([g.rewards for g in groups if g.rewards])
    return GroupStatistics(
        episodes=len(graded) + len(lost),
        groups=len(groups),
        group_kinds=_counted(map(_outcome, groups)),
        groups_with_signal=sum(g.has_signal for g in groups),
        reward_mean=mean,
        reward_stderr=stderr,
        success_rate=sum(v.passed for v in graded) / len(graded) if graded else 0.0,
        action_tokens=action_tokens,
        observation_tokens=sum(len(t.token_ids) for t in trajectories) - action_tokens,
        turns=sum(len(t.turns) for t in trajectories) / len(first) if first else 0.0,
        length_passed=_mean_length(groups, passed=True),
        length_failed=_mean_length(groups, passed=False),
        tools_s=sum(float(t.metrics.get("tools_s", 0.0)) for t in trajectories),
        faults=len(lost),
        fault_kinds=fault_kinds,
        fault_example=max(lost, key=lambda f: fault_kinds[_kind(f)], default="")[:_EXAMPLE],
        endings=_counted(t.ending.value for t in first),
        tool_calls=_counted(event.status for t in trajectories for event in t.events),
        family_reward={name: _mean([v.reward or 0.0 for v in g]) for name, g in families.items()},
        family_success={name: _mean([v.passed for v in g]) for name, g in families.items()},
    )


def _clustered_mean(clusters: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean of all values and its cluster-robust standard error (0 for a single cluster).

    With equal sizes it is the standard error of the cluster means (Cameron & Miller 2015).
    """
    size, many = sum(len(c) for c in clusters), len(clusters)
    if not size:
        return 0.0, 0.0
    mean = sum(sum(c) for c in clusters) / size
    if many < 2:
        return mean, 0.0
    squares = sum(sum(x - mean for x in c) ** 2 for c in clusters)
    return mean, sqrt(squares * many / (many - 1)) / size


def _by_family(groups: Sequence[Group]) -> dict[str, list[Verdict]]:
    """The verdicts with a reward by family, in order of its name; "" is no family."""
    found: dict[str, list[Verdict]] = {}
    for group in groups:
        graded = [v for v in group.member_verdicts if v.reward is not None]
        if group.task is not None and group.task.family and graded:
            found.setdefault(group.task.family, []).extend(graded)
    return dict(sorted(found.items()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _outcome(group: Group) -> str:
    if not group.rewards:
        return "faulted"
    if group.has_signal:
        return "mixed"
    passed = all(verdict.passed for verdict in group.verdicts if verdict.reward is not None)
    return "solved" if passed else "failed"


def _mean_length(groups: Sequence[Group], *, passed: bool) -> float:
    lengths = [
        trajectory.action_tokens
        for group in groups
        for trajectory, verdict in zip(group.trajectories, group.verdicts, strict=True)
        if verdict.reward is not None and verdict.passed is passed
    ]
    return sum(lengths) / len(lengths) if lengths else 0.0


def _kind(fault: str) -> str:
    return fault.partition(":")[0]


def _counted(names: Any) -> dict[str, int]:
    return dict(sorted(Counter[str](names).items()))
