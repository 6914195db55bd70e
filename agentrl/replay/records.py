"""Finds what is to be replayed: a run, a folder of step files, or one file."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import RunConfig, load_config, parse_config
from agentrl.errors import ConfigError, RecordError
from agentrl.lesson import Lesson
from agentrl.store import ParquetStore, read_facts, read_file
from agentrl.types import Episode, Group, Task, Trajectory, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One recorded episode: `place` is its index in `group`, the group's in the step `number`."""

    step: int
    number: int
    group: Group
    place: int

    @property
    def trajectory(self) -> Trajectory:
        """What happened."""
        return self.group.trajectories[self.place]

    @property
    def verdict(self) -> Verdict:
        """What it was worth."""
        return self.group.verdicts[self.place]

    @property
    def artifacts(self) -> Mapping[str, bytes] | None:
        """What the verifier could see of the final state; None if nobody kept it."""
        return self.group.artifacts[self.place] if self.group.artifacts else None

    @property
    def task(self) -> Task | None:
        """The public half of its problem; None if nobody kept it."""
        return self.group.task

    @property
    def episode(self) -> Episode:
        """As a verifier saw it."""
        return Episode(trajectory=self.trajectory, artifacts=self.artifacts or {})

    @property
    def name(self) -> str:
        """Short and unique in its run: step, group, member."""
        return f"step {self.step}, episode {self.number}.{self.trajectory.member}"


class NoConfig(ConfigError):
    """The records hold no configuration: they come from elsewhere."""


class Records:
    """The chosen steps of a run directory, of a folder of step files, or one file.

    `config` takes the place of a recorded configuration. Raises RecordError when there is nothing,
    or not the step that is asked for.
    """

    def __init__(
        self, source: Path, *, step: int | None = None, config: RunConfig | None = None
    ) -> None:
        self.source, self._config = source, config
        self._files = _found(source)
        if step is not None:
            self._path(step)
        self.steps: Sequence[int] = sorted(self._files) if step is None else [step]

    @property
    def run(self) -> Path:
        """The run directory, or where one would be."""
        return self._files[self.steps[0]].parent.parent

    @property
    def store(self) -> ParquetStore:
        """The store that the files lie in."""
        return ParquetStore(self._files[self.steps[0]].parent)

    def groups(self, step: int) -> Iterator[Group]:
        """The groups of a step, one in memory at a time. Raises RecordError."""
        return read_file(self._path(step))

    def facts(self, step: int) -> dict[str, str]:
        """What was stored beside them. Raises RecordError."""
        return read_facts(self._path(step))

    def lessons(self, step: int) -> Sequence[Lesson]:
        """What the learner made of a step's episodes; none if it has not learned from them yet."""
        try:
            return self.store.lessons(step)[0]
        except RecordError:
            return ()

    def config(self) -> RunConfig:
        """The configuration that was asked for, or the run's: from a file or the run directory.

        The newest of the chosen steps says it, or any other file that can be read. Raises
        ConfigError where there is none, RecordError where a damaged file may have held it.
        """
        if self._config is not None:
            return self._config
        damaged: RecordError | None = None
        others = [step for step in self._files if step not in self.steps]
        for step in (*reversed(self.steps), *sorted(others, reverse=True)):
            try:
                known = self.facts(step).get("config")
            except RecordError as error:
                damaged = damaged or error
                continue
            if known is not None:
                where = f"the configuration in {self._files[step]}"
                try:
                    tree = json.loads(known)
                except ValueError as error:
                    raise ConfigError(f"{where} is no JSON: {error}") from None
                return parse_config(tree, where=where)
        if (self.run / "config.yaml").is_file():
            return load_config(self.run / "config.yaml")
        if damaged is not None:
            raise damaged
        raise NoConfig(
            f"{self.source} holds no configuration, and there is no {self.run}/config.yaml: "
            "name the one to use (agentrl replay --config FILE)"
        )

    def _path(self, step: int) -> Path:
        if step not in self._files:
            known = sorted(self._files)
            raise RecordError(f"{self.source} has no step {step}: steps {known[0]} to {known[-1]}")
        return self._files[step]

    def episodes(self) -> Iterator[Recorded]:
        """Every episode of the chosen steps, in order."""
        for step in self.steps:
            for number, group in enumerate(self.groups(step)):
                for place in range(len(group.trajectories)):
                    yield Recorded(step=step, number=number, group=group, place=place)

    def episode(self, name: str) -> Recorded:
        """One episode by its id, or by group and member in the last chosen step ("2.0").

        Raises RecordError.
        """
        last: Recorded | None = None
        for one in self.episodes():
            if one.trajectory.id == name:
                return one
            here = one.step == self.steps[-1]
            if here and name == f"{one.number}.{one.trajectory.member}":
                last = one
        if last is None:
            raise RecordError(
                f"{self.source} has no episode {name}: name its id, or GROUP.MEMBER (from 0) of a "
                "--step, as `agentrl show` prints them in order"
            )
        return last


def _found(source: Path) -> dict[int, Path]:
    """The step files by step."""
    if not source.exists():
        raise RecordError(f"{source}: no such file or folder")
    if source.is_file():
        number = source.stem.removeprefix("step-")
        if source.suffix != ".parquet":
            raise RecordError(f"{source} is no step file: those end in .parquet")
        return {int(number) if number.isdecimal() else 0: source}
    folder = source / "trajectories" if (source / "trajectories").is_dir() else source
    store = ParquetStore(folder)
    with warnings.catch_warnings():
        if folder == source:
            warnings.simplefilter("ignore")  # any folder may be named; its other files are fine
        versions = store.versions()
    if not versions:
        raise RecordError(f"{source} holds no trajectories")
    return {version: store.path(version) for version in versions}
