"""Pages to search in: read from files, and ranked for a query."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agentrl.data.rows import Row, read_rows

TEXTS = (".md", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page; `id` is what it is opened and cited by."""

    id: str
    title: str
    text: str


class Ranking(Protocol):
    """Ranks pages for a query."""

    def best(self, query: str, count: int) -> Sequence[int]:
        """Numbers of the best pages, best first; pages that have nothing to do with it left out."""
        ...


class Bm25:
    """BM25 (k1 1.5, b 0.75) over titles and texts, by bm25s; all words count, none is stemmed."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self._bm25s = _needs("bm25s", "search")
        self._count = len(pages)
        # The title counts twice: a page is about it.
        words = self._words([f"{p.title} {p.title} {p.text}" for p in pages])
        self._index = self._bm25s.BM25()
        self._index.index(words, show_progress=False)

    def best(self, query: str, count: int) -> Sequence[int]:
        """Pages that share a word with the query, best first."""
        k = min(count, self._count)
        numbers, scores = self._index.retrieve(self._words([query]), k=k, show_progress=False)
        return [int(n) for n, s in zip(numbers[0], scores[0], strict=True) if s > 0]

    def _words(self, texts: Sequence[str]) -> list[list[str]]:
        return self._bm25s.tokenize(
            texts, return_ids=False, stopwords=None, show_progress=False, token_pattern=r"(?u)\w+"
        )


class Dense:
    """Cosine similarity of embeddings by a sentence-transformers model (a folder or hub name)."""

    def __init__(self, pages: Sequence[Page], model: str) -> None:
        self._model: Any = _needs("sentence_transformers", "dense").SentenceTransformer(model)
        self._pages_ND = self._embed([f"{p.title}\n{p.text}" for p in pages])

    def best(self, query: str, count: int) -> Sequence[int]:
        """The nearest pages; a query without a letter or a digit has none."""
        if not any(c.isalnum() for c in query):
            return []
        scores_N = self._pages_ND @ self._embed([query])[0]
        return [int(n) for n in np.argsort(-scores_N, kind="stable")[:count]]

    def _embed(self, texts: Sequence[str]) -> Any:
        return self._model.encode(
            list(texts), normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )


class Library:
    """Pages by id, and their ranking: "bm25", or "dense:MODEL"."""

    def __init__(self, pages: Sequence[Page], ranking: str) -> None:
        self.pages = tuple(pages)
        self.by_id = {page.id: page for page in pages}
        check_retriever(ranking)
        kind, _, model = ranking.partition(":")
        if not pages or len(self.by_id) != len(pages):
            raise ValueError("a corpus needs pages, and each an id of its own")
        self._ranking: Ranking = Bm25(pages) if kind == "bm25" else Dense(pages, model)

    def search(self, query: str, count: int) -> Sequence[Page]:
        """At most `count` pages, best first."""
        return [self.pages[n] for n in self._ranking.best(query, count)]


def check_retriever(ranking: str) -> None:
    """Raises ValueError unless it is "bm25" or "dense:MODEL"."""
    kind, _, model = ranking.partition(":")
    if ranking != "bm25" and not (kind == "dense" and model):
        raise ValueError(f"retriever {ranking!r}: it is bm25 or dense:MODEL")


def read_pages(corpus: str) -> Iterator[Page]:
    """The pages of a folder of .md and .txt files, or of rows with id, title and text.

    A row may have `contents` in place of title and text: the title is its first line, as in
    Search-R1's corpora. A file's id is its path in the folder, its title the first line. Raises
    ValueError naming file or row.
    """
    folder = Path(corpus).expanduser()
    if not folder.is_dir():
        yield from map(_page, read_rows(corpus))
        return
    for path in sorted(p for p in folder.rglob("*") if p.suffix in TEXTS and p.is_file()):
        try:
            text = path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
        if text:
            title = text.splitlines()[0].lstrip("# ").strip()
            yield Page(id=path.relative_to(folder).as_posix(), title=title or path.stem, text=text)


def _page(row: Row) -> Page:
    if "contents" in row.values:
        title, _, text = str(row.get("contents")).partition("\n")
        return Page(id=str(row.get("id")), title=title.strip().strip('"'), text=text.strip())
    return Page(id=str(row.get("id")), title=str(row.get("title")), text=str(row.get("text")))


def _needs(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(f"searching needs {module}: pip install 'agentrl[{extra}]'") from None
