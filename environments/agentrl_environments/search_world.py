"""An invented encyclopaedia: things with relations, the same for the same seed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from agentrl_environments.search_pages import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """One thing of kind `to` for each thing of kind `of`."""

    name: str
    of: str
    to: str
    sentence: str


RELATIONS = (
    Relation(name="author", of="book", to="person", sentence="{a} was written by {b}."),
    Relation(name="publisher", of="book", to="company", sentence="{b} has published {a}."),
    Relation(name="founder", of="company", to="person", sentence="{a} was founded by {b}."),
    Relation(name="seat", of="company", to="town", sentence="{a} has its offices in {b}."),
    Relation(name="birthplace", of="person", to="town", sentence="{a} was born in {b}."),
    Relation(name="teacher", of="person", to="person", sentence="{a} was a pupil of {b}."),
    Relation(name="country", of="town", to="country", sentence="{a} is a town of {b}."),
    Relation(name="river", of="town", to="river", sentence="{a} lies on the {b}."),
    Relation(name="source", of="river", to="mountain", sentence="The {a} rises on {b}."),
    Relation(name="capital", of="country", to="town", sentence="{b} is the capital of {a}."),
    Relation(name="currency", of="country", to="money", sentence="In {a} people pay with the {b}."),
)
PEOPLE_PER: Mapping[str, int] = {
    "person": 1, "book": 2, "company": 4, "town": 4, "river": 8, "country": 12,
    "mountain": 8, "money": 12,
}  # fmt: skip
"""How many people there are for one thing of a kind. Mountains and moneys have no page."""
LEAVES = ("mountain", "money")
NOISE = ("{b} is mentioned in a song about {a}.", "There is a portrait of {b} somewhere in {a}.",
         "{a} has often been confused with {b}.", "A letter from {b} to {a} was lost.")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A question: relations followed from `start`; `names` are the things met, the answer last."""

    start: str
    relations: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def question(self) -> str:
        """In words."""
        return f"What is {''.join(f'the {r} of ' for r in reversed(self.relations))}{self.start}?"

    @property
    def short(self) -> str:
        """In as few as can be."""
        return " ".join((self.start, *self.relations))


class World:
    """All things of a seed and how they hang together.

    `short` names and pages are single words and facts alone; else people have two names, which
    they share with others, and every page has `noise` sentences that name a thing without reason.
    """

    def __init__(self, seed: str, *, people: int, noise: int, short: bool) -> None:
        rng = Random(f"encyclopaedia:{seed}")
        self.kinds = _named(rng, people, short)
        self.facts: dict[str, dict[str, str]] = {}
        for relation in RELATIONS:
            for name in self.kinds[relation.of]:
                others = [o for o in self.kinds[relation.to] if o != name]
                self.facts.setdefault(name, {})[relation.name] = rng.choice(others)
        everything = [name for names in self.kinds.values() for name in names]
        texts = {
            name: self._short(name) if short else self._text(name, rng, everything, noise)
            for name in self.facts
        }
        order = rng.sample(sorted(texts), len(texts))
        self.pages = [Page(id=str(n), title=t, text=texts[t]) for n, t in enumerate(order, start=1)]

    def chains(self, hops: Sequence[int], seed: str) -> Iterator[Chain]:
        """Questions of these numbers of hops in turn, without end, at random and with repeats.

        No thing is met twice, so that the answer is never in the question.
        """
        rng = Random(f"questions:{seed}")
        starts = sorted(self.facts)
        while True:
            for count in hops:
                name = rng.choice(starts)
                relations, names = list[str](), [name]
                while name in self.facts and len(relations) < count:
                    relation = rng.choice(sorted(self.facts[name]))
                    name = self.facts[name][relation]
                    relations.append(relation)
                    names.append(name)
                if len(relations) == count and len(set(names)) == len(names):
                    yield Chain(start=names[0], relations=(*relations,), names=(*names[1:],))

    def _text(self, name: str, rng: Random, everything: Sequence[str], noise: int) -> str:
        facts = self.facts[name]
        sentences = [r.sentence.format(a=name, b=facts[r.name]) for r in RELATIONS if
                     name in self.kinds[r.of]]  # fmt: skip
        for _ in range(noise):
            other = rng.choice([o for o in rng.sample(everything, 2) if o != name])
            sentences.append(rng.choice(NOISE).format(a=name, b=other))
        return " ".join(rng.sample(sentences, len(sentences)))

    def _short(self, name: str) -> str:
        return ", ".join(f"{relation} {value}" for relation, value in self.facts[name].items())


def _named(rng: Random, people: int, short: bool) -> dict[str, list[str]]:
    """Names by kind, each used once."""
    counts = {kind: max(4, people // per) for kind, per in PEOPLE_PER.items()}
    words = _words(rng, sum(counts.values()))
    named = {kind: [next(words) for _ in range(n)] for kind, n in counts.items()}
    if not short:
        pool = named["person"][: max(4, counts["person"] // 3)]
        pairs = [f"{a} {b}" for a in pool for b in pool if a != b]
        named["person"] = rng.sample(pairs, min(counts["person"], len(pairs)))
    return named


def _words(rng: Random, count: int) -> Iterator[str]:
    """Words of two syllables, of three where these run out."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    for length in (2, 3):
        every = len(syllables) ** length
        for number in rng.sample(range(every), min(count, every)):
            yield "".join(
                syllables[number // len(syllables) ** n % len(syllables)] for n in range(length)
            ).capitalize()
