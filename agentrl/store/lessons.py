"""The second file of a step: what the learner made of its trajectories, once it has learned."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.atomic import whole_file
from agentrl.lesson import Lesson

_COLUMNS = pa.schema(
    {
        "group": pa.int32(),
        "id": pa.string(),
        "member": pa.int32(),
        "advantages": pa.list_(pa.float64()),
        "trained_tokens": pa.int32(),
        "silent": pa.string(),
    }
)
_STATS = "agentrl_stats"


def write_lessons(path: Path, lessons: Sequence[Lesson], stats: Mapping[str, float]) -> None:
    """Write `path` whole. Raises OSError."""
    rows = [
        {
            "group": lesson.group,
            "id": lesson.trajectory_id,
            "member": lesson.member,
            "advantages": lesson.advantages,
            "trained_tokens": lesson.trained_tokens,
            "silent": lesson.silent,
        }
        for lesson in lessons
    ]
    schema = _COLUMNS.with_metadata({_STATS: json.dumps(dict(stats))})
    with whole_file(path) as file:
        table = pa.Table.from_pylist(rows, schema=schema)
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def read_lessons(path: Path) -> tuple[list[Lesson], dict[str, float]]:
    """The lessons in order, and the statistics of the update.

    Raises what pyarrow raises, KeyError, TypeError or ValueError for any other file.
    """
    table = pq.read_table(path, page_checksum_verification=True)
    lessons = [
        Lesson(
            group=row["group"],
            trajectory_id=row["id"],
            member=row["member"],
            advantages=tuple(row["advantages"]),
            trained_tokens=row["trained_tokens"],
            silent=row["silent"],
        )
        for row in table.to_pylist()
    ]
    stats = json.loads((table.schema.metadata or {})[_STATS.encode()])
    return lessons, {name: float(value) for name, value in stats.items()}
