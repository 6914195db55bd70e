"""Where the numbers of a run go: metrics.jsonl, TensorBoard and, if asked for, a service."""

import json
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from math import isfinite
from pathlib import Path
from typing import Any

from agentrl.atomic import whole_file
from agentrl.errors import ConfigError

Sink = Callable[[Mapping[str, Any]], None]
"""Takes one row: a line of metrics.jsonl."""


@contextmanager
def open_metrics(folder: Path, *, from_step: int, tracker: str) -> Generator[Sink]:
    """Rows go to `folder`/metrics.jsonl, TensorBoard events and the tracker.

    Lines of steps that a resumed run will take again (at or after `from_step`) are dropped, and
    so is a last line that was cut. Raises ConfigError when the tracker is not installed.
    """
    path = folder / "metrics.jsonl"
    _keep_before(path, from_step)
    with (
        path.open("a", encoding="utf-8") as lines,
        _events(folder) as event,
        _service(tracker, folder) as service,
    ):

        def write(row: Mapping[str, Any]) -> None:
            lines.write(as_line(row) + "\n")
            lines.flush()
            numbers = _flat(row)
            event(numbers, row["step"])
            service(numbers, row["step"])

        yield write


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; lines that are cut or make no sense are left out.

    Raises OSError for a file that is there but can't be read.
    """
    return [row for row in read_lines(path) if row is not None] if path.exists() else []


def read_lines(path: Path) -> list[dict[str, Any] | None]:
    """The row of each line of a metrics file, None where it makes no sense. Raises OSError."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [_row(line) for line in lines]


def as_line(row: Mapping[str, Any]) -> str:
    """A row as one line of JSON that any reader takes: a number that is not finite is null."""
    return json.dumps(_finite(row), allow_nan=False)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(row, dict) and row.get("kind") in ("step", "eval")
    step: Any = row.get("step") if known else None
    return row if type(step) is int and step >= 0 else None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _keep_before(path: Path, step: int) -> None:
    """A step row is of the step it took; an evaluation row of the step it followed."""
    rows = [r for r in read_metrics(path) if r["step"] < step + (r["kind"] == "eval")]
    with whole_file(path) as file:
        file.write("".join(as_line(row) + "\n" for row in rows).encode())


def _flat(row: Mapping[str, Any]) -> dict[str, float]:
    kind = row["kind"]
    out: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            out |= {f"{kind}/{name}/{key}": float(number) for key, number in value.items()}
        elif isinstance(value, int | float):
            out[f"{kind}/{name}"] = float(value)
    return out


@contextmanager
def _events(folder: Path) -> Generator[Callable[[Mapping[str, float], int], None]]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def write(numbers: Mapping[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield write


@contextmanager
def _service(tracker: str, folder: Path) -> Generator[Callable[[Mapping[str, float], int], None]]:
    """wandb and trackio share one interface. What they say is no result: it goes to stderr."""
    if tracker == "none":
        yield lambda numbers, step: None
        return
    try:
        service = __import__(tracker)
    except ImportError:
        raise ConfigError(
            f"run.tracker is {tracker}, which is not installed: pip install 'agentrl[{tracker}]'"
        ) from None
    place = {"dir": str(folder)} if tracker == "wandb" else {}
    with redirect_stdout(sys.stderr):
        service.init(project="agentrl", name=folder.name, **place)
    try:
        yield lambda numbers, step: service.log(dict(numbers), step=step)
    finally:
        with redirect_stdout(sys.stderr):
            service.finish()
