"""Who is told how long work goes: a live bar, nobody, or a reader of JSON lines."""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentrl.protocols import Reporter


@contextmanager
def reporter_for(*, quiet: bool, as_json: bool) -> Generator[Reporter]:
    """The reporter that the options ask for."""
    if as_json:
        yield JsonReporter()
    elif quiet:
        yield QuietReporter()
    else:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield LiveReporter(progress)


class QuietReporter:
    """Says nothing while work goes on."""

    def phase(self, name: str, total: int | None) -> None:
        """Nothing."""

    def advance(self, units: int = 1) -> None:
        """Nothing."""

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class JsonReporter(QuietReporter):
    """Prints metrics as JSON lines."""

    def metrics(self, row: Mapping[str, Any]) -> None:
        """One line."""
        print(json.dumps(row), flush=True)


class LiveReporter:
    """A bar for each phase, a line for each step."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, Any] = {}
        self._current: str = ""

    def phase(self, name: str, total: int | None) -> None:
        """Start a bar, or start it again."""
        if name in self._tasks:
            self._progress.remove_task(self._tasks[name])
        self._tasks[name] = self._progress.add_task(name, total=total)
        self._current = name

    def advance(self, units: int = 1) -> None:
        """Move the current bar."""
        self._progress.advance(self._tasks[self._current], units)

    def metrics(self, row: Mapping[str, Any]) -> None:
        """A line of figures."""
        if row["kind"] == "eval":
            success, stderr = row["success"], row["stderr"]
            text = f"eval after {row['step']:4d} steps: success {success:.3f} ± {stderr:.3f}"
            self._current = "train" if "train" in self._tasks else self._current
        else:
            seconds = row["sample_s"] + row["update_s"] + row["publish_s"]
            speed = row["action_tokens"] / seconds
            text = (
                f"step {row['step']:4d}  reward {row['reward_mean']:.3f}  "
                f"success {row['success_rate']:.3f}  entropy {row.get('entropy', 0.0):.3f}  "
                f"faults {row['faults']}  {speed:.0f} tok/s  {seconds:.1f} s"
            )
        self._progress.console.print(text, highlight=False)

    def note(self, text: str) -> None:
        """A line."""
        self._progress.console.print(text, highlight=False, markup=False)
