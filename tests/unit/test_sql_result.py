"""Queries are graded by what they give on hidden databases; hostile ones are refused and killed."""

import asyncio
import os
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verifier_cases import verdicts

from agentrl.errors import ToolError
from agentrl.verifiers import LimitedSqlite, SqlDatabase, SqlReference, SqlResult
from agentrl.verifiers.sql import Rows

TABLE = "CREATE TABLE t(a, b); INSERT INTO t VALUES "
ONE = SqlDatabase(script=f"{TABLE} (1,'x'), (2,NULL), (3.5,'y'), (2,NULL), (1,'X');")
TWO = SqlDatabase(script=f"{TABLE} (7,'x'), (2,'y'), (NULL,'z');")
SQLITE = LimitedSqlite()
RESULT = SqlResult(sqlite=SQLITE)
COUNTING = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
DENIED = "not authorized|authorization denied"


def reward(gold: str, said: str, *hidden: SqlDatabase) -> float | None:
    reference = SqlReference(gold=gold, hidden=hidden or (ONE, TWO))
    (verdict,) = verdicts(RESULT, reference, said)
    assert verdict.invalid is None, verdict
    return verdict.reward


def run(
    sql: str, database: SqlDatabase = ONE, sqlite: LimitedSqlite = SQLITE
) -> Rows | ToolError | Exception:
    (found,) = asyncio.run(sqlite.ask([sql], [database]))
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize(
    ("gold", "said", "passes"),
    [
        ("SELECT a FROM t", "select a as other from t order by a desc", True),
        ("SELECT a FROM t", "SELECT DISTINCT a FROM t", False),
        ("SELECT a FROM t", "SELECT a, b FROM t", False),
        ("SELECT a, b FROM t", "SELECT b, a FROM t", False),
        ("SELECT a FROM t ORDER BY a, b", "SELECT a FROM t ORDER BY a DESC", False),
        ("SELECT a FROM t ORDER BY a, b", "SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", "SELECT a FROM t", True),
        ("SELECT a FROM t WHERE b <> ' order by '", "SELECT a FROM t WHERE b > '' ORDER BY 1", 1),
        ("SELECT a FROM t", "SELECT a * 1.0 FROM t", True),
        ("SELECT a FROM t", "SELECT CAST(a AS TEXT) FROM t", False),
        ("SELECT a FROM t", "SELECT coalesce(a, 0) FROM t", False),
        ("SELECT b FROM t", "SELECT coalesce(b, 'NULL') FROM t", False),
        ("SELECT b FROM t", "SELECT CAST(b AS BLOB) FROM t", False),
        ("SELECT CAST(b AS BLOB) FROM t", "SELECT CAST(b AS BLOB) FROM t", True),
        ("SELECT b FROM t", "SELECT lower(b) FROM t", False),
        ("SELECT sum(a) / 3.0 FROM t", "SELECT sum(a / 3.0) FROM t", True),
        ("SELECT sum(a) / 3.0 FROM t", "SELECT round(sum(a) / 3.0, 3) FROM t", False),
        ("SELECT count(*) FROM t", "SELECT 5", False),
        ("SELECT max(a) FROM t", "SELECT 3.5", False),
        ("SELECT a FROM t WHERE a > 6", "SELECT a FROM t WHERE 0", False),
        ("SELECT a FROM t WHERE a > 6", "SELECT 9e999 - 9e999", False),
    ],
)  # fmt: skip
def test_results_are_compared(gold: str, said: str, passes: bool) -> None:
    assert reward(gold, said) == float(passes)
    assert reward(gold, gold) == 1.0


def test_where_the_query_of_an_answer_stands() -> None:
    right, wrong = "SELECT a FROM t", "SELECT b FROM t"
    for said in (
        f"<sql>{wrong}</sql> no: <SQL>\n{right};\n</SQL> that is it",
        f"So:\n```sql\n{right}\n```\n",
        f"```sql\n{wrong}\n```\n<sql>{right}</sql>",
        f"{right} -- all of them",
    ):
        assert reward(right, said) == 1.0, said
    for said in (f"<sql>{right}</sql> or <sql>{wrong}</sql>", f"It is {right}", f"<sql>{right}"):
        assert reward(right, said) == 0.0, said


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
            st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
        ),
        min_size=1,
        max_size=6,
    ),
    st.randoms(),
)
def test_rows_in_any_order_are_the_same_rows(rows: list[tuple[Any, Any]], rng: Any) -> None:
    def values(found: list[tuple[Any, Any]]) -> str:
        with closing(sqlite3.connect(":memory:")) as database:
            quoted = [
                database.execute("SELECT quote(?), quote(?)", row).fetchone() for row in found
            ]
        return ", ".join(f"({a}, {b})" for a, b in quoted)

    shuffled = rng.sample(rows, len(rows))
    assert reward(f"VALUES {values(rows)}", f"VALUES {values(shuffled)}") == 1.0
    assert reward(f"VALUES {values(rows)}", f"VALUES {values([*rows, rows[0]])}") == 0.0


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("", "no query"), ("-- nothing", "no query"), ("SELEC 1", "syntax error"),
        ("SELECT 1\0", "null"), ("SELECT 1; SELECT 2", "one statement"),
        ("ATTACH '{path}' AS x", DENIED), ("DETACH main", DENIED),
        ("VACUUM INTO '{path}'", DENIED), ("PRAGMA query_only = OFF", DENIED),
        ("PRAGMA table_info(t)", DENIED), ("BEGIN", DENIED),
        ("SELECT * FROM pragma_database_list", DENIED),
        ("INSERT INTO t VALUES (1, 2)", DENIED), ("DELETE FROM t", DENIED),
        ("UPDATE t SET a = 1 RETURNING a", DENIED), ("DROP TABLE t", DENIED),
        ("CREATE TEMP TABLE x(a)", DENIED), ("REINDEX", "no query"),
        ("SELECT load_extension('{path}')", DENIED),
        ("SELECT random()", DENIED), ("SELECT hex(randomblob(4))", DENIED),
        ("SELECT readfile('{path}')", "no such function"),
        ("SELECT writefile('{path}', 'x')", "no such function"),
        (f"{COUNTING} SELECT count(*) FROM n", "too many steps"),
        (f"{COUNTING} SELECT i FROM n", "more than 1000 rows"),
        (f"{COUNTING} SELECT hex(zeroblob(400000)) FROM n LIMIT 9", "too much: its answer was cut"),
        ("SELECT replace(hex(zeroblob(400000)), '0', '0123456789')", "too big"),
        ("SELECT zeroblob(100000000)", "too big"),
        ("SELECT " + "(" * 999 + "1" + ")" * 999, "too deep|overflow|depth"),
        ("SELECT 1" + " UNION SELECT 1" * 200, "too many terms"),
        ("SELECT '" + "x" * 70_000 + "'", "too large|too long|longer|too big"),
        ("SELECT 1 LIKE '" + "%_" * 200 + "'", "too complex"),
    ],
)  # fmt: skip
def test_a_hostile_query_is_refused(sql: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "written.db"
    found = run(sql.replace("{path}", str(path)))
    assert isinstance(found, ToolError), found
    assert re.search(told, str(found)), found
    assert not path.exists()
    assert reward("SELECT a FROM t", sql) == 0.0


def test_a_slow_query_is_killed_and_the_next_one_is_answered() -> None:
    sqlite = LimitedSqlite(max_steps=10**12, limit_s=0.3)
    begun = time.monotonic()
    found = run(f"{COUNTING} SELECT count(*) FROM n", sqlite=sqlite)
    assert "too long" in str(found) and time.monotonic() - begun < 20
    assert run("SELECT 1", sqlite=sqlite) == Rows(columns=("1",), rows=((1,),))


def test_what_a_database_file_holds_is_read_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "odd name?#%.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(f"{TABLE} (1, 'x'), (2, NULL), (3, 'y'), (4, CAST(x'e9' AS TEXT));")
    before = path.read_bytes()
    found = run("SELECT a, b FROM t", SqlDatabase(path=str(path)))
    assert isinstance(found, Rows)
    assert found.rows == ((1, "x"), (2, None), (3, "y"), (4, "\ufffd"))
    thin = [run("SELECT a FROM t", SqlDatabase(path=str(path), thin=n)) for n in (0, 1, 2)]
    assert all(isinstance(part, Rows) and len(part.rows) < 4 for part in thin)
    run("DELETE FROM t", SqlDatabase(path=str(path)))
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_the_schema_tells_nothing_but_the_schema() -> None:
    found = run("SELECT sql FROM sqlite_master")
    assert isinstance(found, Rows) and found.rows == (("CREATE TABLE t(a, b)",),)
    assert "no such table" in str(run("SELECT * FROM gold"))


def test_rows_as_text() -> None:
    found = run("SELECT a, b, x'00ff' AS c FROM t LIMIT 3")
    assert isinstance(found, Rows)
    assert found.as_text(max_rows=2) == "a|b|c\n1|x|x'00ff'\n2|NULL|x'00ff'\n[1 more rows]"


@pytest.mark.parametrize(
    "reference",
    [
        "SELECT 1",
        None,
        SqlReference(gold="SELECT nothing FROM t", hidden=(ONE,)),
        SqlReference(gold="DELETE FROM t", hidden=(ONE,)),
        SqlReference(gold="SELECT a FROM t WHERE a > 99", hidden=(ONE, TWO)),
        SqlReference(gold="SELECT 1", hidden=(SqlDatabase(script="CREATE TABL"),)),
        SqlReference(gold="SELECT 1", hidden=(SqlDatabase(path="/no/such.sqlite"),)),
    ],
)
def test_what_cannot_be_graded_is_invalid(reference: Any) -> None:
    found = verdicts(RESULT, reference, "SELECT 1", "")
    assert len(found) == 2 and all(v.invalid and v.reward is None for v in found)


def test_bad_options_are_refused() -> None:
    for make in (
        lambda: LimitedSqlite(max_steps=0),
        lambda: LimitedSqlite(limit_s=0),
        lambda: LimitedSqlite(max_rows=0),
        lambda: SqlResult(concurrency=0),
        lambda: SqlDatabase(),
        lambda: SqlDatabase(script="", path=""),
        lambda: SqlReference(gold="SELECT 1", hidden=()),
    ):
        with pytest.raises(ValueError):
            make()
