"""How good the policy is on held-out problems: success and pass@k, with their uncertainty."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean, stdev

from agentrl.protocols import Reporter
from agentrl.rollout import Stage, run_group
from agentrl.types import Group, Problem

Z95 = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Success over problems, each tried `samples` times.

    `success` is the mean share of passed samples, `stderr` its standard error over problems (not
    over samples, which are not independent), `ci95` a Wilson interval. `pass_at_k` is the unbiased
    estimate of passing at least once in k samples. Problems that gave no verdict at all (faults)
    are left out of every figure and counted in `faults`.
    """

    problems: int
    samples: int
    success: float
    stderr: float
    ci95: tuple[float, float]
    pass_at_k: Mapping[int, float]
    faults: int
    groups: tuple[Group, ...]


async def run_groups(
    stage: Stage,
    problems: Sequence[Problem],
    *,
    size: int,
    seed: int,
    concurrency: int,
    reporter: Reporter,
) -> list[Group]:
    """Run every problem `size` times, at most `concurrency` episodes at once, and grade."""
    gate = asyncio.Semaphore(max(1, concurrency // size))
    reporter.phase("evaluate", len(problems))

    async def one(index: int, problem: Problem) -> Group:
        async with gate:
            group = await run_group(stage, problem, size=size, seed=seed + index)
        reporter.advance()
        return group

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(i, p)) for i, p in enumerate(problems)]
    return [task.result() for task in running]


def summarise(groups: Sequence[Group], *, samples: int) -> Evaluation:
    """The figures of graded groups."""
    outcomes = [[v.passed for v in g.member_verdicts if v.reward is not None] for g in groups]
    graded = [passed for passed in outcomes if passed]
    shares = [fmean(passed) for passed in graded]
    success = fmean(shares) if shares else 0.0
    stderr = stdev(shares) / sqrt(len(shares)) if len(shares) > 1 else 0.0
    return Evaluation(
        problems=len(graded),
        samples=samples,
        success=success,
        stderr=stderr,
        ci95=_wilson(success, stderr, len(graded)),
        pass_at_k={k: _pass_at(k, graded) for k in _powers_of_two(samples)},
        faults=sum(samples - len(passed) for passed in outcomes),
        groups=tuple(groups),
    )


def pass_at(k: int, *, passed: int, of: int) -> float:
    """Chance that k of `of` samples hold a passing one (2107.03374, equation 1)."""
    return 1.0 - comb(of - passed, k) / comb(of, k)


def _pass_at(k: int, graded: Sequence[Sequence[bool]]) -> float:
    enough = [pass_at(k, passed=sum(g), of=len(g)) for g in graded if len(g) >= k]
    return fmean(enough) if enough else 0.0


def _powers_of_two(limit: int) -> list[int]:
    return [k for k in (1 << i for i in range(limit.bit_length())) if k <= limit]


def _wilson(share: float, stderr: float, problems: int) -> tuple[float, float]:
    """Wilson's 95 % interval, with the number of independent tries that `stderr` implies."""
    if not problems:
        return (0.0, 1.0)
    n = share * (1 - share) / stderr**2 if stderr else float(problems)
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n))
    return (max(0.0, centre - half), min(1.0, centre + half))
