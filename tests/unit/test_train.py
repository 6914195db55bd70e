"""The loop, with fakes at every seam."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.alarms import Watch
from agentrl.algorithms import AlgorithmConfig
from agentrl.data import ProblemStream, problem_at
from agentrl.errors import NonFiniteLoss, NoSignal, TooManyFaults
from agentrl.evaluate import summarise
from agentrl.lesson import Lesson
from agentrl.rollout import Stage
from agentrl.testing.fakes import (
    CharRenderer,
    FakeEnvironment,
    FakeVerifier,
    FixedEngine,
    ScriptedEngine,
    a_problem,
)
from agentrl.train import Pace, Run, group_seed, in_thread, train
from agentrl.types import Group


class FakeLearner:
    def __init__(self, version: int = 0, fail_at: int | None = None) -> None:
        self.version = version
        self.fail_at = fail_at
        self.batches: list[Any] = []

    def update(self, batch: Any) -> Mapping[str, float]:
        if self.version == self.fail_at:
            raise NonFiniteLoss("loss is nan")
        self.batches.append(batch)
        self.version += 1
        return {"loss": 0.0}

    def weights(self) -> Iterator[Any]:
        return iter(())

    def logprobs(self, token_ids: Sequence[int], temperature: float) -> Sequence[float]:
        return ()


class FakeWeights:
    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    async def publish(self, learner: FakeLearner) -> None:
        self.engine.version = learner.version


class MemoryStore:
    def __init__(self) -> None:
        self.steps: dict[int, list[Group]] = {}
        self.lessons: dict[int, list[Lesson]] = {}

    def append(self, groups: Sequence[Group], *, version: int) -> None:
        self.steps[version] = list(groups)

    def append_lessons(
        self, lessons: Sequence[Lesson], stats: Mapping[str, float], *, version: int
    ) -> None:
        self.lessons[version] = list(lessons)

    def read(self, *, version: int | None = None) -> Iterator[Group]:
        for step in sorted(self.steps) if version is None else [version]:
            yield from self.steps[step]


class Silent:
    def phase(self, name: str, total: int | None) -> None: ...
    def advance(self, units: int = 1) -> None: ...
    def metrics(self, row: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


def by_member(problem: Any, episode: Any) -> float:
    return float(episode.trajectory.member % 2)


class Bench:
    """A run over fakes, with what it wrote."""

    def __init__(
        self,
        *,
        engine: ScriptedEngine | None = None,
        rate: Callable[[Any, Any], float] = by_member,
        learner: FakeLearner | None = None,
        algorithm: AlgorithmConfig | None = None,
        cursor: int = 0,
        **pace: Any,
    ) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.saved: list[tuple[int, int]] = []
        self.engine = engine or FixedEngine("x")
        self.learner = learner or FakeLearner()
        self.store = MemoryStore()
        settings = {
            "steps": 3, "groups": 2, "group_size": 2, "concurrency": 64, "max_lag": 0,
            "eval_every": 0, "checkpoint_every": 0, "max_fault_share": 0.5,
            "max_silent_steps": 0, "seed": 0,
        }  # fmt: skip
        environment = FakeEnvironment(verifier=FakeVerifier(rate=rate))
        self.run = Run(
            stage=Stage(engine=self.engine, renderer=CharRenderer(), environment=environment),
            learner=self.learner,
            weights=FakeWeights(self.engine),
            store=self.store,
            problems=ProblemStream([a_problem(f"p{i}", id=f"p{i}") for i in range(5)], seed=0),
            algorithm=algorithm or AlgorithmConfig(zero_variance="keep"),
            pace=Pace(**settings | pace),
            checkpoint=lambda cursor: self.saved.append((self.learner.version, cursor)),
            evaluate=self.evaluate,
            metrics=self.rows.append,
            reporter=Silent(),
            cursor=cursor,
        )

    async def evaluate(self) -> Any:
        return summarise([], samples=1)

    def trained(self) -> list[str]:
        return [g.task_id for g in self.store.read()]


def in_order(count: int, seed: int = 0) -> list[str]:
    return [problem_at([f"p{i}" for i in range(5)], i, seed) for i in range(count)]  # type: ignore[list-item]


async def test_each_step_trains_the_next_problems_once() -> None:
    bench = Bench(steps=4)
    await train(bench.run)
    assert bench.trained() == in_order(8)
    assert [row["step"] for row in bench.rows] == [0, 1, 2, 3]
    assert [row["version"] for row in bench.rows] == [1, 2, 3, 4]
    assert bench.saved == [(4, 8)]


async def test_a_resumed_run_goes_on_where_the_trained_problems_end() -> None:
    first, second = Bench(steps=2), Bench(steps=4, cursor=4, learner=FakeLearner(version=2))
    await train(first.run)
    await train(second.run)
    whole = Bench(steps=4)
    await train(whole.run)
    assert first.trained() + second.trained() == whole.trained()
    seeds = [t.seed for b in (first, second) for g in b.store.read() for t in g.trajectories]
    assert seeds == [t.seed for g in whole.store.read() for t in g.trajectories]


async def test_earlier_groups_are_learned_from_again_as_replay_share_says() -> None:
    algorithm = AlgorithmConfig(zero_variance="keep", mismatch="none", replay_share=0.5)
    bench, again = (Bench(steps=6, groups=4, algorithm=algorithm) for _ in range(2))
    await train(bench.run)
    await train(again.run)
    rows = [len(batch.lengths) for batch in bench.learner.batches]
    assert rows == [8, 8 + 2, 8 + 4, 8 + 4, 8 + 4, 8 + 4], "two of four groups, once there are"
    for batch in bench.learner.batches[1:]:
        fresh = max(batch.versions.tolist())
        assert min(v for v in batch.versions.tolist() if v >= 0) < fresh
    drawn = [[b.versions.tolist() for b in x.learner.batches] for x in (bench, again)]
    assert drawn[0] == drawn[1], "the draw depends on seed and version alone"


async def test_groups_are_stored_before_the_learner_sees_them() -> None:
    bench = Bench(learner=FakeLearner(fail_at=1))
    with pytest.raises(NonFiniteLoss):
        await train(bench.run)
    assert sorted(bench.store.steps) == [0, 1]
    assert bench.saved == [(1, 2)], "the checkpoint holds what was trained, not what was sampled"


async def test_synchronous_training_is_on_policy() -> None:
    bench = Bench(steps=3)
    await train(bench.run)
    for version, groups in bench.store.steps.items():
        for group in groups:
            for trajectory in group.trajectories:
                assert set(trajectory.versions) - {None} == {version}
    assert all(row["lag"] == 0 for row in bench.rows)


@given(st.integers(0, 3), st.integers(1, 3), st.lists(st.integers(0, 4), min_size=1, max_size=30))
@settings(max_examples=25, deadline=None)
def test_no_token_is_older_than_the_lag_allows(lag: int, groups: int, delays: list[int]) -> None:
    class Uneven(FixedEngine):
        async def sample(self, prompt_ids: Any, sampling: Any, *, session: str) -> Any:
            place = len(self.requests)
            version = self.version
            action = await super().sample(prompt_ids, sampling, session=session)
            for _ in range(delays[place % len(delays)]):
                await asyncio.sleep(0)
            assert action.versions[0] == version
            return action

    bench = Bench(engine=Uneven("x"), steps=6, groups=groups, max_lag=lag)
    asyncio.run(train(bench.run))
    for version, stored in bench.store.steps.items():
        for group in stored:
            for trajectory in group.trajectories:
                for sampled in trajectory.versions:
                    assert sampled is None or 0 <= version - sampled <= lag
    assert bench.trained() == in_order(6 * groups), "pacing never drops or reorders a group"


async def test_running_ahead_overlaps_sampling_with_learning() -> None:
    class SlowLearner(FakeLearner):
        def update(self, batch: Any) -> Mapping[str, float]:
            time.sleep(0.1)
            return super().update(batch)

    async def seconds(lag: int) -> float:
        bench = Bench(
            engine=FixedEngine("x", delay_s=0.1), learner=SlowLearner(), steps=5, max_lag=lag
        )
        begun = time.perf_counter()
        await train(bench.run)
        return time.perf_counter() - begun

    assert await seconds(1) < 0.8 * await seconds(0)


async def test_groups_without_signal_are_dropped_and_replaced_up_to_the_budget() -> None:
    telling = in_order(5)[3:]

    def rate(problem: Any, episode: Any) -> float:
        return by_member(problem, episode) if problem.task.id in telling else 0.0

    bench = Bench(
        rate=rate, steps=1, groups=2, algorithm=AlgorithmConfig(zero_variance="drop", refill=8.0)
    )
    await train(bench.run)
    assert bench.trained() == in_order(5), "replaced groups are stored too"
    assert bench.saved[-1] == (1, 5), "and count as taken"
    assert bench.learner.batches[0].groups.tolist() == [0, 0, 1, 1]
    hopeless = Bench(
        rate=lambda p, e: 0.0, steps=2, algorithm=AlgorithmConfig(zero_variance="drop", refill=2.0)
    )
    await train(hopeless.run)
    assert [len(groups) for groups in hopeless.store.steps.values()] == [4, 4]
    assert [row["groups_with_signal"] for row in hopeless.rows] == [0, 0]


async def test_alarms_reach_the_reporter_and_end_with_what_was_resumed() -> None:
    class Notes(Silent):
        def __init__(self) -> None:
            self.said: list[str] = []

        def note(self, text: str) -> None:
            self.said.append(text)

    first = Bench(steps=10, rate=lambda p, e: 0.0)
    first.run.reporter = Notes()
    await train(first.run)
    (said,) = first.run.reporter.said
    assert said.startswith("alarm: 100% of the groups have equal rewards")
    resumed = Bench(steps=12, cursor=20, learner=FakeLearner(version=10), rate=lambda p, e: 0.0)
    resumed.run.reporter, resumed.run.watch = Notes(), Watch(first.rows)
    await train(resumed.run)
    assert resumed.run.reporter.said == []
    assert all(row["advantages"]["0"] == 4 for row in first.rows)


async def test_a_run_that_can_learn_nothing_says_so() -> None:
    bench = Bench(rate=lambda p, e: 1.0, steps=9, max_silent_steps=3)
    with pytest.raises(NoSignal, match="3 steps"):
        await train(bench.run)
    assert bench.learner.version == 2


async def test_too_many_faults_stop_the_run_and_a_few_do_not() -> None:
    def broken(share: int) -> FixedEngine:
        class Broken(FixedEngine):
            async def sample(self, prompt_ids: Any, sampling: Any, *, session: str) -> Any:
                if int(session[-1]) < share:
                    raise RuntimeError("cable pulled")
                return await super().sample(prompt_ids, sampling, session=session)

        return Broken("x")

    few = Bench(engine=broken(1), group_size=4)
    await train(few.run)
    assert [row["faults"] for row in few.rows] == [2, 2, 2]
    assert all(len(g.trajectories) == 3 for g in few.store.read())
    many = Bench(engine=broken(3), group_size=4)
    with pytest.raises(TooManyFaults, match="6 of 8"):
        await train(many.run)
    assert len(many.store.steps[0]) == 2, "what was sampled is kept for the post-mortem"


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.12, 0.2, 0.31])
async def test_stopped_at_any_moment_the_checkpoint_counts_what_was_trained(after_s: float) -> None:
    class SlowLearner(FakeLearner):
        def update(self, batch: Any) -> Mapping[str, float]:
            time.sleep(0.05)
            return super().update(batch)

    bench = Bench(engine=FixedEngine("x", delay_s=0.03), learner=SlowLearner(), steps=50, max_lag=1)
    running = asyncio.create_task(train(bench.run))
    await asyncio.sleep(after_s)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    if after_s:
        version, cursor = bench.saved[-1]
        assert version == len(bench.learner.batches)
        assert cursor == 2 * version
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_evaluation_and_checkpoints_come_when_asked() -> None:
    bench = Bench(steps=5, eval_every=2, checkpoint_every=2)
    await train(bench.run)
    assert [r["step"] for r in bench.rows if r["kind"] == "eval"] == [0, 2, 4]
    assert [version for version, _ in bench.saved] == [2, 4, 5]


def test_every_epoch_holds_every_problem_once_in_its_own_order() -> None:
    problems = [a_problem(id=str(i)) for i in range(50)]
    epochs = [
        [problem_at(problems, e * 50 + i, seed=3).task.id for i in range(50)] for e in range(3)
    ]
    assert all(sorted(e, key=int) == [str(i) for i in range(50)] for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [problem_at(problems, i, seed=4).task.id for i in range(50)]


def test_groups_of_one_problem_have_different_seeds_each_time() -> None:
    seeds = {group_seed(seed, index) for seed in range(3) for index in range(100)}
    assert len(seeds) == 300


async def test_a_thread_is_waited_for_when_cancelled() -> None:
    done = threading.Event()

    def work() -> None:
        time.sleep(0.1)
        done.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()
