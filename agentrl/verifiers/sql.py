"""Queries of SQLite: run within limits, and graded by what they give on hidden databases."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import ToolError, VerifierFault
from agentrl.protocols import SandboxProvider
from agentrl.types import Episode, Problem, Verdict
from agentrl.verifiers.base import invalid, outcome
from agentrl.verifiers.killable import KillablePool, Reply
from agentrl.verifiers.unit_tests import code_of

MAX_SQL_CHARACTERS = 10_000

_WORKER = Path(__file__).with_name("sql_worker.py")
_TAGGED = re.compile(r"<sql>(.*?)</sql>", re.DOTALL | re.IGNORECASE)
_NO_CODE = re.compile(r"--[^\n]*|/\*.*?(?:\*/|\Z)|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlDatabase:
    """A database: a `script` that makes it in memory, or the `path` of a file, which is only read.

    `thin` (0, 1 or 2) is a copy of the file in memory without a third of each table's rows.
    Raises ValueError unless exactly one of script and path is given.
    """

    script: str | None = field(default=None, repr=False)
    path: str | None = None
    thin: int | None = None

    def __post_init__(self) -> None:
        if (self.script is None) == (self.path is None):
            raise ValueError("a database is a script or a path, not both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a query gave: values are None, int, float, str, or `{"blob": hex}`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def as_text(self, *, max_rows: int = 30) -> str:
        """A line of column names, then a line a row; at most `max_rows` of them."""
        lines = ["|".join(self.columns)]
        lines += ["|".join(map(_shown, row)) for row in self.rows[:max_rows]]
        more = len(self.rows) - max_rows
        return "\n".join([*lines, f"[{more} more rows]"] if more > 0 else lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedSqlite:
    """Runs queries that a model wrote, each in a process that can't write, open, attach or wait.

    On a database a query may take `max_steps` instructions of SQLite's machine (the same on every
    computer) and `max_rows` rows; on all together 256 MiB, a result of 1 MiB (as JSON) and
    `limit_s` seconds. Refused are all statements but queries, and the functions random, randomblob
    and load_extension. What a query gives follows from the database, unless it asks for the time.
    """

    max_steps: int = 5_000_000
    max_rows: int = 1000
    limit_s: float = 5.0
    _pool: KillablePool = field(
        default_factory=lambda: KillablePool(_WORKER), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.max_steps < 1 or self.limit_s <= 0 or self.max_rows < 1:
            raise ValueError("max_steps and max_rows must be at least 1, limit_s above 0")

    async def ask(
        self, queries: Sequence[str], databases: Sequence[SqlDatabase], *, concurrency: int = 1
    ) -> list[tuple[Rows, ...] | ToolError | VerifierFault]:
        """For each query its rows on each database, or an error.

        A ToolError is the query's fault, a VerifierFault the machine's. `concurrency` queries run
        at once.
        """
        specs = [asdict(database) for database in databases]
        questions = [
            {
                "databases": specs,
                "sql": sql.encode(errors="replace").decode(),
                "max_steps": self.max_steps,
                "max_rows": self.max_rows,
            }
            for sql in queries
        ]
        replies = await self._pool.ask(questions, limit_s=self.limit_s, concurrency=concurrency)
        return list(map(_found, replies))


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlReference:
    """The reference of a problem that `SqlResult` grades: the right query, and where it is tried.

    `hidden` databases have the schema that the agent sees and other rows. `near` holds wrong
    queries that an author made sure are told from `gold`. Raises ValueError without a database.
    """

    gold: str
    hidden: tuple[SqlDatabase, ...]
    near: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.hidden:
            raise ValueError("a reference needs at least one hidden database")


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlResult:
    """1 if the answer's query gives what the reference's gives on every hidden database, else 0.

    The query is that of the last `<sql>…</sql>`, else of the last fenced block, else the whole
    answer. Columns are compared in order, without their names; rows in order only where the gold
    has an ORDER BY of its own, else as a multiset. 1 equals 1.0 and not '1'; reals are compared in
    10 significant digits. What fails or is too costly (see `LimitedSqlite`) is wrong.
    `concurrency` bounds the queries of a group that run at once.
    """

    sqlite: LimitedSqlite = field(default_factory=LimitedSqlite)
    concurrency: int = 2

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError("concurrency must be at least 1")

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode; all invalid when the gold fails or finds nothing anywhere."""
        reference = problem.reference
        if not isinstance(reference, SqlReference):
            return invalid(episodes, "SqlResult needs a SqlReference as reference")
        (wanted,) = await self.sqlite.ask([reference.gold], reference.hidden)
        if not isinstance(wanted, tuple):
            return invalid(episodes, f"the reference can't be run: {wanted}")
        if not any(found.rows for found in wanted):
            return invalid(episodes, "the reference finds nothing in any hidden database")
        answers = [_query_of(episode.trajectory.answer) for episode in episodes]
        asked = [sql for sql in dict.fromkeys(answers) if len(sql) <= MAX_SQL_CHARACTERS]
        given = await self.sqlite.ask(asked, reference.hidden, concurrency=self.concurrency)
        found = dict(zip(asked, given, strict=True))
        too_long = ToolError("it is too long")
        ordered = _is_ordered(reference.gold)
        return [_verdict(found.get(sql, too_long), wanted, ordered) for sql in answers]


def _found(reply: Reply | VerifierFault) -> tuple[Rows, ...] | ToolError | VerifierFault:
    if isinstance(reply, VerifierFault):
        return reply
    if reply.status == "too_slow":
        return ToolError("the query takes too long")
    if reply.status == "failed":
        return ToolError(f"the query takes too much: {reply.note}")
    if "error" in reply.value:
        return ToolError(reply.value["error"])
    return tuple(
        Rows(columns=tuple(r["columns"]), rows=tuple(map(tuple, r["rows"])))
        for r in reply.value["results"]
    )


def _verdict(
    given: tuple[Rows, ...] | ToolError | VerifierFault, wanted: tuple[Rows, ...], ordered: bool
) -> Verdict:
    if isinstance(given, VerifierFault):
        return Verdict(invalid=f"VerifierFault: {given}")
    if isinstance(given, ToolError):
        return outcome(False, f"the query fails: {given}"[:200])
    return outcome(all(_same(g, w, ordered) for g, w in zip(given, wanted, strict=True)))


def _query_of(text: str) -> str:
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else code_of(text)).strip()


def _is_ordered(sql: str) -> bool:
    """Whether a query has an ORDER BY outside all parentheses."""
    text = _NO_CODE.sub("''", sql)
    while (inner := re.sub(r"\([^()]*\)", " ", text)) != text:
        text = inner
    return re.search(r"\bORDER\s+BY\b", text, re.IGNORECASE) is not None


def _same(given: Rows, wanted: Rows, ordered: bool) -> bool:
    if len(given.columns) != len(wanted.columns):
        return False
    left, right = ([tuple(map(_key, row)) for row in found.rows] for found in (given, wanted))
    return left == right if ordered else Counter(left) == Counter(right)


def _key(value: Any) -> Any:
    """What two values that are equal have in common."""
    if isinstance(value, float):
        return float(f"{value:.10g}")
    return ("blob", value["blob"]) if isinstance(value, dict) else value


def _shown(value: Any) -> str:
    if value is None:
        return "NULL"
    return f"x'{value['blob']}'" if isinstance(value, dict) else str(value)
