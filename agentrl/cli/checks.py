"""`agentrl check …`: whether a run, a template or an environment is in order."""

import asyncio
from collections.abc import Sequence

import typer

from agentrl.cli.options import Json, RunFolder, Set, echo_json, existing_run
from agentrl.show import printable

app = typer.Typer(help="Check a run, a chat template or an environment.", rich_markup_mode=None)


@app.command()
def run(run: RunFolder, json_: Json = False) -> None:
    """Whether a run's files are whole and its records keep their invariants."""
    from agentrl.cli.audit import audit_run

    audit = audit_run(existing_run(run))
    summary = (
        f"{run}: {audit.steps} steps, {audit.groups} groups, {audit.trajectories} trajectories"
    )
    _report(summary, audit.problems, audit.notes, as_json=json_)


@app.command()
def template(
    name: str = typer.Argument(help="model folder, hub name, or 'tiny'"),
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Whether a model's chat template can carry a conversation with tools."""
    from agentrl.config import load_config
    from agentrl.models import load_tokenizer
    from agentrl.rendering import check_template, make_renderer

    section = load_config(None, set_ or []).model
    renderer = make_renderer(
        load_tokenizer(name), tool_format_name=section.tool_format, tool_names=["python"]
    )
    findings = check_template(renderer)
    fatal = [finding.what for finding in findings if finding.level == "fatal"]
    notes = [finding.what for finding in findings if finding.level != "fatal"]
    _report(f"template of {name}", fatal, notes, as_json=json_)


@app.command()
def env(
    name: str = typer.Argument(help="registered name, module:Class, or file.py[:Class]"),
    set_: Set = None,
    sample: int = typer.Option(4, min=1, help="problems of each split that are played"),
    open_book: bool = typer.Option(False, help="the answer may stand in what the policy is given"),
    json_: Json = False,
) -> None:
    """Whether an environment keeps the contract: splits, tools, bad calls, oracle, cheats, leaks.

    `--set environment.options={...}` gives it options, `--set sandbox.name=...` another backend.
    """
    from agentrl.config import load_config
    from agentrl.plugins import find_environment, open_sandboxes, problems_of
    from agentrl.testing.environment import RULES, check_environment

    config = load_config(None, set_ or [])
    environment = find_environment(name)
    options = config.environment.options
    needed = any(p.needs_sandboxes for p in problems_of(environment, "train", options, sample))
    backend = open_sandboxes(config.sandbox.name, config.sandbox.options) if needed else None
    findings = asyncio.run(
        check_environment(
            environment, sandboxes=backend, options=options, sample=sample, open_book=open_book
        )
    )
    problems = [f"{finding.rule}: {finding.seen}" for finding in findings]
    _report(f"environment {name}, {len(RULES)} rules", problems, (), as_json=json_)


def _report(what: str, problems: Sequence[str], notes: Sequence[str], *, as_json: bool) -> None:
    """Print the result; problems make exit code 1."""
    if as_json:
        echo_json({"checked": what, "problems": list(problems), "notes": list(notes)})
    else:
        for problem in problems:
            typer.echo(printable(f"problem: {problem}"))
        for note in notes:
            typer.echo(printable(f"note: {note}"))
        verdict = f"{len(problems)} problems" if problems else "in order"
        typer.echo(printable(f"{what}: {verdict}"))
    if problems:
        raise typer.Exit(1)
