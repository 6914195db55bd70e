"""The verbs that look: show, list, report, doctor."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer

from agentrl.cli.options import Json, RunFolder, echo_json, existing_run, say
from agentrl.errors import ConfigError
from agentrl.show import Decode, describe, find_decode, print_lines, printable, record

if TYPE_CHECKING:
    from agentrl.lesson import Lesson
    from agentrl.types import Group

KINDS = ("environments", "sandboxes", "engines", "models", "presets", "runs")


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(show)
    app.command("list")(list_)
    app.command()(report)
    app.command()(doctor)


def show(
    run: Path = typer.Argument(help="run directory, folder of step files, or one step file"),
    step: int | None = typer.Option(None, min=0, help="step; default: the last"),
    task: str | None = typer.Option(None, help="only groups of this task id"),
    member: int | None = typer.Option(None, min=0, help="one member of each group"),
    groups: int = typer.Option(1, min=1, help="groups shown at most"),
    messages: bool = typer.Option(False, help="parsed messages instead of the exact tokens"),
    plain: bool = typer.Option(False, help="marks instead of colours"),
    json_: Json = False,
) -> None:
    """Show recorded trajectories and their verdicts.

    Lines marked > were written by the model, lines marked < were shown to it.
    """
    from agentrl.replay.records import Records

    records = Records(run, step=step)
    step = records.steps[-1]
    found = ((n, g) for n, g in enumerate(records.groups(step)) if task in (None, g.task_id))
    if member is not None:
        found = ((n, g) for n, g in found if any(t.member == member for t in g.trajectories))
    chosen = list(islice(found, groups))
    if not chosen:
        wanted = f"task {task}" if task is not None else "group"
        wanted += "" if member is None else f" with a member {member}"
        raise ConfigError(f"step {step} of {run} has no {wanted}")
    facts = records.facts(step)
    decode = None if messages else find_decode(records.run, facts)
    if not json_:
        typer.echo(f"step {step}" + ("" if decode or messages else " (no tokenizer: messages)"))
    lessons = records.lessons(step)
    for number, group in chosen:
        taught = {one.trajectory_id: one for one in lessons if one.group == number}
        show_group(
            group,
            decode=decode,
            member=member,
            lessons=taught,
            facts=facts,
            plain=plain,
            as_json=json_,
        )


def show_group(
    group: "Group",
    *,
    decode: Decode | None = None,
    member: int | None = None,
    lessons: "Mapping[str, Lesson]" = MappingProxyType({}),
    facts: Mapping[str, str] = MappingProxyType({}),
    plain: bool = False,
    as_json: bool = False,
) -> None:
    """Print a group on stdout: in colours, with marks alone, or as one JSON line."""
    if as_json:
        row = record(group)
        kept = [n for n, t in enumerate(group.trajectories) if member in (None, t.member)]
        by_member = ("trajectories", "verdicts", *(("artifacts",) if group.artifacts else ()))
        row |= {name: [row[name][n] for n in kept] for name in by_member}
        taught = [record(lessons.get(t.id)) for t in group.trajectories]
        echo_json(row | {"lessons": [taught[n] for n in kept]})
        return
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    lines = describe(group, decode=decode, member=member, lessons=lessons, facts=facts)
    print_lines(console, lines, plain=plain)


def list_(
    kind: str = typer.Argument("all", help=", ".join(KINDS)),
    runs: Path = typer.Option(Path("runs"), help="folder of run directories"),
    models: Path = typer.Option(Path("models"), help="folder of models"),
    json_: Json = False,
) -> None:
    """List plug-ins, presets, models and runs."""
    if kind not in (*KINDS, "all"):
        raise ConfigError(f"list {kind}: known are {', '.join(KINDS)}")
    for chosen in KINDS if kind == "all" else (kind,):
        rows = _names(chosen, runs, models)
        head = f"{chosen}: " if kind == "all" else ""
        for name, text in rows:
            line = printable(f"{head}{name}" + (f"  {text}" if text else ""))
            say({"kind": chosen, "name": name, "text": text}, line, as_json=json_)


def report(
    run: RunFolder,
    out: Path | None = typer.Option(None, help="HTML file; default: RUN/report.html"),
    json_: Json = False,
) -> None:
    """Write a run's curves as one HTML page.

    It holds the configuration and some trajectories, too, and needs no network.
    """
    from agentrl.report import write_report

    existing_run(run)
    path = out or run / "report.html"
    write_report(run, path)
    say({"report": str(path)}, str(path), as_json=json_)


def doctor(json_: Json = False) -> None:
    """Say what works on this machine, and how to get the rest."""
    from agentrl.doctor import examine

    findings = examine()
    if json_:
        for finding in findings:
            echo_json(finding.as_row())
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("part", "works", "what was found, or how to get it")
        for finding in findings:
            works = "yes" if finding.works else "NO" if finding.needed else "no"
            table.add_row(finding.part, works, Text(printable(finding.text)))
        Console(highlight=False, emoji=False).print(table)
    if not all(finding.works for finding in findings if finding.needed):
        raise typer.Exit(1)


def _names(kind: str, runs: Path, models: Path) -> Sequence[tuple[str, str]]:
    if kind == "runs":
        return [(path.name, _progress(path)) for path in _folders(runs, "config.yaml")]
    if kind == "models":
        from agentrl.cli.fetch import FETCHABLE

        local = [(str(path), "") for path in _folders(models, "config.json")]
        return [("tiny", "built in"), *local, *((n, "agentrl fetch") for n in FETCHABLE)]
    if kind == "presets":
        from agentrl.algorithms import PRESETS

        return [(name, "") for name in PRESETS]
    from agentrl.plugins import registered

    return [(name, "") for name in registered(f"agentrl.{kind}")]


def _folders(root: Path, holding: str) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"*/{holding}"))


def _progress(run: Path) -> str:
    from agentrl.metrics import read_metrics

    try:
        rows = read_metrics(run / "metrics.jsonl")
    except OSError as error:  # one run that can't be read must not hide the others
        return f"metrics.jsonl: {error.strerror}"
    steps = sum(row["kind"] == "step" for row in rows)
    evals: list[Any] = [row.get("success") for row in rows if row["kind"] == "eval"]
    last = f", success {evals[-1]:.3f}" if evals and isinstance(evals[-1], float) else ""
    return f"{steps} steps{last}"
