"""The loop: sample, step, grade, update, publish. One file, read top to bottom.

Groups are sampled in a first-in-first-out queue that runs at most `max_lag` steps ahead of the
learner; 0 is the synchronous algorithm. What is started is what is paced: a finished group is
never thrown away, so slow problems are trained as often as fast ones.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from agentrl.alarms import Watch
from agentrl.algorithms import AlgorithmConfig
from agentrl.data import ProblemStream
from agentrl.errors import NoSignal, TooManyFaults
from agentrl.evaluate import Evaluation
from agentrl.grading import GroupStatistics, statistics
from agentrl.learning.advantage import has_signal
from agentrl.learning.batch import collate
from agentrl.learning.earlier import earlier_groups
from agentrl.learning.lessons import histogram, lessons
from agentrl.protocols import Learner, Reporter, TrajectoryStore, WeightSync
from agentrl.rollout import Stage, run_group
from agentrl.types import Group, Problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much is sampled, learned and looked at.

    `groups` of `group_size` episodes make a step; `concurrency` episodes are in flight at most.
    The run stops when more than `max_fault_share` of a step's episodes are faults, or when
    `max_silent_steps` steps in a row have no group with two different rewards (0: never).
    """

    steps: int
    groups: int
    group_size: int
    concurrency: int
    max_lag: int
    eval_every: int
    checkpoint_every: int
    max_fault_share: float
    max_silent_steps: int
    seed: int


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything that the loop holds. `cursor` counts the problems that have been *trained*."""

    stage: Stage
    learner: Learner
    weights: WeightSync
    store: TrajectoryStore
    problems: ProblemStream
    algorithm: AlgorithmConfig
    pace: Pace
    checkpoint: Callable[[int], None]
    """Saves the learner with this cursor; a second call at the same version does nothing."""
    evaluate: Callable[[], Awaitable[Evaluation]]
    metrics: Callable[[Mapping[str, Any]], None]
    reporter: Reporter
    cursor: int = 0
    silent_steps: int = field(default=0)
    watch: Watch = field(default_factory=Watch)


async def train(run: Run) -> None:
    """Take steps until `run.pace.steps`; stopped early, it leaves a whole checkpoint behind.

    Raises TooManyFaults, NoSignal, NonFiniteLoss, WeightsNotApplied.
    """
    pace, learner = run.pace, run.learner
    try:
        await run.weights.publish(learner)
        if pace.eval_every and learner.version == 0:
            await look_up(run)
        async with sampling(run) as queue:
            run.reporter.phase("train", pace.steps - learner.version)
            while learner.version < pace.steps:
                await step(run, queue)
                if pace.eval_every and learner.version % pace.eval_every == 0:
                    await look_up(run)
                if pace.checkpoint_every and learner.version % pace.checkpoint_every == 0:
                    await in_thread(run.checkpoint, run.cursor)
                run.reporter.advance()
    finally:
        run.checkpoint(run.cursor)


async def step(run: Run, queue: "GroupQueue") -> None:
    """One turn of the loop, from groups to a line of metrics."""
    learner, clock = run.learner, Stopwatch()
    taken = await next_groups(run, queue)
    clock.lap("sample_s")
    run.store.append(taken, version=learner.version)
    run.problems.learn(taken)
    report = statistics(taken)
    stop_if_hopeless(run, report)

    batch = collate([*taken, *replayed(run)], run.algorithm)
    cursor = run.cursor + len(taken)

    def learn() -> Mapping[str, float]:
        stats = learner.update(batch)
        run.cursor = cursor  # in the same breath: a stop may come between any two awaits
        return stats

    trained_version = learner.version
    async with run.stage.engine.released() if run.pace.max_lag == 0 else nullcontext():
        stats = await in_thread(learn)
    clock.lap("update_s")
    taught = lessons(taken, run.algorithm)
    run.store.append_lessons(taught, stats, version=trained_version)
    await run.weights.publish(learner)
    clock.lap("publish_s")

    row = {"kind": "step", "step": trained_version, "version": learner.version}
    row |= {**stats, **report.as_row(), "lag": mean_lag(taken, trained_version), **clock.laps}
    row["advantages"] = histogram([a for lesson in taught for a in lesson.advantages])
    row["tokens_per_s"] = report.action_tokens / max(clock.total, 1e-9)
    write(run, row)


def write(run: Run, row: Mapping[str, Any]) -> None:
    """A line of metrics, and what it makes one worry about."""
    run.metrics(row)
    run.reporter.metrics(row)
    for words in run.watch.see(row):
        run.reporter.note(f"alarm: {words}")


async def next_groups(run: Run, queue: "GroupQueue") -> list[Group]:
    """The groups of a step, in the order they were started.

    Under the `drop` policy, groups without signal are replaced by further ones as far as the
    refill budget goes (dynamic sampling, 2503.14476 section 3.2); all that were taken come back.
    """
    want, algorithm = run.pace.groups, run.algorithm
    dropping = algorithm.zero_variance == "drop"
    budget = int(want * algorithm.refill) if dropping else want
    taken: list[Group] = []
    useful = 0
    while useful < want and len(taken) < budget:
        group = await queue.take()
        taken.append(group)
        useful += not dropping or has_signal(group, algorithm)
    return taken


def replayed(run: Run) -> Iterator[Group]:
    """Groups of earlier steps for this step's batch, as `replay_share` says."""
    count = round(run.algorithm.replay_share * run.pace.groups)
    version, seed = run.learner.version, run.pace.seed
    return earlier_groups(run.store, version=version, groups=count, seed=seed)


class GroupQueue:
    """Groups in flight, oldest first, never more than the lag allows.

    Before the learner has taken step v, the groups of steps 0 … v + max_lag may be started: so
    when a group is trained, its oldest token is at most max_lag versions old.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._flight: deque[asyncio.Task[Group]] = deque()
        self._next = run.cursor
        self._gate = asyncio.Semaphore(max(1, run.pace.concurrency // run.pace.group_size))

    async def take(self) -> Group:
        """Wait for the oldest group; starts what may be started first."""
        allowed = admitted(self._run.cursor, self._run.pace)
        while self._next < allowed or not self._flight:
            self._start()
        return await self._flight.popleft()

    async def close(self) -> None:
        """Stop what is in flight: untrained, so a resumed run samples it again."""
        for task in self._flight:
            task.cancel()
        await asyncio.gather(*self._flight, return_exceptions=True)

    def _start(self) -> None:
        index, run = self._next, self._run
        self._next += 1
        problem = run.problems.at(index)
        self._flight.append(asyncio.create_task(self._sample(index, problem, run)))

    async def _sample(self, index: int, problem: Problem, run: Run) -> Group:
        async with self._gate:
            return await run_group(
                run.stage,
                problem,
                size=run.pace.group_size,
                seed=group_seed(run.pace.seed, index),
            )


def admitted(cursor: int, pace: Pace) -> int:
    """How many groups may have been started in all when `cursor` have been trained.

    With full steps that is floor((N - 1) / groups) <= version + max_lag (2505.24298 equation 3).
    """
    return cursor + pace.groups * (pace.max_lag + 1)


@asynccontextmanager
async def sampling(run: Run) -> AsyncGenerator[GroupQueue]:
    """A queue whose groups all end with the block, however it ends."""
    queue = GroupQueue(run)
    try:
        yield queue
    finally:
        await queue.close()


def group_seed(seed: int, index: int) -> int:
    """The seed of the group at place `index` of the stream."""
    return Random(f"group:{seed}:{index}").getrandbits(48)


def stop_if_hopeless(run: Run, report: GroupStatistics) -> None:
    """Raise when the step can't teach anything worth its cost."""
    if report.episodes and report.faults / report.episodes > run.pace.max_fault_share:
        raise TooManyFaults(
            f"step {run.learner.version}: {report.faults} of {report.episodes} episodes failed for "
            f"infrastructure reasons, most of them like this: {report.fault_example}. Mend it, or "
            "raise run.max_fault_share"
        )
    run.silent_steps = 0 if report.groups_with_signal else run.silent_steps + 1
    if run.pace.max_silent_steps and run.silent_steps >= run.pace.max_silent_steps:
        raise NoSignal(
            f"no group had two different rewards in {run.silent_steps} steps (mean reward "
            f"{report.reward_mean:.3g}): the problems are too hard or too easy for this policy, or "
            "the verifier is constant; change the problems or warm start, or raise "
            "run.max_silent_steps"
        )


def mean_lag(groups: Sequence[Group], version: int) -> float:
    """Mean age of the sampled tokens, in policy versions."""
    ages = [
        version - sampled
        for group in groups
        for trajectory in group.trajectories
        for turn in trajectory.turns
        for sampled in turn.action.versions
    ]
    return sum(ages) / len(ages) if ages else 0.0


async def look_up(run: Run) -> None:
    """Evaluate on held-out problems and write a line of metrics."""
    evaluation = await run.evaluate()
    row = {
        "kind": "eval",
        "step": run.learner.version,
        "split": "test",
        "success": evaluation.success,
        "stderr": evaluation.stderr,
        "problems": evaluation.problems,
        "faults": evaluation.faults,
        "family_success": statistics(evaluation.groups).family_success,
    }
    write(run, row)


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run in a thread, and wait for it even when cancelled: no half-done update is left behind."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


class Stopwatch:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a lap."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """All laps together."""
        return sum(self.laps.values())
