"""What the verbs share: their options, and how a configuration is found."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config import RunConfig
    from agentrl.protocols import Split

Source = Annotated[str, typer.Argument(help="configuration (YAML), or an environment file (.py)")]
Set = Annotated[list[str] | None, typer.Option("--set", help="section.field=value; repeatable")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print results only")]
Json = Annotated[bool, typer.Option("--json", help="print JSON lines")]
Model = Annotated[str | None, typer.Option(help="model folder; default: the run's newest")]
SplitOption = Annotated[str, typer.Option(help="train or test")]
RunFolder = Annotated[Path, typer.Argument(help="run directory")]


def config_of(source: str, overrides: list[str] | None) -> "RunConfig":
    """A YAML file, or the defaults around an environment file. Raises ConfigError."""
    from agentrl.config import load_config

    given = list(overrides or [])
    path = Path(source.partition(":")[0])
    if path.suffix != ".py":
        return load_config(Path(source), given)
    if not path.is_file():
        raise ConfigError(f"{path}: no such environment file")
    own = {"environment.name": source, "run.dir": f"runs/{path.stem}"}
    return load_config(None, [*(f"{name}={json.dumps(v)}" for name, v in own.items()), *given])


def split_of(name: str) -> "Split":
    """A split by name. Raises ConfigError."""
    if name == "train":
        return "train"
    if name == "test":
        return "test"
    raise ConfigError(f"--split {name}: it is train or test")


def existing_run(folder: Path) -> Path:
    """A run directory that is one. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such run directory")
    if not any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        raise ConfigError(f"{folder} is no run directory: it has no config.yaml and no metrics")
    return folder


def echo_json(row: Mapping[str, Any]) -> None:
    """One JSON line on stdout, in ASCII: no character of a model reaches a terminal as it is."""
    typer.echo(json.dumps(row))
