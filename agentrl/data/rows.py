"""Rows of local files and of hub data sets, each with a name that a person finds again."""

import csv
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HUB = "hub:"
"""Before the name of a data set for the `datasets` library: hub:NAME, or hub:NAME:SPLIT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. `name` is file and line (or row number), from 1."""

    name: str
    values: Mapping[str, Any]

    def get(self, field: str) -> Any:
        """The value of a field; dots go into nested ones. Raises ValueError naming the row."""
        value: Any = self.values
        for step in field.split("."):
            if not isinstance(value, Mapping) or step not in value:
                known = ", ".join(map(str, self.values)) or "none"
                raise ValueError(f"{self.name} has no field {field!r}; its fields: {known}")
            value = value[step]
        return value


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a file (.jsonl, .json with a list, .csv, .parquet), or of a hub data set.

    Raises ValueError naming file and line for what can't be read.
    """
    if source.startswith(HUB):
        yield from _hub(source.removeprefix(HUB))
        return
    path = Path(source).expanduser()
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    if path.suffix not in readers:
        raise ValueError(f"{source}: data is {', '.join(readers)}, or {HUB}NAME")
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{source} is not UTF-8 text") from None


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                name = f"{path.name}:{number}"
                yield _row(name, _parsed(name, line))


def _json(path: Path) -> Iterator[Row]:
    rows = _parsed(path.name, path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"{path.name} must hold a list of objects")
    for number, values in enumerate(rows, start=1):
        yield _row(f"{path.name}:{number}", values)


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        try:
            for number, values in enumerate(csv.DictReader(lines, strict=True), start=1):
                if None in values or None in values.values():
                    raise ValueError(f"{path.name}:{number} has not as many cells as the header")
                yield Row(name=f"{path.name}:{number}", values=values)
        except csv.Error as error:
            raise ValueError(f"{path.name}: {error}") from None


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield Row(name=f"{path.name}:{number}", values=values)
    except pa.ArrowException as error:
        raise ValueError(f"{path.name}: {' '.join(str(error).split())}") from None


def _hub(name: str) -> Iterator[Row]:
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except ImportError:
        raise ValueError(f"{HUB}{name} needs: pip install 'agentrl[datasets]'") from None
    name, _, split = name.partition(":")
    for number, values in enumerate(load_dataset(name, split=split or "train"), start=1):
        yield _row(f"{name}:{number}", values)


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _row(name: str, values: Any) -> Row:
    if not isinstance(values, dict):
        raise ValueError(f"{name} must be an object, not {type(values).__name__}")
    return Row(name=name, values=values)
