"""What `agentrl.verifiers.sql` asks in a killable process: the rows of one query on databases.

A question is `{"databases": [{"script": …, "path": …, "thin": …}, …], "sql": …, "max_steps": …,
"max_rows": …}`; its answer `{"results": [{"columns": […], "rows": [[…], …]}, …]}`, one for each
database, or `{"error": text}`. A blob is `{"blob": hex}`.
"""

import resource
import sqlite3
from typing import Any
from urllib.parse import quote

HEAP_BYTES = 256 << 20
MAX_VALUE_BYTES = 1 << 20
STEPS_AT_ONCE = 1000
"""Virtual-machine instructions between two looks at the budget."""

_READS = frozenset(
    (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION)
)
_REFUSED = frozenset(("load_extension", "random", "randomblob", "fts3_tokenizer", "sqlite_log"))
"""Functions that reach out of the database, or give another result each time."""
_LIMITS = {
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 16,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


def load() -> None:
    """Nothing to get ready."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The results of one query, or why there are none."""
    databases = [_opened(spec) for spec in question["databases"]]
    # What is open stays open; whatever got past SQLite could open nothing more.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    try:
        for database in databases:
            _limit(database, question["max_steps"])
        found = [_rows(d, question["sql"], question["max_rows"]) for d in databases]
    except sqlite3.OperationalError as error:
        late = str(error) == "interrupted"
        return {"error": "the query takes too many steps" if late else str(error)}
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "the query takes too much memory"}
    return {"results": found}


def _rows(database: sqlite3.Connection, sql: str, max_rows: int) -> dict[str, Any]:
    cursor = database.execute(sql)
    names = [column[0] for column in cursor.description or ()]
    if not names:
        raise ValueError("that is no query")
    found = [list(map(_plain, row)) for row in cursor.fetchmany(max_rows)]
    if cursor.fetchone() is not None:
        raise ValueError(f"the query gives more than {max_rows} rows")
    return {"columns": names, "rows": found}


def _opened(spec: dict[str, Any]) -> sqlite3.Connection:
    """The database: a script run in memory, or a file that is only read."""
    if spec["path"] is None:
        database = sqlite3.connect(":memory:")
        database.executescript(spec["script"])
    else:
        database = sqlite3.connect(f"file:{quote(spec['path'])}?mode=ro&immutable=1", uri=True)
        if spec["thin"] is not None:
            database = _thinned(database, spec["thin"])
    # Files of others hold text in old encodings.
    database.text_factory = lambda data: data.decode(errors="replace")
    return database


def _thinned(found: sqlite3.Connection, part: int) -> sqlite3.Connection:
    """A copy in memory without a third of each table's rows: those of one part."""
    copy = sqlite3.connect(":memory:")
    found.backup(copy)
    found.close()
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%'"
    for (name,) in copy.execute(f"{tables} ESCAPE '\\'").fetchall():
        quoted = '"' + name.replace('"', '""') + '"'
        try:
            copy.execute(f"DELETE FROM {quoted} WHERE abs(rowid % 3) = ?", (part,))
        except sqlite3.OperationalError:
            continue  # a table without rowid keeps its rows
    copy.commit()
    return copy


def _limit(database: sqlite3.Connection, max_steps: int) -> None:
    """From here on: reads alone, no further file, a budget of steps, bounded memory."""
    database.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
    database.execute("PRAGMA temp_store = MEMORY")
    database.execute("PRAGMA query_only = ON")
    for category, limit in _LIMITS.items():
        database.setlimit(category, limit)
    left = max_steps // STEPS_AT_ONCE

    def over() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    database.set_progress_handler(over, STEPS_AT_ONCE)
    database.set_authorizer(_judge)


def _judge(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action not in _READS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _REFUSED:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _plain(value: Any) -> Any:
    return {"blob": value.hex()} if isinstance(value, bytes) else value
