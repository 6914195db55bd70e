"""`agentrl view`: a run in the browser, or as one file."""

from importlib.util import find_spec
from pathlib import Path

import typer

from agentrl.cli.options import Json, RunFolder, say
from agentrl.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(view)


def view(
    context: typer.Context,
    run: RunFolder,
    port: int = typer.Option(8000, min=0, max=65535, help="0: any free one"),
    export: Path | None = typer.Option(None, help="write one HTML file instead of serving"),
    step: int | None = typer.Option(None, min=0, help="export: only this step"),
    groups: int = typer.Option(100, min=1, help="export: the newest groups, so many at most"),
    depth: list[str] | None = typer.Option(None, help="export: with this rung of the replay"),
    json_: Json = False,
) -> None:
    """Look at a run in the browser, also while it goes on.

    Serves to this machine only, until Ctrl-C. --export writes a page that needs no server.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError("the viewer is not installed: pip install -e '.[viewer]'")
    from agentrl.viewer.details import Details
    from agentrl.viewer.export import export as write
    from agentrl.viewer.rows import Wanted
    from agentrl.viewer.server import serve

    if export is None:
        for name in ("step", "groups", "depth"):
            source = context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT":
                raise ConfigError(f"--{name} chooses what --export writes: the page has it all")
    details = Details(run)
    if export is None:
        serve(details, port=port, ready=lambda at: say({"url": at}, f"{run}: {at}", as_json=json_))
        return
    count = write(details, export, Wanted(step=step), groups=groups, depths=depth or ())
    say({"page": str(export), "groups": count}, f"{count} groups in {export}", as_json=json_)
