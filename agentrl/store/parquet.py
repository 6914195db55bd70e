"""The store itself: a folder with one Parquet file for each step, and one of its lessons."""

import os
import re
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from agentrl.atomic import HALF_WRITTEN, whole_file
from agentrl.errors import RecordError
from agentrl.lesson import Lesson
from agentrl.store.footer import SEAL, UNSEALED, is_sealed, seal
from agentrl.store.lessons import read_lessons, write_lessons
from agentrl.store.redaction import Decode, Redactor, secret_values
from agentrl.store.schema import COLUMNS, READABLE, VERSION, decode, encode
from agentrl.types import Group

_STEP_FILE = re.compile(r"step-(\d{8,})\.parquet")
_LESSONS_FILE = re.compile(r"lessons-(\d{8,})\.parquet")
_SCHEMA_KEY = "agentrl_schema"
_READ_ROWS = 16
compute: Any = pyarrow.compute  # its functions are made at run time
_WRITE_TOKENS = 1 << 20
"""A row group holds about so many ids: what writing and reading keep in memory at once."""


class ParquetStore:
    """A TrajectoryStore in `folder`: `step-00000012.parquet` has the groups sampled for step 12.

    A file appears whole (temporary file, fsync, rename) and replaces an earlier one of its step.
    `lessons-00000012.parquet` has what the learner made of them. `metadata` goes into every step
    file: what the ids can't say, such as the configuration and the hashes of tokenizer and
    template. `secrets` never appear in a text or a file (default: what looks like one in the
    environment), nor in what `decode`, if given, makes of the ids. Logprobs are kept as float32,
    all other numbers exactly.

    Reading one step raises RecordError, which names the file, if it is missing, cut, foreign or of
    a schema that this version doesn't know; older schemas are migrated. Reading all skips such
    files, and what a dead writer left, with a warning that names them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        metadata: Mapping[str, str] | None = None,
        secrets: Sequence[str] | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._folder = folder
        found = secret_values(os.environ) if secrets is None else secrets
        self._redactor = Redactor(found, decode=decode)
        self._metadata = metadata or {}

    def append(self, groups: Sequence[Group], *, version: int) -> None:
        """Write the groups of step `version`, whole or not at all. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.lessons_path(version).unlink(missing_ok=True)  # of a step that is taken again
        write_file(self.path(version), groups, self._metadata, self._redactor)

    def append_lessons(
        self, lessons: Sequence[Lesson], stats: Mapping[str, float], *, version: int
    ) -> None:
        """Write what the learner made of the groups of step `version`. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_lessons(self.lessons_path(version), lessons, stats)

    def lessons(self, version: int) -> tuple[list[Lesson], dict[str, float]]:
        """What the learner made of each trajectory of step `version`, and its statistics.

        Raises RecordError, also where the step was never learned from.
        """
        path = self.lessons_path(version)
        with _naming(path):
            return read_lessons(path)

    def read(self, *, version: int | None = None) -> Iterator[Group]:
        """The groups of step `version`, or of all steps in order, one group in memory at a time."""
        if version is not None:
            yield from read_file(self.path(version))
            return
        for step in self.versions():
            try:
                yield from read_file(self.path(step))
            except RecordError as error:
                warnings.warn(f"skipped: {error}", stacklevel=2)

    def versions(self) -> list[int]:
        """The steps that have a file, in order. Warns about anything else in the folder."""
        found: list[int] = []
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            match = _STEP_FILE.fullmatch(path.name)
            if match:
                found.append(int(match[1]))
            elif _LESSONS_FILE.fullmatch(path.name):
                continue
            elif path.suffix == HALF_WRITTEN:
                warnings.warn(f"skipped: {path} is half-written: its writer died", stacklevel=3)
            else:
                warnings.warn(f"skipped: {path} is not a step file", stacklevel=3)
        return sorted(found)

    def metadata(self, version: int) -> dict[str, str]:
        """The facts that were stored beside step `version`. Raises RecordError."""
        return read_facts(self.path(version))

    def path(self, version: int) -> Path:
        """The file of step `version`, whether it is there or not."""
        return self._folder / f"step-{version:08d}.parquet"

    def lessons_path(self, version: int) -> Path:
        """The file of the lessons of step `version`, whether it is there or not."""
        return self._folder / f"lessons-{version:08d}.parquet"


def write_file(
    path: Path, groups: Sequence[Group], metadata: Mapping[str, str], redactor: Redactor
) -> None:
    """Write a step file, whole or not at all. Raises OSError."""
    clean, facts = redactor.text, {**metadata, _SCHEMA_KEY: VERSION}
    schema = COLUMNS.with_metadata({clean(name): clean(fact) for name, fact in facts.items()})
    with whole_file(path) as file:
        with _writer(file, schema) as writer:
            for chunk in _chunks(groups):
                writer.write_batch(encode(chunk, redactor))
            writer.add_key_value_metadata({SEAL: UNSEALED})
        file.flush()
        seal(Path(file.name))


def read_facts(path: Path) -> dict[str, str]:
    """What was stored beside the groups of a step file. Raises RecordError."""
    with _naming(path), _open(path) as file:
        return _facts(file)


def _chunks(groups: Sequence[Group]) -> Iterator[list[tuple[int, Group]]]:
    """Numbered groups, about `_WRITE_TOKENS` ids at a time."""
    chunk: list[tuple[int, Group]] = []
    tokens = 0
    for number, group in enumerate(groups):
        chunk.append((number, group))
        tokens += sum(len(t.token_ids) for t in group.trajectories)
        tokens += sum(len(file) for files in group.artifacts for file in files.values()) // 4
        if tokens >= _WRITE_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


def read_file(path: Path) -> Iterator[Group]:
    """The groups of a step file, one in memory at a time. Raises RecordError."""
    with _naming(path), _open(path) as file:
        _check_schema(file, path)
        yield from decode(file.iter_batches(batch_size=_READ_ROWS))


def read_group(path: Path, number: int) -> Group:
    """One group of a step file, without decoding the others. Raises RecordError."""
    with _naming(path), _open(path) as file:
        _check_schema(file, path)
        rows = (
            found
            for batch in file.iter_batches(
                batch_size=_READ_ROWS, row_groups=_row_groups(file, number)
            )
            if (found := batch.filter(compute.equal(batch.column("group"), number))).num_rows
        )
        for group in decode(rows):
            return group
    raise RecordError(f"{path} has no group {number}")


def read_columns(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Some columns of a step file, as they are stored. Raises RecordError."""
    with _naming(path), _open(path) as file:
        _check_schema(file, path)
        yield from file.iter_batches(columns=list(columns))


@contextmanager
def _open(path: Path) -> Generator[pq.ParquetFile]:
    """A file whose footer is as it was written. Raises RecordError if it is not, or has no seal."""
    sealed = is_sealed(path)
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if _facts(file).get(_SCHEMA_KEY) in READABLE[1:] and not sealed:
            raise RecordError(f"{path} is cut or damaged: its footer has lost its checksum")
        yield file


def _row_groups(file: pq.ParquetFile, number: int) -> list[int]:
    """Where rows of a group may be, told by the footer."""
    column = COLUMNS.get_field_index("group")
    bounds = [
        file.metadata.row_group(place).column(column).statistics
        for place in range(file.metadata.num_row_groups)
    ]
    return [
        place
        for place, known in enumerate(bounds)
        if known is None or known.min <= number <= known.max
    ]


def _check_schema(file: pq.ParquetFile, path: Path) -> None:
    facts = _facts(file)
    if _SCHEMA_KEY not in facts:
        raise RecordError(f"{path} was not written by agentrl: move it out of the folder")
    if facts[_SCHEMA_KEY] not in READABLE:
        raise RecordError(
            f"{path} has schema {facts[_SCHEMA_KEY]}, this agentrl reads schemas "
            f"{READABLE[0]} to {VERSION}: read it with the version that wrote it"
        )


def _facts(file: pq.ParquetFile) -> dict[str, str]:
    found = {**(file.metadata.metadata or {}), **(file.schema_arrow.metadata or {})}
    facts = {name.decode(): fact.decode() for name, fact in found.items()}
    return {name: fact for name, fact in facts.items() if name not in (SEAL, "ARROW:schema")}


def _writer(file: BinaryIO, schema: pa.Schema) -> pq.ParquetWriter:
    """Numbers split into byte planes, which zstd packs best; text repeats little within a column.

    Both choices are measured by benchmarks/store.py.
    """
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=6,
        use_dictionary=False,
        column_encoding={
            "token_ids.list.element": "BYTE_STREAM_SPLIT",
            "logprobs.list.element": "BYTE_STREAM_SPLIT",
        },
        write_page_checksum=True,
    )


@contextmanager
def _naming(path: Path) -> Generator[None]:
    """Turn whatever a bad file makes a reader raise into one line that names the file."""
    try:
        yield
    except RecordError:
        raise
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist") from None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise RecordError(f"{path} is cut or damaged: {reason}") from None
