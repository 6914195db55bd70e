"""Who is told how long work goes: a live bar, nobody, or a reader of JSON lines."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.metrics import as_line
from agentrl.show import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from agentrl.protocols import Reporter


@contextmanager
def reporter_for(*, quiet: bool, as_json: bool) -> "Generator[Reporter]":
    """The reporter that the options ask for. Progress goes to stderr, JSON lines to stdout."""
    if as_json:
        yield JsonReporter()
    elif quiet:
        yield QuietReporter()
    else:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True, highlight=False)
        # Without a terminal there is no bar to draw, only lines: a bar would leave an empty one.
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress:
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
    """Prints metrics and notes as JSON lines; a number that is not finite is null."""

    def metrics(self, row: Mapping[str, Any]) -> None:
        """One line."""
        print(as_line(row), flush=True)

    def note(self, text: str) -> None:
        """One line of kind "note"."""
        self.metrics({"kind": "note", "text": text})


@dataclass(slots=True)
class _Phase:
    name: str
    task: "TaskID"
    left: int | None


class LiveReporter:
    """A bar for each phase, a line for each step.

    Phases nest: an evaluation inside the training takes its bar along when it is done, and what
    is advanced next is the training again.
    """

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._phases: list[_Phase] = []

    def phase(self, name: str, total: int | None) -> None:
        """Start a bar; one of the same name, and what began inside it, is over."""
        names = [phase.name for phase in self._phases]
        if name in names:
            self._close(names.index(name))
        task = self._progress.add_task(name, total=total)
        self._phases.append(_Phase(name=name, task=task, left=total))
        self.advance(0)

    def advance(self, units: int = 1) -> None:
        """Move the innermost bar, and take it away when it is full."""
        if not self._phases:
            return
        phase = self._phases[-1]
        self._progress.advance(phase.task, units)
        if phase.left is not None:
            phase.left -= units
            if phase.left <= 0:
                self._close(len(self._phases) - 1)

    def metrics(self, row: Mapping[str, Any]) -> None:
        """A line of figures."""
        self.note(figures(row))

    def note(self, text: str) -> None:
        """A line."""
        self._progress.console.print(printable(text), markup=False, emoji=False, soft_wrap=True)

    def _close(self, first: int) -> None:
        for phase in self._phases[first:]:
            self._progress.remove_task(phase.task)
        del self._phases[first:]


def figures(row: Mapping[str, Any]) -> str:
    """A line of metrics.jsonl for people; what is missing is left out."""

    def value(name: str) -> float:
        found = row.get(name)
        return float(found) if isinstance(found, int | float) else float("nan")

    if row.get("kind") == "eval":
        return (
            f"eval after {value('step'):4.0f} steps  {row.get('split', '')} success "
            f"{value('success'):.3f} ± {value('stderr'):.3f}"
        )
    seconds = value("sample_s") + value("update_s") + value("publish_s")
    parts = [f"step {value('step'):4.0f}", f"reward {value('reward_mean'):.3f}"]
    parts += [f"success {value('success_rate'):.3f}"]
    parts += [f"entropy {value('entropy'):.3f}"] if "entropy" in row else []
    parts += [f"faults {value('faults'):.0f}"] if row.get("faults") else []
    if seconds > 0:
        parts += [f"{value('action_tokens') / seconds:.0f} tok/s", f"{seconds:.1f} s"]
    return "  ".join(parts)
