"""Opens the parts that a replay needs from what a record says of itself: the ladder, ready to use.

`Replay(Records(Path("runs/mine"))).reexecute()` and so on; each method is a rung and owns its event
loop. What the run's own files can't give (weights that were not kept) is said in one line.
"""

import asyncio
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from agentrl import build
from agentrl.algorithms import AlgorithmConfig
from agentrl.config import RunConfig, load_config
from agentrl.errors import ConfigError, RecordError
from agentrl.learning.checkpoint import load_checkpoint
from agentrl.learning.earlier import earlier_groups
from agentrl.learning.learner import PolicyLearner
from agentrl.learning.reforward import Drift, reforward
from agentrl.learning.relearn import Relearned, relearn
from agentrl.metrics import read_metrics
from agentrl.models import load_tokenizer
from agentrl.plugins import find_environment, open_sandboxes, problems_of, tools_of
from agentrl.protocols import EnvironmentClass, Renderer, SandboxProvider, Split
from agentrl.provenance import vocabulary_digest
from agentrl.rendering import make_renderer
from agentrl.replay.check import Finding, Language, check_group, check_trajectory
from agentrl.replay.diff import Diff, diff
from agentrl.replay.fork import Edit, fork
from agentrl.replay.records import NoConfig, Recorded, Records
from agentrl.replay.reexecute import Reexecution, World, reexecute
from agentrl.replay.regrade import Regraded, regrade
from agentrl.store.redaction import REDACTED_TOKENS, Decode
from agentrl.types import Group, Problem, Task

_SIDE_BY_SIDE = 8
"""Episodes that are run again at once."""
_SPLITS: tuple[Split, ...] = ("train", "test")


class Replay:
    """The rungs for some records. `environment` and `model` take the place of the recorded ones.

    Raises ConfigError, PluginError or RecordError where something that a rung needs isn't there.
    """

    def __init__(
        self, records: Records, *, environment: str | None = None, model: str | None = None
    ) -> None:
        self.records = records
        self._other_environment, self._model = environment, model

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration, with the run directory where it is now."""
        run = self.records.run
        try:
            config = self.records.config()
        except NoConfig:
            if not (self._other_environment or self._model):
                raise
            config = self._default_config()
        if (run / "config.yaml").is_file():
            config = config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})
        return config

    def _default_config(self) -> RunConfig:
        """For records of elsewhere: what was asked for, and defaults for the rest."""
        asked = {
            "environment.name": self._other_environment,
            "model.path": self._model,
            "run.dir": str(self.records.run / "replayed"),
        }
        given = [f"{name}={json.dumps(value)}" for name, value in asked.items() if value]
        return load_config(None, given)

    @cached_property
    def environment(self) -> EnvironmentClass:
        """The environment class that the run acted in, or the one that was asked for."""
        return find_environment(self._other_environment or self.config.environment.name)

    def problem(self, task_id: str) -> Problem:
        """A problem of the environment, with its reference. Raises RecordError if unknown."""
        if task_id not in self._problems:
            raise RecordError(
                f"{self._other_environment or self.config.environment.name} has no problem "
                f"{task_id} with the recorded options, so there is no reference to grade it by"
            )
        return self._problems[task_id]

    def check(self, one: Recorded | None = None) -> Iterator[Finding]:
        """First rung, for every chosen step, or one episode of them.

        Files that can't be read are findings, too.
        """
        for step in self.records.steps if one is None else (one.step,):
            try:
                language, notes = self.language(step)
                yield from notes
                if one is not None:
                    yield from check_trajectory(one.trajectory, language)
                    return
                for group in self.records.groups(step):
                    yield from check_group(group, language)
            except RecordError as error:
                yield Finding(trajectory_id="", turn=None, what=str(error))

    def regrade(self) -> Iterator[Regraded]:
        """Second rung, for every chosen step."""
        for step in self.records.steps:
            for group in self.records.groups(step):
                yield from self.regrade_group(group)

    def regrade_group(self, group: Group) -> Sequence[Regraded]:
        """Second rung, for one group."""
        problem = self.problem(group.task_id)
        again = regrade(
            group,
            problem,
            self.environment.verifier,
            sandboxes=self._sandboxes(needed=problem.grading is not None),
            timeout_s=self.config.rollout.grade_timeout_s,
        )
        return asyncio.run(again)

    def reexecute(
        self, episodes: Sequence[Recorded], *, ignore: Sequence[str] = ()
    ) -> list[Reexecution]:
        """Third rung. `ignore` has patterns of text in which replies may differ."""
        tasks = [self._task(one) for one in episodes]
        world = World(
            environment=self.environment,
            sandboxes=self._sandboxes(needed=any(task.sandbox for task in tasks)),
            limits=build.limits_of(self.config),
            ignore=[_pattern(text) for text in ignore],
        )
        return asyncio.run(_all_again(episodes, tasks, world))

    def fork(
        self,
        one: Recorded,
        edit: Edit,
        *,
        samples: int = 1,
        temperature: float | None = None,
    ) -> Group:
        """Fourth rung: from an edit on, with the weights of `model` (default: as recorded)."""
        return asyncio.run(self._fork(one, edit, samples, temperature))

    def reforward(self, episodes: Sequence[Recorded]) -> list[Drift]:
        """Fifth rung, through the weights of `model` (default: as `weights` of the first one)."""
        model = build.load(self.config, self.weights(episodes[0])).model
        trajectories = [one.trajectory for one in episodes]
        return list(reforward(model, trajectories, temperature=self.config.sampling.temperature))

    def relearn(self, version: int, *, algorithm: AlgorithmConfig | None = None) -> list[Relearned]:
        """Sixth rung: step `version`, from the nearest earlier weights that were kept.

        Steps between them and `version` are learned again, too: all come back, in order. With
        another `algorithm` the last is what that makes of the step.
        """
        learner = self._learner_at(version)
        every = Records(self.records.source)
        done: list[Relearned] = []
        while learner.version <= version:
            groups = list(every.groups(learner.version))
            _warn_of_redaction(groups)
            if algorithm is not None and learner.version == version:
                done.append(self._relearned_by(algorithm, learner, groups))
                break
            done.append(
                relearn(
                    learner,
                    groups,
                    self.config.algorithm,
                    recorded=self._recorded(learner.version),
                    earlier=self._earlier(learner.version),
                )
            )
        return done

    def diff(self, left: Recorded, right: Recorded) -> Diff:
        """Where two recorded episodes part."""
        return diff(left.trajectory, right.trajectory)

    def diff_policies(self, one: Recorded, left: str, right: str) -> Diff:
        """Where the same task parts under two checkpoints, sampled with the recorded seeds."""
        start = Edit(turn=0)
        groups = [Replay(self.records, model=model).fork(one, start) for model in (left, right)]
        lost = [fault for group in groups for fault in group.faults]
        if lost:
            raise RecordError(f"an episode was lost: {lost[0]}")
        return diff(groups[0].trajectories[0], groups[1].trajectories[0])

    def weights(self, one: Recorded) -> str:
        """What a rung runs: the given model, else what sampled `one`, else the newest."""
        if self._model is not None:
            return self._model
        self.records.config()  # NoConfig: whose weights, nobody can say
        turns = one.trajectory.turns
        version = turns[0].action.versions[0] if turns else 0
        kept = self._kept()
        return str(kept[version]) if version in kept else build.newest(self.config)

    async def _fork(
        self, one: Recorded, edit: Edit, samples: int, temperature: float | None
    ) -> Group:
        problem = self.problem(one.trajectory.task_id)
        if one.task is not None:
            problem = replace(problem, task=one.task)
        policy = build.load(self.config, self.weights(one))
        async with build.open_stage(self.config, self.environment, policy, [problem]) as stage:
            if temperature is not None:
                stage = replace(stage, temperature=temperature)
            return await fork(stage, one, problem, edit, samples=samples)

    def _task(self, one: Recorded) -> Task:
        return one.task or self.problem(one.trajectory.task_id).task

    @cached_property
    def _problems(self) -> Mapping[str, Problem]:
        same = self._other_environment in (None, self.config.environment.name)
        options = self.config.environment.options if same else {}
        return {
            problem.task.id: problem
            for split in _SPLITS
            for problem in problems_of(self.environment, split, options)
        }

    def _sandboxes(self, *, needed: bool) -> SandboxProvider | None:
        """The backend that was used, where the record says so: "auto" may change."""
        if not needed:
            return None
        facts = self.records.facts(self.records.steps[-1])
        used: Any = json.loads(facts.get("sandbox") or "{}")
        section = self.config.sandbox
        return open_sandboxes(used.get("backend") or section.name, section.options)

    def language(self, step: int) -> tuple[Language | None, list[Finding]]:
        """How the run's messages are written, if its tokenizer is at hand; what to say of it."""
        try:
            tokenizer = self._tokenizer
            tools = tools_of(self.environment)
        except ConfigError as error:
            what = f"step {step}: ids and words are not compared ({error})"
            return None, [Finding(trajectory_id="", turn=None, what=what, level="note")]
        known = self.records.facts(step).get("tokenizer_sha256")
        if known is not None and vocabulary_digest(tokenizer) != known:
            what = f"step {step}: recorded with another tokenizer than the one at hand"
            return None, [Finding(trajectory_id="", turn=None, what=what)]
        names = [tool.name for tool in tools]
        section = self.config.model
        renderer = make_renderer(tokenizer, tool_format_name=section.tool_format, tool_names=names)
        return Language(renderer=renderer, tools=tools), []

    @cached_property
    def _tokenizer(self) -> Any:
        if self._model is None:
            self.records.config()  # NoConfig: whose tokenizer, nobody can say
        return load_tokenizer(self._model or build.newest(self.config))

    def _kept(self) -> dict[int, Path | str]:
        """Weights by version: the start, and the checkpoints that are there."""
        folders = sorted((self.config.run.dir / "checkpoints").glob("step-*"))
        kept: dict[int, Path | str] = {int(f.name.removeprefix("step-")): f for f in folders}
        return {0: self._start(), **kept}

    def _start(self) -> str:
        if not self.config.warm_start.steps:
            return self.config.model.path
        folder = self.config.run.dir / "warm_start"
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is gone, where the run's first weights were")
        return str(folder)

    def _learner_at(self, version: int) -> PolicyLearner:
        """The learner of the run as it was before step `version`, or before an earlier one."""
        kept, start = self._kept(), self._start()
        first = max(v for v in kept if v <= version)
        learner = build.learner_of(self.config, build.load(self.config, str(kept[first])), start)
        if first:
            load_checkpoint(Path(kept[first]), learner)
        return learner

    def _relearned_by(
        self, algorithm: AlgorithmConfig, learner: PolicyLearner, groups: Sequence[Group]
    ) -> Relearned:
        """The same weights and optimiser settings, another algorithm; compared with the record."""
        config = self.config.model_copy(update={"algorithm": algorithm})
        other = build.learner_of(config, build.load(config, self._start()), self._start())
        other.restore(learner.trained())
        other.version = learner.version
        return relearn(other, groups, algorithm, recorded=self._recorded(learner.version))

    def _earlier(self, version: int) -> Iterator[Group]:
        """What the run learned from once more in that step, drawn as it was."""
        config = self.config
        count = round(config.algorithm.replay_share * config.rollout.groups)
        store, seed = self.records.store, config.run.seed
        return earlier_groups(store, version=version, groups=count, seed=seed)

    def _recorded(self, version: int) -> Mapping[str, float]:
        """The statistics of an update: beside the lessons, else in metrics.jsonl; {} if nowhere."""
        try:
            return self.records.store.lessons(version)[1]
        except RecordError:
            rows = read_metrics(self.config.run.dir / "metrics.jsonl")
            found = [r for r in rows if r["kind"] == "step" and r["step"] == version]
            return found[-1] if found else {}


def assert_replays(record: Path, *, ignore: Sequence[str] = ()) -> None:
    """Check, regrade and reexecute a saved record: what a test made from a trajectory calls.

    Raises AssertionError that says what came out differently.
    """
    replay = Replay(Records(record))
    wrong = [found.what for found in replay.check() if found.level == "problem"]
    wrong += [
        f"the verdict was {found.before} and is {found.after}"
        for found in replay.regrade()
        if found.changed
    ]
    wrong += [
        str(found.divergence)
        for found in replay.reexecute(list(replay.records.episodes()), ignore=ignore)
        if found.divergence is not None
    ]
    if wrong:
        raise AssertionError("\n".join(wrong))


def _warn_of_redaction(groups: Sequence[Group]) -> None:
    for trajectory in (t for group in groups for t in group.trajectories):
        if REDACTED_TOKENS in trajectory.metrics:
            what = f"{trajectory.id}: some ids were redacted, so the update can't come out the same"
            warnings.warn(what, stacklevel=3)


def language_of(source: str) -> tuple[Renderer, Decode, dict[str, str]]:
    """How a model folder, hub name, or "tiny" writes and reads ids, and what to keep of that.

    Raises ConfigError.
    """
    tokenizer = load_tokenizer(source)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return make_renderer(tokenizer), decode, {"tokenizer_sha256": vocabulary_digest(tokenizer)}


async def _all_again(
    episodes: Sequence[Recorded], tasks: Sequence[Task], world: World
) -> list[Reexecution]:
    gate = asyncio.Semaphore(_SIDE_BY_SIDE)

    async def one(recorded: Recorded, task: Task) -> Reexecution:
        async with gate:
            return await reexecute(recorded, task, world)

    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(one(recorded, task))
            for recorded, task in zip(episodes, tasks, strict=True)
        ]
    return [task.result() for task in running]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"--ignore {text}: {error}") from None
