"""Questions that are answered by searching and reading pages, over one or several hops."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import islice
from random import Random
from typing import Any, Literal

from agentrl.data.rows import Row, read_rows
from agentrl.errors import ToolError
from agentrl.protocols import Split
from agentrl.tools import ToolEnvironment, answer, call, cut_bytes, problem, tool
from agentrl.types import Message, Messages, Problem, Task, system, user
from agentrl_environments.search_pages import Library, Page, check_retriever, read_pages
from agentrl_environments.search_verdict import OPENED, FoundAnswer, Question, holds
from agentrl_environments.search_world import World

MAX_PAGE_BYTES = 12_000
MAX_QUERY = 1000
SNIPPET = 80
INSTRUCTIONS = (
    "Find the answer to the question with the tools: `search` lists pages, each with its id in "
    "brackets, and `open_page` shows one. Reply with the answer alone"
)
# The prompt of Search-R1 (Jin et al. 2025).
TAGGED = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every "
    "time you get new information. After reasoning, if you find you lack some knowledge, you can "
    "call a search engine by <search> query </search> and it will return the top searched results "
    "between <information> and </information>. You can search as many times as your want. If you "
    "find no further external knowledge needed, you can directly provide the answer inside "
    "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing "
    "</answer>."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What an episode searches in, and how results look: JSON values, as a task's `setup` has them.

    `corpus` is a path; without one, the encyclopaedia of `seed`, `people`, `noise` and `brief`.
    """

    corpus: str = ""
    seed: str = ""
    people: int = 0
    noise: int = 0
    brief: bool = False
    retriever: str = "bm25"
    top_k: int = 5
    results: Literal["titles", "pages"] = "titles"
    tags: bool = False


class Search(ToolEnvironment):
    """Search, open pages, answer with the page that says so."""

    verifier = FoundAnswer()

    async def reset(self, task: Task, *, seed: int) -> tuple[Messages, Mapping[str, Any]]:
        """Open the library of the task, with no page seen."""
        self._desk = _desk(task)
        self._library = library(self._desk)
        self._seen: dict[str, str] = {}
        return await super().reset(task, seed=seed)

    @tool
    def search(self, query: str) -> str:
        """Find pages by words."""
        if len(query) > MAX_QUERY:
            raise ToolError(f"the query is longer than {MAX_QUERY} characters")
        found = self._library.search(query, self._desk.top_k)
        shown = "\n".join(self._shown(page) for page in found) or "no page fits"
        return f"<information>{shown}</information>" if self._desk.tags else shown

    @tool
    def open_page(self, id: str) -> str:
        """Show the page with this id."""
        page = self._library.by_id.get(id.strip().strip("[]"))
        if page is None:
            raise ToolError("there is no page with this id: ids are in brackets in the results")
        return self._read(page)

    async def artifacts(self) -> Mapping[str, bytes]:
        """The pages that were shown whole: what a citation is checked with."""
        await super().artifacts()
        return {OPENED: json.dumps(self._seen).encode()}

    def _shown(self, page: Page) -> str:
        if self._desk.brief:
            self._seen[page.id] = page.text
            return page.text
        if self._desk.results == "pages":
            return f"[{page.id}] {page.title}\n{self._read(page)}\n"
        text = " ".join(page.text.split())
        return f"[{page.id}] {page.title}: {text[:SNIPPET]}{'…' * (len(text) > SNIPPET)}"

    def _read(self, page: Page) -> str:
        text, _ = cut_bytes(page.text, MAX_PAGE_BYTES // (1 if self._desk.results == "titles" else
                                                          self._desk.top_k))  # fmt: skip
        self._seen[page.id] = text
        return text

    @staticmethod
    def problems(
        split: Split,
        *,
        hops: Sequence[int] = (1, 2, 3, 4),
        people: int = 200,
        noise: int = 2,
        count: int = 2000,
        seed: int = 0,
        brief: bool = False,
        corpus: str = "",
        questions: str = "",
        retriever: str = "bm25",
        top_k: int = 5,
        results: Literal["titles", "pages"] = "titles",
        cite: bool = True,
        tags: bool = False,
    ) -> Iterator[Problem]:
        """`count` questions at most; a question is in the test split when its hash says so.

        Generated ones follow `hops` relations, in turn, in an encyclopaedia with `people` people
        (and things in proportion) and `noise` idle sentences a page; train and test have one each.
        Or give `corpus` (see `read_pages`) and `questions`: rows with question and golden_answers.

        `results` are titles, or whole pages as in Search-R1; `cite`: answers name a page; `tags`:
        Search-R1's prompt and tags (with model.tool_format tags); `brief` leaves out instructions,
        and all but the facts, for policies with a small context.
        """
        if count < 1 or people < 12 or noise < 0 or not 1 <= top_k <= 50:
            raise ValueError("count at least 1, people 12, noise 0, top_k from 1 to 50")
        if not hops or min(hops) < 1 or max(hops) > 4:
            raise ValueError("hops are from 1 to 4")
        check_retriever(retriever)
        if bool(corpus) != bool(questions):
            raise ValueError("a corpus needs questions, and questions a corpus: give both paths")
        look = Desk(retriever=retriever, top_k=top_k, results=results, tags=tags, brief=brief)
        made = (
            _from_rows(look, corpus, questions, cite)
            if corpus
            else _generated(look, split, hops, cite, (seed, people, noise))
        )
        yield from islice((p for p in made if _is_test(p) == (split == "test")), count)

    @staticmethod
    def oracle(problem: Problem) -> Generator[Message, Messages, None]:
        """Look up the pages that lead to the answer, open each, cite the last."""
        desk, question = _desk(problem.task), problem.reference
        pages = _path(problem)
        for page in pages:
            yield call("search", query=page.title)
            if desk.results == "titles" and not desk.brief:
                yield call("open_page", id=page.id)
        yield _answer(question, question.answers[0], pages[-1].id)

    @staticmethod
    def guess(problem: Problem) -> Generator[Message, Messages, None]:
        """Answer at once, with the title of any page."""
        rng = Random(problem.task.id)
        page = rng.choice(library(_desk(problem.task)).pages)
        yield _answer(problem.reference, page.title, page.id)

    @staticmethod
    def by_heart(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: the right answer and the right page, which was never opened."""
        yield answer(f"{problem.reference.answers[0]} [{_path(problem)[-1].id}]")

    @staticmethod
    def another_page(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: the right answer, citing a page that was opened and says nothing of it."""
        gold = problem.reference.answers[0]
        pages = library(_desk(problem.task)).pages
        page = next(p for p in pages if not holds(p.text, gold))
        yield call("open_page", id=page.id)
        yield answer(f"{gold} [{page.id}]")

    @staticmethod
    def whole_page(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: the page that holds the answer as the answer."""
        page = _path(problem)[-1]
        (seen,) = yield call("open_page", id=page.id)
        yield _answer(problem.reference, seen.content, page.id)

    @staticmethod
    def every_title(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: all that could be the answer, and all pages."""
        pages = library(_desk(problem.task)).pages
        titles, ids = (" ".join(texts) for texts in zip(*((p.title, f"[{p.id}]") for p in pages),
                                                        strict=True))  # fmt: skip
        yield answer(f"{titles} {problem.reference.answers[0]} {ids}")

    scripts = {  # noqa: RUF012
        "oracle": oracle,
        "guess": guess,
        "by_heart": by_heart,
        "another_page": another_page,
        "whole_page": whole_page,
        "every_title": every_title,
    }


def library(desk: Desk) -> Library:
    """The library of a desk; opened once for all that search in it."""
    return _library(desk.corpus, desk.seed, desk.people, desk.noise, desk.brief, desk.retriever)


@cache
def _library(
    corpus: str, seed: str, people: int, noise: int, brief: bool, retriever: str
) -> Library:
    if corpus:
        return Library(list(read_pages(corpus)), retriever)
    return Library(World(seed, people=people, noise=noise, short=brief).pages, retriever)


def _desk(task: Task) -> Desk:
    return Desk(**task.setup)


def _generated(
    look: Desk, split: Split, hops: Sequence[int], cite: bool, size: tuple[int, int, int]
) -> Iterator[Problem]:
    """Questions without repeats, until new ones have become rare."""
    seed, people, noise = f"{size[0]}:{split}", *size[1:]
    desk = replace(look, seed=seed, people=people, noise=noise)
    world = World(seed, people=people, noise=noise, short=look.brief)
    seen = set[str]()
    tries = 0
    for chain in world.chains(hops, seed):
        tries = 0 if chain.short not in seen else tries + 1
        if tries > 1000:
            return
        if tries:
            continue
        seen.add(chain.short)
        text = chain.short if look.brief else chain.question
        question = Question(
            answers=chain.names[-1:], path=(chain.start, *chain.names[:-1]), cite=cite,
            tags=look.tags,
        )  # fmt: skip
        yield _problem(text, question, desk)


def _from_rows(look: Desk, corpus: str, questions: str, cite: bool) -> Iterator[Problem]:
    desk = replace(look, corpus=corpus, brief=False)
    for row in read_rows(questions):
        yield _problem(
            str(row.get("question")),
            Question(answers=_golden(row), cite=cite, tags=look.tags),
            desk,
        )


def _golden(row: Row) -> tuple[str, ...]:
    value = row.get("golden_answers")
    answers: list[Any] = [value] if isinstance(value, str) else list(value or ())
    if not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ValueError(f"{row.name}: golden_answers must be a text or a list of texts")
    return tuple(answers)


def _problem(text: str, question: Question, desk: Desk) -> Problem:
    cited = "the id of the page that says so in brackets, as in: Beijing [12]"
    if desk.brief:
        prompt = (user(text),)
    elif question.tags:
        more = f" Inside the tags, put behind the answer {cited}." if question.cite else ""
        prompt = (user(f"{TAGGED}{more} Question: {text}"),)
    else:
        more = f", and behind it {cited}" if question.cite else ""
        prompt = (system(f"{INSTRUCTIONS}{more}."), user(text))
    return problem(prompt, question, setup=asdict(desk))


def _is_test(problem: Problem) -> bool:
    return sha256(problem.task.prompt[-1].content.encode()).digest()[0] % 5 == 0


def _path(problem: Problem) -> Sequence[Page]:
    """The pages that lead to the answer; without a path, the first that holds an answer."""
    pages, question = library(_desk(problem.task)).pages, problem.reference
    if question.path:
        titled = {page.title: page for page in pages}
        return [titled[title] for title in question.path]
    return [p for p in pages if any(holds(p.text, a) for a in question.answers)][:1] or pages[:1]


def _answer(question: Question, text: str, id: str) -> Message:
    said = f"{text} [{id}]" if question.cite else text
    return answer(f"<answer>{said}</answer>" if question.tags else said)
