"""What the verbs share: their options, and how a configuration is found."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.errors import ConfigError
from agentrl.metrics import as_line

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


TRIAL = (
    "run.steps=30",
    "run.eval_every=10",
    "engine.context_tokens=256",
    "sampling.max_action_tokens=64",
    "rollout.max_turns=4",
    "learner.lr=1.0e-4",
    "learner.schedule=cosine",
    "learner.warmup_steps=3",
    "learner.micro_batch_tokens=16384",
)
"""An environment file without a configuration is tried on the tiny policy, in minutes on a CPU."""
TRIAL_WARM_START = (
    "warm_start.steps=600",
    "warm_start.traces=2000",
    "warm_start.batch=32",
    "warm_start.lr=2.0e-3",
)
"""Where the environment has an oracle; without one the tiny policy starts from random weights."""


def config_of(source: str, overrides: list[str] | None) -> "RunConfig":
    """A YAML file, or an environment file with settings that suit the policy.

    Raises ConfigError.
    """
    from agentrl.config import load_config

    given = list(overrides or [])
    path = Path(source.partition(":")[0])
    if path.suffix != ".py":
        return load_config(Path(source), given)
    if not path.is_file():
        raise ConfigError(f"{path}: no such environment file")
    own = {"environment.name": source, "run.dir": f"runs/{path.stem}"}
    named = [f"{name}={json.dumps(value)}" for name, value in own.items()]
    if load_config(None, [*named, *given]).model.path == "tiny":
        named += [*TRIAL, *_warm_start(source)]
    return load_config(None, [*named, *given])


def _warm_start(environment: str) -> Sequence[str]:
    from agentrl.plugins import find_environment

    return TRIAL_WARM_START if "oracle" in find_environment(environment).scripts else ()


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


def say(row: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """A result on stdout: the row as a JSON line, or the text."""
    if as_json:
        echo_json(row)
    else:
        typer.echo(text)


def echo_json(row: Mapping[str, Any]) -> None:
    """One JSON line on stdout, in ASCII: no character of a model reaches a terminal as it is."""
    typer.echo(as_line(row))
