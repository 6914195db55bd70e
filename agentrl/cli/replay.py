"""`agentrl replay`, the ladder; `agentrl export` and `agentrl import`, other programs' formats."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli import replay_text as text
from agentrl.cli.options import Json, Set, echo_json
from agentrl.errors import ConfigError
from agentrl.show import printable, record

if TYPE_CHECKING:
    from agentrl.algorithms import AlgorithmConfig
    from agentrl.rebuild import Replay
    from agentrl.replay.records import Recorded, Records

Recording = Annotated[Path, typer.Argument(help="run directory, folder of step files, or one file")]
Step = Annotated[int | None, typer.Option(min=0, help="step; default: the last (check: all)")]
Format = Annotated[str, typer.Option("--format", help="openai, atif, verifiers, trl or verl")]


class Depth(StrEnum):
    """The rungs of the ladder."""

    CHECK = "check"
    REGRADE = "regrade"
    REEXECUTE = "reexecute"
    FORK = "fork"
    REFORWARD = "reforward"
    RELEARN = "relearn"
    DIFF = "diff"


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(replay)
    app.command("export")(export)
    app.command("import")(import_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks of a rung."""

    replay: "Replay"
    records: "Records"
    episode: "Recorded | None"
    other: str | None
    turn: int
    action: str | None
    observation: str | None
    temperature: float | None
    samples: int
    ignore: Sequence[str]
    algorithm: "AlgorithmConfig | None"
    as_json: bool

    def episodes(self) -> "list[Recorded]":
        """The one that is named, or all of the chosen steps."""
        return [self.episode] if self.episode else list(self.records.episodes())

    def one(self) -> "Recorded":
        """The one that is named. Raises ConfigError if none is."""
        if self.episode is None:
            raise ConfigError("name the episode: --episode ID, or --episode GROUP.MEMBER")
        return self.episode

    def say(self, found: Any, lines: Iterator[str]) -> None:
        """One result: its lines, or its fields as one JSON line."""
        if self.as_json:
            echo_json(record(found))
            return
        for line in lines:
            typer.echo(printable(line))


_TAKEN_BY: Mapping[str, tuple[Depth, ...]] = MappingProxyType(
    {
        "other": (Depth.DIFF,),
        "turn": (Depth.FORK,),
        "action": (Depth.FORK,),
        "observation": (Depth.FORK,),
        "temperature": (Depth.FORK,),
        "samples": (Depth.FORK,),
        "ignore": (Depth.REEXECUTE,),
        "set_": (Depth.RELEARN,),
        "pytest": (Depth.CHECK,),
        "episode": tuple(depth for depth in Depth if depth is not Depth.RELEARN),
        "model": (Depth.CHECK, Depth.FORK, Depth.REFORWARD, Depth.DIFF),
        "environment": (Depth.CHECK, Depth.REGRADE, Depth.REEXECUTE, Depth.FORK, Depth.DIFF),
    }
)
"""Which rungs an option means something to; it is refused at the others."""


def replay(
    context: typer.Context,
    source: Recording,
    depth: Depth = typer.Option(Depth.CHECK, help="the rung"),
    step: Step = None,
    episode: str | None = typer.Option(None, help="an episode's id, or GROUP.MEMBER of the step"),
    other: str | None = typer.Option(None, help="diff: the other episode, or a model folder"),
    turn: int = typer.Option(0, min=0, help="fork: the first turn that is live"),
    action: str | None = typer.Option(None, help="fork: written in the place of turn's action"),
    observation: str | None = typer.Option(None, help="fork: shown before turn"),
    temperature: float | None = typer.Option(None, min=0, help="fork: another temperature"),
    samples: int = typer.Option(1, min=1, help="fork: episodes"),
    model: str | None = typer.Option(None, help="model folder; default: what sampled it"),
    environment: str | None = typer.Option(None, help="another environment, or its verifier"),
    ignore: list[str] | None = typer.Option(None, help="reexecute: pattern that may differ"),
    config: Path | None = typer.Option(None, help="a configuration, for records without one"),
    set_: Set = None,
    pytest: Path | None = typer.Option(None, help="write the episode as a test, test_….py"),
    json_: Json = False,
) -> None:
    """Replay what was recorded, as deep as you like.

    check: the record alone. regrade: the verifier. reexecute: recorded actions in a fresh
    environment and sandbox. fork: live from a turn on. reforward: recorded tokens through a model.
    relearn: the learner alone (--set algorithm.preset=…: another one). diff: two episodes, or one
    under two models (--model and --other). Exit code 1 when something is not as recorded.
    """
    from agentrl.config import load_config
    from agentrl.rebuild import Replay
    from agentrl.replay.records import Records

    _refuse_others(context, depth)
    own = None if config is None else load_config(config)
    records = Records(source, step=step, config=own)
    chosen = records.episode(episode) if episode is not None else None
    if step is None and depth is not Depth.CHECK:
        last = chosen.step if chosen else records.steps[-1]
        records = Records(source, step=last, config=own)
    wanted = Wanted(
        replay=Replay(records, environment=environment, model=model),
        records=records,
        episode=chosen,
        other=other,
        turn=turn,
        action=action,
        observation=observation,
        temperature=temperature,
        samples=samples,
        ignore=ignore or (),
        algorithm=_algorithm(set_),
        as_json=json_,
    )
    if pytest is not None:
        from agentrl.replay.case import save_case

        for path in save_case(records, wanted.one(), pytest):
            typer.echo(str(path))
        return
    if not _RUNGS[depth](wanted):
        raise typer.Exit(1)


def export(
    source: Recording,
    format: Format = "openai",
    step: Step = None,
    out: Path | None = typer.Option(None, help="file; default: standard output"),
) -> None:
    """Write trajectories as JSON lines for other programs; default: of all steps."""
    from agentrl.atomic import whole_file
    from agentrl.replay.records import Records
    from agentrl.store.formats import export_lines

    records = Records(source, step=step)
    groups = (group for number in records.steps for group in records.groups(number))
    lines = export_lines(groups, format)
    if out is None:
        for line in lines:
            typer.echo(line)
        return
    with whole_file(out) as file:
        count = sum(1 for line in lines if file.write(f"{line}\n".encode()))
    typer.echo(f"{count} trajectories in {out}")


def import_(
    file: Path = typer.Argument(help="JSON lines"),
    out: Path = typer.Argument(help="folder of step files to write them to"),
    format: Format = "openai",
    step: int = typer.Option(0, min=0, help="step to write"),
    model: str | None = typer.Option(None, help="whose tokenizer writes ids where there are none"),
    config: Path | None = typer.Option(None, help="a configuration to keep beside them"),
) -> None:
    """Read trajectories of other programs into a step file."""
    from agentrl.config import load_config
    from agentrl.rebuild import language_of
    from agentrl.store import ParquetStore
    from agentrl.store.formats import import_lines

    facts = {} if config is None else {"config": load_config(config).model_dump_json()}
    renderer, decode = None, None
    if model is not None or format == "openai":
        renderer, decode, known = language_of(model or "tiny")
        facts |= known
    with file.open(encoding="utf-8", errors="replace") as lines:
        groups = list(import_lines(lines, format, renderer=renderer))
    store = ParquetStore(out, metadata=facts, decode=decode)
    if store.path(step).exists():
        raise ConfigError(f"{store.path(step)} is there already: choose another --step")
    store.append(groups, version=step)
    typer.echo(f"{sum(len(g.trajectories) for g in groups)} trajectories in {store.path(step)}")


def _check(wanted: Wanted) -> bool:
    found = list(wanted.replay.check(wanted.episode))
    if wanted.as_json:
        for one in found:
            echo_json(record(one))
    for line in () if wanted.as_json else text.findings(found):
        typer.echo(printable(line))
    problems = sum(one.level == "problem" for one in found)
    steps = f"{len(wanted.records.steps)} steps"
    _sum_up(wanted, f"{'1 episode' if wanted.episode else steps} checked", problems)
    return not problems


def _regrade(wanted: Wanted) -> bool:
    found = [
        one
        for one in wanted.replay.regrade()
        if wanted.episode is None or one.trajectory_id == wanted.episode.trajectory.id
    ]
    for one in found:
        wanted.say(one, text.regraded(one))
    return _compared(wanted, f"{len(found)} verdicts given again", [one.changed for one in found])


def _reexecute(wanted: Wanted) -> bool:
    found = wanted.replay.reexecute(wanted.episodes(), ignore=wanted.ignore)
    for one in found:
        wanted.say(one, text.reexecution(one))
    departed = [one.divergence is not None for one in found]
    return _compared(wanted, f"{len(found)} episodes run again", departed)


def _fork(wanted: Wanted) -> bool:
    from agentrl.cli.inspection import show_group
    from agentrl.replay.fork import Edit

    one = wanted.one()
    edit = Edit(turn=wanted.turn, action=wanted.action, observation=wanted.observation)
    if not wanted.as_json:
        weights = wanted.replay.weights(one)
        typer.echo(printable(f"{one.name}, live from turn {edit.turn} with {weights}"))
    group = wanted.replay.fork(one, edit, samples=wanted.samples, temperature=wanted.temperature)
    show_group(group, as_json=wanted.as_json)
    return not group.faults


def _reforward(wanted: Wanted) -> bool:
    episodes = wanted.episodes()
    if not wanted.as_json:
        typer.echo(printable(f"weights: {wanted.replay.weights(episodes[0])}"))
    for one in wanted.replay.reforward(episodes):
        wanted.say(one, text.drift(one))
    return True


def _relearn(wanted: Wanted) -> bool:
    (step,) = wanted.records.steps
    found = wanted.replay.relearn(step, algorithm=wanted.algorithm)
    same = wanted.algorithm is None
    for one in found[-1:]:
        wanted.say(one, text.relearned(one, same_algorithm=same))
    return not same or not any(one.differences() for one in found)


def _diff(wanted: Wanted) -> bool:
    one, other = wanted.one(), wanted.other
    if other is None:
        raise ConfigError("name what it is compared with: --other ID, or --other MODEL_FOLDER")
    if Path(other).is_dir():
        found = wanted.replay.diff_policies(one, wanted.replay.weights(one), other)
    else:
        found = wanted.replay.diff(one, wanted.records.episode(other))
    wanted.say(found, text.diffed(found))
    return True


_RUNGS: dict[Depth, Callable[[Wanted], bool]] = {
    Depth.CHECK: _check,
    Depth.REGRADE: _regrade,
    Depth.REEXECUTE: _reexecute,
    Depth.FORK: _fork,
    Depth.REFORWARD: _reforward,
    Depth.RELEARN: _relearn,
    Depth.DIFF: _diff,
}


def _compared(wanted: Wanted, what: str, differs: Iterable[bool]) -> bool:
    count = sum(differs)
    _sum_up(wanted, what, count)
    return not count


def _sum_up(wanted: Wanted, what: str, differences: int) -> None:
    if not wanted.as_json:
        result = f"{differences} not as recorded" if differences else "as recorded"
        typer.echo(f"{what}: {result}")


def _refuse_others(context: typer.Context, depth: Depth) -> None:
    """Raises ConfigError for an option that the rung would pass over."""
    for name, rungs in _TAKEN_BY.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT" and depth not in rungs:
            known = ", ".join(rungs)
            raise ConfigError(f"--{name.strip('_')} means nothing to --depth {depth}: use {known}")


def _algorithm(overrides: list[str] | None) -> "AlgorithmConfig | None":
    """Another algorithm, if settings are given; only those of the algorithm may be."""
    if not overrides:
        return None
    from agentrl.config import load_config

    wrong = [text for text in overrides if not text.strip().startswith("algorithm.")]
    if wrong:
        raise ConfigError(f"--set {wrong[0]}: a replay takes algorithm.… only")
    return load_config(None, overrides).algorithm
