"""Groups to JSON lines and back."""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from agentrl.errors import ConfigError, RecordError
from agentrl.protocols import Renderer
from agentrl.store.formats import atif, openai, verifiers
from agentrl.store.formats.flat import TRL, VERL
from agentrl.store.formats.sample import UNKNOWN_MEMBER, Row, Sample
from agentrl.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class _Format:
    to_row: Callable[[Sample], Row]
    of_row: Callable[[Row, Renderer | None], Sample]


FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "openai": _Format(openai.to_row, openai.of_row),
        "atif": _Format(atif.to_row, atif.of_row),
        "verifiers": _Format(verifiers.to_row, verifiers.of_row),
        "trl": _Format(TRL.to_row, TRL.of_row),
        "verl": _Format(VERL.to_row, VERL.of_row),
    }
)


def export_lines(groups: Iterable[Group], name: str) -> Iterator[str]:
    """A JSON line for each trajectory with an action. Raises ConfigError for an unknown format."""
    form = _named(name)
    for group in groups:
        for trajectory, verdict in zip(group.trajectories, group.verdicts, strict=True):
            if trajectory.turns:
                yield json.dumps(form.to_row(Sample(trajectory=trajectory, verdict=verdict)))


def import_lines(
    lines: Iterable[str], name: str, *, renderer: Renderer | None = None
) -> Iterator[Group]:
    """The groups of a file: neighbours of one task id. `renderer` writes ids where there are none.

    A last line that was cut is skipped with a warning. Raises RecordError naming any other line
    that makes no sense, ConfigError for an unknown format.
    """
    samples = _samples(lines, _named(name), name, renderer)
    for task_id, some in groupby(samples, key=lambda sample: sample.trajectory.task_id):
        members = list(some)
        try:
            group = Group(
                task_id=task_id,
                trajectories=tuple(_numbered(s.trajectory, n) for n, s in enumerate(members)),
                verdicts=tuple(sample.verdict for sample in members),
            )
        except ValueError as error:
            raise RecordError(str(error)) from None
        yield group


def _numbered(trajectory: Trajectory, place: int) -> Trajectory:
    """A row that does not say which member it is, is one of its own."""
    unknown = trajectory.member == UNKNOWN_MEMBER
    return replace(trajectory, member=place) if unknown else trajectory


def _samples(
    lines: Iterable[str], form: _Format, name: str, renderer: Renderer | None
) -> Iterator[Sample]:
    cut: str | None = None
    for number, line in enumerate(lines, start=1):
        if cut is not None:
            raise RecordError(cut)
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            cut = f"line {number} is no JSON"  # the last one may be, if its writer died
            continue
        try:
            yield form.of_row(row, renderer)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise RecordError(f"line {number} is no {name} trajectory: {reason}") from None
    if cut is not None:
        warnings.warn(f"skipped: {cut}: it was cut", stacklevel=3)


def _named(name: str) -> _Format:
    if name not in FORMATS:
        raise ConfigError(f"there is no format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]
