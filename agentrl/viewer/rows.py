"""The groups of a run as short rows, found by what they were like, newest step first.

Only the columns that a row needs are read, a step at a time, and kept while its file stays as it
is: a page of a large run costs what its newest steps cost.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from agentrl.errors import ConfigError, RecordError
from agentrl.store import ParquetStore, read_columns

compute: Any = pyarrow.compute  # its functions are made at run time
Row = Mapping[str, Any]
Outcome = Literal["", "mixed", "solved", "failed", "faulted", "silent"]

_FACTS = ("group", "task_id", "faults", "id", "member", "ending", "reward", "passed", "invalid")
_SUMMED = (
    "spans.list.element.author",
    "spans.list.element.length",
    "spans.list.element.finish",
    "events.list.element.name",
    "events.list.element.status",
)
_WORDS = ("task_id", "id", "note", "faults", "invalid", "prompt", "turns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which groups: all that is given must hold of a group, or of one of its members.

    `outcome`: `mixed` rewards, all `solved`, all `failed`, a member `faulted` (lost, or without a
    verdict) or `silent` (gave no gradient). `tool` is called by its name, or ended with that
    status. `text` stands in the task's id, a message, a fault or a verdict's note, whatever its
    case. `low` … `high` bound a member's reward.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Annotated[int, Field(ge=0, lt=10**9)] | None = None
    outcome: Outcome = ""
    ending: str = ""
    tool: str = ""
    text: str = ""
    low: float | None = None
    high: float | None = None


def wanted_of(asked: Mapping[str, str]) -> Wanted:
    """What a query asks for. Raises ConfigError for what it can't."""
    try:
        return TypeAdapter(Wanted).validate_python(dict(asked))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class Rows:
    """The rows of the step files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.store = ParquetStore(folder)
        self._known: dict[int, tuple[object, Sequence[Row]]] = {}

    def steps(self) -> list[int]:
        """The steps that have a file, in order."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a dead writer left is for `check run` to name
            return self.store.versions()

    def page(self, wanted: Wanted, *, begin: int, size: int) -> tuple[list[Row], bool]:
        """The rows from the `begin`-th match on, and whether there are more."""
        page: list[Row] = []
        for place, row in enumerate(self._found(wanted)):
            if len(page) == size:
                return page, True
            if place >= begin:
                page.append(row)
        return page, False

    def of_step(self, step: int) -> Sequence[Row]:
        """All rows of a step. Raises RecordError."""
        path, lessons = self.store.path(step), self.store.lessons_path(step)
        state = tuple(p.stat().st_mtime_ns if p.exists() else 0 for p in (path, lessons))
        if self._known.get(step, (None, ()))[0] != state:
            self._known[step] = state, list(_rows(self.store, step))
        return self._known[step][1]

    def _found(self, wanted: Wanted) -> Iterator[Row]:
        for step in reversed(self.steps()) if wanted.step is None else [wanted.step]:
            try:
                rows = [row for row in self.of_step(step) if _fits(row, wanted)]
                if rows and wanted.text:
                    said = _with_text(self.store.path(step), wanted.text)
                    rows = [row for row in rows if row["number"] in said]
            except RecordError as error:
                yield {"step": step, "number": None, "broken": str(error)}
                continue
            yield from rows


def _rows(store: ParquetStore, step: int) -> Iterator[Row]:
    silent = _silent(store, step)
    members = (
        row
        for batch in read_columns(store.path(step), (*_FACTS, *_SUMMED))
        for row in _batch_rows(batch)
    )
    for number, rows in groupby(members, key=lambda row: row["group"]):
        first, *_ = whole = list(rows)
        yield {
            "step": step,
            "number": number,
            "task_id": first["task_id"],
            "faults": first["faults"],
            "members": [
                {
                    "place": place,
                    "member": row["member"],
                    "reward": row["reward"],
                    "passed": row["passed"],
                    "invalid": row["invalid"],
                    "ending": row["ending"],
                    "turns": row["turns"],
                    "tokens": row["tokens"],
                    "sampled": row["sampled"],
                    "tools": row["tools"],
                    "silent": silent.get((number, row["id"])),
                }
                for place, row in enumerate(whole)
                if row["id"] is not None
            ],
        }


def _batch_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    facts = batch.select(list(_FACTS)).to_pylist()
    author, length, finish, row = _flat(batch.column("spans"), "author", "length", "finish")
    policy = np.asarray(compute.equal(author, "policy").fill_null(False), dtype=bool)
    ended = np.asarray(compute.is_valid(finish), dtype=bool)
    lengths, count = np.asarray(length.fill_null(0)), len(facts)
    tokens = np.bincount(row, weights=lengths, minlength=count)
    sampled = np.bincount(row[policy], weights=lengths[policy], minlength=count)
    turns = np.bincount(row[ended], minlength=count)
    tools: list[dict[str, None]] = [{} for _ in facts]
    name, status, row = _flat(batch.column("events"), "name", "status")
    for place, *words in zip(row.tolist(), name.to_pylist(), status.to_pylist(), strict=True):
        tools[place].update(dict.fromkeys(words))
    for place, fact in enumerate(facts):
        numbers = (int(column[place]) for column in (turns, tokens, sampled))
        yield (
            fact
            | dict(zip(("turns", "tokens", "sampled"), numbers, strict=True))
            | {"tools": list(tools[place])}
        )


def _flat(column: Any, *names: str) -> tuple[Any, ...]:
    """Fields of the structs in a column of lists, one below the other, and whose row each is of."""
    structs = column.flatten()
    return *(compute.struct_field(structs, name) for name in names), _parents(column)


def _parents(column: Any) -> Any:
    return np.asarray(compute.list_parent_indices(column))


def _silent(store: ParquetStore, step: int) -> dict[tuple[int, str], str]:
    """Why trajectories gave no gradient, by group and id; nothing if the step was not learned."""
    try:
        lessons, _ = store.lessons(step)
    except RecordError:
        return {}
    return {(one.group, one.trajectory_id): one.silent for one in lessons if one.silent}


def _fits(row: Row, wanted: Wanted) -> bool:
    members: Sequence[Row] = row["members"]
    rewards = [member["reward"] for member in members if member["reward"] is not None]
    lost = bool(row["faults"]) or len(rewards) < len(members)
    passed = [member["passed"] for member in members if member["reward"] is not None]
    outcomes = {
        "": True,
        "mixed": len(set(rewards)) > 1,
        "solved": bool(passed) and all(passed),
        "failed": bool(passed) and not any(passed),
        "faulted": lost,
        "silent": any(member["silent"] for member in members),
    }
    low = float("-inf") if wanted.low is None else wanted.low
    high = float("inf") if wanted.high is None else wanted.high
    bounded = wanted.low is not None or wanted.high is not None
    return (
        outcomes[wanted.outcome]
        and (not bounded or any(low <= reward <= high for reward in rewards))
        and (not wanted.ending or any(m["ending"] == wanted.ending for m in members))
        and (not wanted.tool or any(wanted.tool in m["tools"] for m in members))
    )


def _with_text(path: Path, text: str) -> set[int]:
    """The numbers of the groups in which the text stands."""
    found: set[int] = set()
    for batch in read_columns(path, ("group", *_WORDS)):
        group = np.asarray(batch.column("group"))
        for name in _WORDS:
            for texts, rows in _texts(batch.column(name), np.arange(len(group))):
                hits = compute.match_substring(texts, text, ignore_case=True).fill_null(False)
                found.update(group[rows[np.asarray(hits, dtype=bool)]].tolist())
    return found


def _texts(column: Any, rows: Any) -> Iterator[tuple[Any, Any]]:
    """Every array of texts in a column, however deep, with the row that each text is in."""
    kind = column.type
    if pa.types.is_string(kind):
        yield column, rows
    elif pa.types.is_list(kind):
        yield from _texts(column.flatten(), rows[_parents(column)])
    elif pa.types.is_struct(kind):
        for part in column.flatten():
            yield from _texts(part, rows)
