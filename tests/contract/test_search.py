"""The search family: solvable by finding, not otherwise; its corpora and rows read or refused."""

import json
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agentrl_environments.search import Desk, Search, library
from agentrl_environments.search_pages import Library, Page, read_pages
from agentrl_environments.search_verdict import OPENED, FoundAnswer, Question, holds
from agentrl_environments.search_world import RELATIONS, World
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.parsing import tool_format
from agentrl.plugins import problems_of
from agentrl.rollout import Stage, run_script
from agentrl.testing.environment import LIMITS, check_environment
from agentrl.testing.fakes import CharRenderer, FixedEngine
from agentrl.tools import answer, call, problem
from agentrl.types import Episode, Problem, Verdict

pytest.importorskip("bm25s")

PAGES = [
    {"id": "a", "title": "Ada", "text": "Ada lives in the Old Mill."},
    {"id": "b", "contents": '"Bo"\nBo lives with Ada.'},
    {"id": "c", "contents": '"Cy"\nCy has a boat.'},
]
ROWS = [
    {"question": f"Where does number {n} live?", "golden_answers": ["Old Mill", "the Mill"]}
    for n in range(20)
]


def jsonl(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


async def play(problem: Problem, script: Any) -> tuple[Episode, Verdict]:
    stage = Stage(
        engine=FixedEngine(""),
        renderer=CharRenderer(),
        environment=Search,
        sandboxes=None,
        limits=LIMITS,
    )
    episode = await run_script(stage, problem, script)
    (verdict,) = await Search.verifier.grade(problem, [episode], None)
    assert verdict.invalid is None
    return episode, verdict


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hops": [4], "people": 24, "noise": 6, "top_k": 8, "seed": 3},
        {"hops": [1, 2], "brief": True, "cite": False, "top_k": 1},
        {"tags": True, "results": "pages", "top_k": 3},
    ],
)
async def test_it_keeps_the_contract(options: Mapping[str, Any]) -> None:
    assert await check_environment(Search, options={"count": 200, **options}) == ()


async def test_a_corpus_of_ones_own_keeps_it_too(tmp_path: Path) -> None:
    options = {
        "corpus": jsonl(tmp_path / "pages.jsonl", PAGES),
        "questions": jsonl(tmp_path / "questions.jsonl", ROWS),
    }
    assert await check_environment(Search, options=options) == ()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), people=st.integers(12, 120), short=st.booleans())
def test_the_pages_lead_from_the_question_to_the_answer(seed, people, short) -> None:
    world = World(str(seed), people=people, noise=2, short=short)
    texts = {page.title: page.text for page in world.pages}
    assert len(texts) == len(world.pages) == len({page.id for page in world.pages})
    found = world.chains([1, 2, 3, 4], "q")
    for chain in islice(found, 4):
        path = (chain.start, *chain.names)
        assert len(set(path)) == len(chain.relations) + 1
        assert all(holds(texts[a], b) for a, b in pairwise(path))
        assert not any(holds(text, path[-1]) for text in (chain.question, chain.short))
        assert 1 <= len(chain.relations) <= 4
    known = {r.name for r in RELATIONS}
    assert all(set(facts) <= known for facts in world.facts.values())


def test_splits_share_neither_questions_nor_facts() -> None:
    train, test = (problems_of(Search, split, {"count": 300}) for split in ("train", "test"))
    assert len(train) == len(test) == 300
    assert not {p.task.prompt[-1].content for p in train} & {
        p.task.prompt[-1].content for p in test
    }
    assert len({p.task.setup["seed"] for p in train} | {p.task.setup["seed"] for p in test}) == 2


async def test_a_citation_counts_when_its_page_was_opened_and_says_so() -> None:
    asked = problems_of(Search, "train", {"hops": [2], "count": 1})[0]
    gold, (first, last) = asked.reference.answers[0], asked.reference.path
    ids = {page.title: page.id for page in library(Desk(**asked.task.setup)).pages}

    def says(text: str, *opened: str) -> Any:
        def script(_: Problem) -> Any:
            for title in opened:
                yield call("open_page", id=f"[{ids[title]}]")
            yield answer(text)

        return script

    async def outcome(text: str, *opened: str) -> tuple[float, bool, tuple[float, ...]]:
        episode, verdict = await play(asked, says(text, *opened))
        assert set(json.loads(episode.artifacts[OPENED])) == {ids[title] for title in opened}
        return verdict.reward or 0.0, bool(verdict.passed), tuple(verdict.components.values())

    assert await outcome(f"{gold.upper()} [{ids[last]}].", first, last) == (1, True, (1, 1, 1))
    assert await outcome(f"{gold} [{ids[last]}]", first) == (0.5, False, (1, 1, 0))
    assert await outcome(f"{gold} [{ids[first]}]", first, last) == (0.5, False, (1, 1, 0))
    assert await outcome(gold, first, last) == (0.5, False, (1, 1, 0))
    assert await outcome(f"{gold} [{ids[last]}] [7]", last) == (0, False, (0, 2 / 3, 0))
    assert await outcome(f"Nowhere [{ids[last]}]", last) == (0, False, (0, 0, 1))


async def test_partial_credit_and_what_cannot_be_graded() -> None:
    asked = problem("?", Question(answers=("Old Mill",), cite=False))
    episode, _ = await play(problems_of(Search, "train", {"count": 1})[0], says_house)
    (verdict,) = await FoundAnswer(partial=0.2).grade(asked, [episode], None)
    assert verdict.reward == pytest.approx(0.2 * 0.5) and not verdict.passed
    for reference in ("Old Mill", None, Question(answers=()), Question(answers=("the",))):
        (verdict,) = await FoundAnswer().grade(problem("?", reference), [episode], None)
        assert verdict.invalid


def says_house(_: Problem) -> Any:
    yield answer("the old house")


async def test_the_tags_of_search_r1_are_a_tool_format() -> None:
    form = tool_format("tags", ["search", "open_page"])
    asked = problems_of(
        Search, "train", {"tags": True, "results": "pages", "top_k": 2, "cite": False, "count": 1}
    )[0]
    title, gold = asked.reference.path[0], asked.reference.answers[0]

    def script(_: Problem) -> Any:
        yield form.parse(f"I look it up. <search>{title}</search>")
        yield form.parse(f"I know. <answer> {gold} </answer>")

    episode, verdict = await play(asked, script)
    seen = episode.trajectory.turns[0].reply[0].content
    assert seen.startswith("<information>[") and seen.endswith("</information>")
    assert seen.count("\n[") == 1, "two pages"
    assert "<answer> Beijing </answer>" in asked.task.prompt[-1].content
    assert len(asked.reference.path) == 1 and verdict.passed

    def untagged(_: Problem) -> Any:
        yield answer(gold)

    assert (await play(asked, untagged))[1].reward == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
async def test_rows_of_search_r1_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        jsonl(path, ROWS)
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    options = {"corpus": jsonl(tmp_path / "pages.jsonl", PAGES), "questions": str(path)}
    both = [p for s in ("train", "test") for p in problems_of(Search, s, options)]
    assert len(both) == len(ROWS) and both[0].reference.answers == ("Old Mill", "the Mill")
    episode, verdict = await play(both[0], Search.scripts["oracle"])
    assert verdict.passed and episode.trajectory.answer == "Old Mill [a]"


def test_a_folder_is_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "towns").mkdir()
    (tmp_path / "towns" / "oslo.md").write_text("# Oslo\n\nOslo has a fjord.\n")
    (tmp_path / "bergen.txt").write_text("Bergen\nIt rains in Bergen.")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    (tmp_path / "empty.md").write_text("")
    pages = list(read_pages(str(tmp_path)))
    assert [(p.id, p.title) for p in pages] == [("bergen.txt", "Bergen"), ("towns/oslo.md", "Oslo")]
    found = Library(pages, "bm25")
    assert [p.title for p in found.search("where is a FJORD?", 5)] == ["Oslo"]
    for query in ("", "\0", "\ud800", "é😀", "none of these"):
        assert found.search(query, 5) == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "needs pages"),
        ([PAGES[0], PAGES[0]], "an id of its own"),
        ([{"title": "x"}], "pages.jsonl:1 has no field 'id'"),
        ([{"id": 1, "title": "x"}], "pages.jsonl:1 has no field 'text'"),
        ([7], "pages.jsonl:1 must be an object"),
    ],
)
def test_a_bad_corpus_is_named(tmp_path: Path, rows: Sequence[Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        library(Desk(corpus=jsonl(tmp_path / "pages.jsonl", rows)))


@pytest.mark.parametrize(
    "options",
    [
        {"count": 0}, {"people": 3}, {"hops": []}, {"hops": [5]}, {"hops": [0]}, {"top_k": 0},
        {"corpus": "x"}, {"questions": "x"}, {"corpus": "no.jsonl", "questions": "none.jsonl"},
        {"retriever": "best"}, {"retriever": "dense:"}, {"results": "all"},
    ],
)  # fmt: skip
def test_a_bad_option_is_the_users_mistake(options: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError):
        problems_of(Search, "train", options, 1)


@pytest.mark.parametrize("golden", [None, "", [], [7], ["x", " "]])
def test_a_question_without_answers_is_named(tmp_path: Path, golden: Any) -> None:
    row = {"question": "?", "golden_answers": golden}
    options = {
        "corpus": jsonl(tmp_path / "pages.jsonl", PAGES),
        "questions": jsonl(tmp_path / "rows.jsonl", [row]),
    }
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: golden_answers"):
        problems_of(Search, "train", options)


def test_dense_retrieval_ranks_by_embedding(tmp_path: Path) -> None:
    """With a bag-of-words model made here, so that nothing is downloaded."""
    st_models = pytest.importorskip("sentence_transformers.models")
    from sentence_transformers import SentenceTransformer

    folder = tmp_path / "model"
    words = st_models.BoW(vocab=["mill", "boat", "fjord", "ada"])
    SentenceTransformer(modules=[words], device="cpu").save(str(folder))
    pages = [Page(id=str(n), title=t, text=t) for n, t in enumerate(("mill", "boat", "fjord"))]
    found = Library(pages, f"dense:{folder}")
    assert [p.id for p in found.search("a boat", 1)] == ["1"] and found.search("?", 3) == []
