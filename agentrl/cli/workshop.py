"""The verbs that make and clear things: init, fetch, sandbox build, prune."""

import asyncio
import keyword
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import typer

from agentrl.cli.options import Json, Quiet, existing_run, say
from agentrl.errors import AgentRLError, ConfigError

TEMPLATE = "templates/environment.py.txt"


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(init)
    app.command()(fetch)
    app.command()(prune)
    sandbox = typer.Typer(help="Build the images of sandboxes.", rich_markup_mode=None)
    sandbox.command()(build)
    app.add_typer(sandbox, name="sandbox")


def init(
    name: str = typer.Argument(help="module name, such as my_env"),
    folder: Path = typer.Option(Path("."), help="where to write it"),
    json_: Json = False,
) -> None:
    """Write a new environment file that runs as it stands."""
    stem = name.removesuffix(".py")
    if not stem.isidentifier() or keyword.iskeyword(stem):
        raise ConfigError(f"init {name}: it must be a Python module name, such as my_env")
    if find_spec(stem) is not None:
        raise ConfigError(f"init {name}: there already is a module {stem}: choose another name")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    path = folder / f"{stem}.py"
    text = files("agentrl").joinpath(TEMPLATE).read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already: choose another name") from None
    hint = f"{path}: try `agentrl check env {path}`, then `agentrl train {path}`"
    say({"environment": str(path)}, hint, as_json=json_)


def fetch(
    name: str = typer.Argument(help="smollm2-135m"),
    folder: Path = typer.Option(Path("models"), help="folder of models"),
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Fetch a small pretrained model.

    It is converted to a plain model folder in float32: half a minute, and a few times its size in
    memory. A folder that is there already is taken as it is.
    """
    from agentrl.cli.display import reporter_for
    from agentrl.cli.fetch import fetch_model

    with reporter_for(quiet=quiet or json_, as_json=False) as reporter:
        path = fetch_model(name, folder, reporter)
    say({"model": str(path)}, str(path), as_json=json_)


def build(
    names: list[str] | None = typer.Argument(None, help="images; default: all of them"),
    json_: Json = False,
) -> None:
    """Build images into the Docker engine, unless it has them; print each with its digest."""
    from agentrl_sandboxes.docker import connect
    from agentrl_sandboxes.images import build_image, image_names

    client = connect()
    for name in names or image_names():
        built = build_image(client, name)
        row = {"name": name, "tag": built.tag, "digest": built.digest}
        say(row, f"{name}  {built.tag}  {built.digest}", as_json=json_)


def prune(
    run: Path | None = typer.Argument(None, help="also clear what interrupted saves left there"),
    run_id: str = typer.Option("", help="only the sandboxes of this run, by its full path"),
    json_: Json = False,
) -> None:
    """Remove what dead runs left behind.

    Don't use it on a run that is going on.
    """
    from agentrl.plugins import find_sandbox, registered

    if run is not None:
        existing_run(run)
    for name in registered("agentrl.sandboxes"):
        try:
            removed = asyncio.run(find_sandbox(name)().prune(run_id))
            row = {"sandboxes": name, "removed": removed}
            say(row, f"{name}: {removed} removed", as_json=json_)
        except AgentRLError as error:  # one backend that is not installed must not hide the rest
            typer.echo(f"{name}: skipped, {error}", err=True)
    if run is not None:
        removed = _clear(run)
        text = f"{run}: {removed} half-written files and folders removed"
        say({"run": str(run), "removed": removed}, text, as_json=json_)


def _clear(run: Path) -> int:
    """Remove half-written models, checkpoints and other files; returns how many."""
    import shutil

    from agentrl.atomic import HALF_WRITTEN, OLD, PARTIAL

    names = [f"{place}{start}*" for place in ("", "checkpoints/") for start in (PARTIAL, OLD)]
    folders = [folder for name in names for folder in run.glob(name)]
    halves = [*run.glob(f"*{HALF_WRITTEN}"), *run.glob(f"trajectories/*{HALF_WRITTEN}")]
    for folder in folders:
        shutil.rmtree(folder)
    for half in halves:
        half.unlink()
    return len(folders) + len(halves)
