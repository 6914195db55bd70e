"""The verbs, their options and their exit codes.

0: done · 1: what was checked is not in order · 2: wrong usage or configuration · 3: the run had to
stop · 130: interrupted (a whole checkpoint is left).
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agentrl.cli.display import reporter_for
from agentrl.config import RunConfig, load_config
from agentrl.errors import AgentRLError, TrainingError

app = typer.Typer(
    help="Train tool-using agents with GRPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Source = Annotated[str, typer.Argument(help="configuration (YAML), or an environment file (.py)")]
Set = Annotated[list[str] | None, typer.Option("--set", help="section.field=value")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print results only")]
Json = Annotated[bool, typer.Option("--json", help="print JSON lines")]
Model = Annotated[str | None, typer.Option(help="model folder; default: the run's newest")]
SplitOption = Annotated[str, typer.Option(help="train or test")]


def main() -> None:
    """Run the command line; an error of a person's making is one line."""
    try:
        app()
    except AgentRLError as error:
        if os.environ.get("AGENTRL_TRACEBACK"):
            raise
        Console(stderr=True, highlight=False).print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(3 if isinstance(error, TrainingError) else 2)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def train(
    source: Source,
    set_: Set = None,
    resume: Annotated[bool, typer.Option(help="go on from the newest checkpoint")] = True,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Train a policy (with its warm start, if configured), or go on with a run."""
    from agentrl import build

    config = _config(source, set_)
    with reporter_for(quiet=quiet, as_json=json_) as reporter:
        build.train(config, reporter=reporter, resume=resume)


@app.command()
def sft(
    source: Source,
    set_: Set = None,
    force: Annotated[bool, typer.Option(help="repeat a finished warm start")] = False,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Fit a policy to the traces of scripted policies: the warm start alone."""
    from agentrl import build

    config = _config(source, set_)
    with reporter_for(quiet=quiet, as_json=json_) as reporter:
        folder = build.warm_start(config, reporter=reporter, force=force)
        reporter.note(f"model: {folder}")


@app.command("eval")
def evaluate(
    source: Source,
    set_: Set = None,
    problems: Annotated[int, typer.Option(min=1, help="problems")] = 128,
    samples: Annotated[int, typer.Option(min=1, help="samples of each")] = 1,
    split: SplitOption = "test",
    model: Model = None,
    greedy: Annotated[bool, typer.Option(help="take the likeliest token")] = False,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Success and pass@k on a split, with a 95 % interval."""
    from agentrl import build

    config = _config(source, set_)
    with reporter_for(quiet=quiet, as_json=json_) as reporter:
        found = build.evaluate(
            config,
            reporter=reporter,
            problems=problems,
            samples=samples,
            split=_split(split),
            model=model,
            greedy=greedy,
        )
    row: dict[str, Any] = {
        "split": split,
        "problems": found.problems,
        "samples": found.samples,
        "success": found.success,
        "stderr": found.stderr,
        "ci95": list(found.ci95),
        "pass_at_k": {str(k): v for k, v in found.pass_at_k.items()},
        "faults": found.faults,
    }
    typer.echo(json.dumps(row) if json_ else _as_lines(row))


@app.command()
def rollout(
    source: Source,
    set_: Set = None,
    problems: Annotated[int, typer.Option(min=1, help="problems")] = 1,
    split: SplitOption = "train",
    model: Model = None,
    quiet: Quiet = False,
) -> None:
    """Sample some groups and show what happened, without learning."""
    from agentrl import build
    from agentrl.cli.show import show_group

    config = _config(source, set_)
    with reporter_for(quiet=quiet, as_json=False) as reporter:
        groups = build.rollout(
            config, reporter=reporter, problems=problems, split=_split(split), model=model
        )
    for group in groups:
        show_group(Console(), group)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="run directory")],
    step: Annotated[int | None, typer.Option(help="step; default: the last")] = None,
    member: Annotated[int | None, typer.Option(help="one member of each group")] = None,
    groups: Annotated[int, typer.Option(min=1, help="groups shown")] = 1,
) -> None:
    """Show recorded trajectories: what the model wrote, what it was shown, the verdict."""
    from itertools import islice

    from agentrl.cli.show import show_group
    from agentrl.errors import RecordError
    from agentrl.store import ParquetStore

    folder = run / "trajectories"
    versions = list(ParquetStore(folder).versions()) if folder.is_dir() else []
    if not versions:
        raise RecordError(f"{run} holds no trajectories")
    store = ParquetStore(folder)
    for group in islice(store.read(version=versions[-1] if step is None else step), groups):
        show_group(Console(), group, member=member)


@app.command("list")
def list_(kind: Annotated[str, typer.Argument(help="environments, sandboxes, or presets")]) -> None:
    """List what is registered."""
    from agentrl.algorithms import PRESETS
    from agentrl.errors import ConfigError
    from agentrl.plugins import registered

    if kind not in ("environments", "sandboxes", "presets"):
        raise ConfigError(f"list {kind}: known are environments, sandboxes and presets")
    for name in PRESETS if kind == "presets" else registered(f"agentrl.{kind}"):
        typer.echo(name)


@app.command()
def doctor(json_: Json = False) -> None:
    """Say what works on this machine, and how to get the rest."""
    from agentrl.doctor import examine

    findings = examine()
    if json_:
        typer.echo(json.dumps([f.as_row() for f in findings]))
    else:
        table = Table("part", "works", "what was found, or how to get it")
        for finding in findings:
            table.add_row(finding.part, "yes" if finding.works else "no", finding.text)
        Console().print(table)
    if not all(f.works for f in findings if f.needed):
        raise typer.Exit(1)


def _config(source: str, overrides: list[str] | None) -> RunConfig:
    """A YAML file, or the defaults around an environment file."""
    given = list(overrides or [])
    if source.partition(":")[0].endswith(".py"):
        stem = Path(source.partition(":")[0]).stem
        return load_config(None, [f"environment.name={source}", f"run.dir=runs/{stem}", *given])
    return load_config(Path(source), given)


def _split(name: str) -> Any:
    from agentrl.errors import ConfigError

    if name not in ("train", "test"):
        raise ConfigError(f"--split {name}: it is train or test")
    return name


def _as_lines(row: dict[str, Any]) -> str:
    low, high = row["ci95"]
    lines = [
        f"success {row['success']:.3f} (95 %: {low:.3f} to {high:.3f}) on {row['problems']} "
        f"{row['split']} problems, {row['samples']} samples each, {row['faults']} faults"
    ]
    return "\n".join([*lines, *(f"pass@{k} {v:.3f}" for k, v in row["pass_at_k"].items())])
