"""Problems from files, the order they come in, and several environments as one."""

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data import ProblemStream, check_lengths, from_files, mix, problem_at, read_rows
from agentrl.errors import ConfigError, PluginError
from agentrl.grading import statistics
from agentrl.plugins import problems_of
from agentrl.rollout import Limits, Stage, run_group, run_script
from agentrl.store import ParquetStore
from agentrl.testing.environment import check_environment
from agentrl.testing.fakes import CharRenderer, FakeTool, FixedEngine, a_problem
from agentrl.tools import ToolEnvironment, answer, call, problem, tool
from agentrl.types import Group, Problem, Trajectory, Verdict, system, user
from agentrl.verifiers import ExactMatch, NumericMatch

ROWS: list[dict[str, Any]] = [
    {"question": f"What is {n} + {n}?", "gold": {"value": str(2 * n)}, "kind": f"k{n % 2}",
     "rate": n / 9} for n in range(10)
]  # fmt: skip
FLAT = [{"prompt": r["question"], "reference": r["gold"]["value"]} for r in ROWS]
OPTIONS = {"prompt": "question", "reference": "gold.value"}


def written(folder: Path, kind: str, rows: Sequence[Any] = FLAT) -> str:
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif kind == "json":
        path.write_text(json.dumps(list(rows)))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


class Sums(ToolEnvironment):
    verifier = NumericMatch(only_number=True)
    problems = staticmethod(from_files)


def made(split: str = "train", **options: Any) -> list[Problem]:
    return list(problems_of(Sums, split, options))  # type: ignore[arg-type]


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_format_gives_the_same_problems(tmp_path: Path, kind: str) -> None:
    found = made(train=written(tmp_path, kind), test_share=0.0)
    assert [p.task.prompt for p in found] == [(user(r["prompt"]),) for r in FLAT]
    assert [p.reference for p in found] == [r["reference"] for r in FLAT]
    assert [p.task.id for p in found] == [f"data.{kind}:{n}" for n in range(1, 11)]


def test_a_hub_data_set_is_read_by_its_library(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "mine"
    folder.mkdir()
    written(folder, "csv")
    assert len(made(train=f"hub:{folder}:train", test_share=0.0)) == 10


def test_fields_are_mapped_by_the_options(tmp_path: Path) -> None:
    found = made(
        train=written(tmp_path, "jsonl", ROWS), test_share=0.0, prompt="{kind}: {question}",
        reference="gold.value", id="question", family="kind", setup=["kind"],
        system_prompt="Be brief.",
    )  # fmt: skip
    first = found[0].task
    assert first.prompt == (system("Be brief."), user("k0: What is 0 + 0?"))
    assert (first.id, first.family, dict(first.setup)) == ("What is 0 + 0?", "k0", {"kind": "k0"})
    talk = [{"prompt": [{"role": "user", "content": "hi"}], "reference": "x"}]
    (spoken,) = made(train=written(tmp_path, "jsonl", talk), test_share=0.0)
    assert spoken.task.prompt == (user("hi"),)


@given(share=st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_the_splits_are_the_whole_and_share_nothing(tmp_path_factory: Any, share: float) -> None:
    path = written(tmp_path_factory.mktemp("x"), "jsonl")
    parts = []
    for split in ("train", "test"):
        parts.append([p.task.id for p in from_files(split, train=path, test_share=share)])  # type: ignore[arg-type]
    assert sorted(parts[0] + parts[1]) == sorted(f"data.jsonl:{n}" for n in range(1, 11))


def test_repeated_and_leaked_prompts_are_left_out_and_said(tmp_path: Path) -> None:
    again = [*FLAT, {**FLAT[0], "prompt": f"  {FLAT[0]['prompt'].upper()}\n"}]
    train = written(tmp_path, "jsonl", again)
    test = written(tmp_path, "csv", FLAT[:3])
    with pytest.warns(UserWarning) as said:
        found = made(train=train, test=test)
    assert len(found) == 7
    (leaked,) = [str(w.message) for w in said]
    assert "left out: 4 rows have a prompt of the test split (data.jsonl:1, " in leaked
    with pytest.warns(UserWarning, match=r"1 rows repeat the prompt .*data.jsonl:11"):
        assert len(made(train=train, test_share=0.0)) == 10
    assert len(made(train=train, test_share=0.0, deduplicate=False)) == 11
    assert len(made("test", train=train, test=test)) == 3


def test_a_band_leaves_out_rows_that_were_measured_outside(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", ROWS)
    options = {**OPTIONS, "pass_rate": "rate", "pass_band": [0.2, 0.8], "test_share": 0.0}
    found = made(train=path, **options)
    assert [p.task.id for p in found] == [f"data.jsonl:{n + 1}" for n in range(2, 8)]
    assert found[0].pass_band == (0.2, 0.8)


@pytest.mark.parametrize(
    ("rows", "options", "why"),
    [
        ([{"a": 1}], {}, r"data.jsonl:1 has no field 'prompt'; its fields: a"),
        ([FLAT[0], {"prompt": " ", "reference": "x"}], {}, r"data.jsonl:2: prompt is empty"),
        ([{"prompt": "x", "reference": None}], {}, r"data.jsonl:1: reference is empty"),
        ([3], {}, "data.jsonl:1 must be an object, not int"),
        (FLAT, {"pass_rate": "reference"}, r"reference must be a share of passes"),
        ([{"prompt": [{"role": "x"}], "reference": "x"}], {}, "data.jsonl:1: a message needs"),
        (FLAT, {"test_share": 2}, "test_share: Input should be less than or equal to 1"),
    ],
)
def test_a_wrong_row_is_named(
    tmp_path: Path, rows: list[Any], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        made(train=written(tmp_path, "jsonl", rows), **options)


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("x.jsonl", b"{}\n{bad", "x.jsonl:2 is not JSON"),
        ("x.json", b"{}", "must hold a list"),
        ("x.csv", b"a,b\n1\n", "x.csv:1 has not as many cells"),
        ("x.parquet", b"no", "x.parquet"),
        ("x.jsonl", b"\xff\xfe", "not UTF-8"),
        ("x.txt", b"", "data is .jsonl"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=why):
        list(read_rows(str(path)))
    with pytest.raises(ValueError, match="No such file"):
        list(read_rows(str(tmp_path / "none.jsonl")))


async def test_an_environment_from_a_file_keeps_the_contract(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n}.", "reference": f"<{n}>"} for n in range(30)]
    path = written(tmp_path, "jsonl", rows)

    def oracle(problem: Problem) -> Any:
        yield answer(problem.reference)

    class Says(ToolEnvironment):
        verifier = ExactMatch()
        problems = staticmethod(from_files)
        scripts = {"oracle": oracle}  # noqa: RUF012

    assert await check_environment(Says, options={"train": path, "test_share": 0.3}) == ()


# ---------------------------------------------------------------- lengths


def test_overlong_prompts_are_refused_with_their_ids() -> None:
    problems = [a_problem("x" * n, id=f"row:{n}") for n in (1, 10, 90, 95, 300)]
    renderer, tools = CharRenderer(), [FakeTool("f")]
    check_lengths(problems[:2], renderer, tools, context_tokens=100)
    with pytest.raises(ConfigError, match=r"3 of 5 .*\(100\): row:90 \(\d+\), row:95") as error:
        check_lengths(problems, renderer, tools, context_tokens=100)
    assert "row:10 " not in str(error.value)


@given(sizes=st.lists(st.integers(0, 120), max_size=6), limit=st.integers(20, 140))
def test_what_is_refused_is_what_would_not_fit(sizes: list[int], limit: int) -> None:
    renderer = CharRenderer()
    problems = [a_problem("é" * n, id=str(n)) for n in sizes]
    fits = all(len(renderer.open(p.task.prompt, ())) < limit for p in problems)
    try:
        check_lengths(problems, renderer, (), context_tokens=limit)
    except ConfigError:
        assert not fits
    else:
        assert fits


# ---------------------------------------------------------------- the stream


def of_family(name: str, count: int, weight: float = 1.0) -> list[Problem]:
    made = [a_problem(id=f"{name}{n}") for n in range(count)]
    return [replace(p, task=replace(p.task, family=name), weight=weight) for p in made]


def measured(problem: Problem, *passed: bool) -> Group:
    members = [
        Trajectory(id=f"{problem.task.id}/{m}", task_id=problem.task.id, member=m, seed=0,
                   prompt=(), turns=(), ending="answered")  # type: ignore[arg-type]
        for m in range(len(passed))
    ]  # fmt: skip
    verdicts = tuple(Verdict(reward=float(p), passed=p) for p in passed)
    return Group(task_id=problem.task.id, trajectories=tuple(members), verdicts=verdicts,
                 task=problem.task)  # fmt: skip


def test_without_weights_it_is_the_plain_stream() -> None:
    problems = [*of_family("a", 3), *of_family("b", 4)]
    stream = ProblemStream(problems, seed=5)
    assert [stream.at(i) for i in range(30)] == [problem_at(problems, i, 5) for i in range(30)]


def test_families_come_by_their_weights_and_each_epoch_has_every_problem() -> None:
    problems = [*of_family("a", 2, weight=3 / 2), *of_family("b", 100, weight=1 / 100)]
    stream = ProblemStream(problems, seed=1)
    drawn = [stream.at(i) for i in range(2000)]
    share = sum(p.task.family == "a" for p in drawn) / 2000
    assert share == pytest.approx(0.75, abs=0.04)
    of_b = [p.task.id for p in drawn if p.task.family == "b"]
    assert set(Counter(of_b[:400]).values()) == {4}
    again = ProblemStream(problems, seed=1)
    assert [again.at(i) for i in (1999, 3, 700)] == [drawn[1999], drawn[3], drawn[700]]


def test_weights_that_differ_within_a_family_are_refused() -> None:
    with pytest.raises(ConfigError, match="family 'a' have different weights"):
        ProblemStream([*of_family("a", 2), *of_family("a", 2, weight=2.0)], seed=0)


def test_what_is_outside_the_band_is_mostly_passed_over() -> None:
    problems = [replace(p, pass_band=(0.1, 0.9)) for p in of_family("a", 20)]
    stream = ProblemStream(problems, seed=0)
    assert stream.has_band
    before = [stream.at(i).task.id for i in range(20)]
    assert sorted(before) == sorted(p.task.id for p in problems), "what is unknown is all drawn"
    stream.learn(measured(p, True, True) for p in problems[:10])
    stream.learn(measured(p, True, False) for p in problems[10:])
    drawn = Counter(stream.at(i).task.id for i in range(400))
    solved = sum(drawn[p.task.id] for p in problems[:10])
    assert 0 < solved < 80
    stream.learn(measured(p, False, False) for p in problems)
    assert stream.at(0) in problems, "where all are outside, any will do"


# ---------------------------------------------------------------- mixtures


class Doubles(ToolEnvironment):
    verifier = NumericMatch(only_number=True)

    @tool
    def double(self, n: int) -> int:
        """Twice a number."""
        return 2 * n

    @staticmethod
    def problems(split: str, *, count: int = 10) -> list[Problem]:
        numbers = range(count) if split == "train" else range(count, count + 5)
        return [problem(f"Twice {n}?", str(2 * n), setup={"n": n}) for n in numbers]

    @staticmethod
    def oracle(problem: Problem) -> Any:
        (seen,) = yield call("double", n=problem.task.setup["n"])
        yield answer(seen.content)

    scripts = {"oracle": oracle}  # noqa: RUF012


class Echoes(ToolEnvironment):
    verifier = ExactMatch()

    @staticmethod
    def problems(split: str) -> list[Problem]:
        return [problem(f"{split} {n}?", f"<{split[::-1]} {n}>") for n in range(4)]

    @staticmethod
    def oracle(problem: Problem) -> Any:
        yield answer(problem.reference)

    scripts = {"oracle": oracle}  # noqa: RUF012


MIXED = mix(doubles=Doubles, echoes=Echoes)


async def test_a_mixture_keeps_the_contract_of_its_members() -> None:
    assert await check_environment(MIXED) == ()


async def test_each_problem_is_played_and_graded_by_its_own() -> None:
    found = problems_of(MIXED, "train", {"each": {"doubles": {"count": 6}}})
    assert Counter(p.task.family for p in found) == {"doubles": 6, "echoes": 4}
    assert [p.task.family for p in found[:4]] == ["doubles", "echoes"] * 2
    stage = Stage(engine=FixedEngine("x"), renderer=CharRenderer(), environment=MIXED)
    opened = []
    for one in found[:2]:
        episode = await run_script(stage, one, MIXED.scripts["oracle"])
        opened.append(stage.renderer.parse(episode.trajectory.turns[0].observation.token_ids))
        (verdict,) = await MIXED.verifier.grade(one, [episode], None)
        assert verdict.passed
    assert "tools: double" in opened[0].content
    assert "tools" not in opened[1].content


async def test_metrics_are_told_by_family_and_the_record_keeps_it(tmp_path: Path) -> None:
    found = problems_of(MIXED, "train", {"weights": {"doubles": 3.0}})
    assert {p.task.family: p.weight for p in found} == {"doubles": 0.3, "echoes": 0.25}
    limits = Limits(context_tokens=500)
    engine = FixedEngine(found[1].reference)
    stage = Stage(engine=engine, renderer=CharRenderer(), environment=MIXED, limits=limits)
    groups = [await run_group(stage, p, size=2, seed=0) for p in found[:4]]
    store = ParquetStore(tmp_path)
    store.append(groups, version=0)
    for seen in (groups, list(store.read())):
        row = statistics(seen).as_row()
        assert row["family_success"] == {"doubles": 0.0, "echoes": 0.5}
        assert row["family_reward"] == {"doubles": 0.0, "echoes": 0.5}


def test_wrong_mixtures_are_refused() -> None:
    with pytest.raises(ConfigError, match="no family 'x': doubles, echoes"):
        problems_of(MIXED, "train", {"weights": {"x": 1.0}})
    with pytest.raises(ConfigError, match=r"count: unknown|unknown option"):
        problems_of(MIXED, "train", {"each": {"echoes": {"count": 1}}})
    with pytest.raises(PluginError, match="no environment 'nope'"):
        mix(a="nope")
    with pytest.raises(PluginError, match="one environment at least"):
        mix()
