"""Seeded exercises "write a function", from one sum to pipelines over lists and texts."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentrl_environments import code_operations as ops

HIDDEN, SHOWN = 10, 2
_NAMES = ("f", "g", "h")
_STOCK = 200_000
"""Draws of a level; a small level runs out of new exercises before."""

_Operation = Callable[[Any, int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """What is asked (`text`), a solution of it, and its values: the first `SHOWN` are shown."""

    name: str
    text: str
    solution: str
    values: tuple[tuple[Any, Any], ...]


def exercises(level: int, seed: int) -> Iterator[Exercise]:
    """Different exercises of a level, the same for the same seed.

    1: one sum or product. 2: three of them. 3: a list, one step and a result. 4: a list or a text,
    two to four steps and a result. Raises ValueError for another level.
    """
    if level not in (1, 2, 3, 4):
        raise ValueError("a level is 1, 2, 3 or 4")
    rng = Random(f"coding:{level}:{seed}")
    seen: set[str] = set()
    for _ in range(_STOCK):
        made = _arithmetic(rng, 1 if level == 1 else 3) if level < 3 else _pipeline(rng, level)
        if made.text not in seen and _tells_apart(made.values):
            seen.add(made.text)
            yield made


def _arithmetic(rng: Random, steps: int) -> Exercise:
    name, code, asked = rng.choice(_NAMES), "x", list[str]()
    inputs = rng.sample(range(-99, 100), HIDDEN + SHOWN)
    outputs = list(inputs)
    for step in range(steps):
        n = rng.randint(2, 99)
        sign, words = rng.choice(ops.ARITHMETIC)
        if "*" in sign and step and " " in code:
            code = f"({code})"
        code += sign.format(n=n)
        asked.append(words.format(n=n))
        outputs = [_applied(sign, value, n) for value in outputs]
    return Exercise(
        name=name,
        text=f"{name}(x): {', then '.join(asked)}",
        solution=f"def {name}(x):\n    return {code}\n",
        values=tuple(zip(inputs, outputs, strict=True)),
    )


def _applied(sign: str, value: int, n: int) -> int:
    return value + n if "+" in sign else value - n if "-" in sign else value * n


def _pipeline(rng: Random, level: int) -> Exercise:
    texts = level == 4 and rng.random() < 0.4
    inner, last = (ops.ON_TEXTS, ops.FROM_TEXTS) if texts else (ops.ON_LISTS, ops.FROM_LISTS)
    steps: list[_Operation] = rng.sample(inner, 1 if level == 3 else rng.randint(2, 3))
    steps.append(rng.choice(last))
    numbers = [rng.randint(2, 5) for _ in steps]
    name = rng.choice(_NAMES)
    draw = _text if texts else _numbers
    values: list[tuple[Any, Any]] = []
    for size in _sizes(rng):
        given = draw(rng, size)
        value: Any = given
        for step, n in zip(steps, numbers, strict=True):
            value = step(value, n)
        values.append((given, value))
    asked = "; ".join(
        (step.__doc__ or "").format(n=n) for step, n in zip(steps, numbers, strict=True)
    )
    kind = "text (words of the letters a-z)" if texts else "list of whole numbers"
    return Exercise(
        name=name,
        text=f"{name}(x), where x is a {kind}: {asked}",
        solution=_source(name, steps, numbers),
        values=tuple(values),
    )


def _source(name: str, steps: Sequence[_Operation], numbers: Sequence[int]) -> str:
    sources = [inspect.getsource(step) for step in dict.fromkeys(steps)]
    calls = [f"    x = {s.__name__}(x, {n})\n" for s, n in zip(steps, numbers, strict=True)]
    return "\n\n".join([*sources, f"def {name}(x):\n{''.join(calls)}    return x\n"])


def _sizes(rng: Random) -> list[int]:
    """Ordinary inputs to show, and among the hidden ones also none and one."""
    return [6, 9, 0, 1, 2, *(rng.randint(5, 12) for _ in range(HIDDEN + SHOWN - 5))]


def _numbers(rng: Random, size: int) -> list[int]:
    return [rng.randint(-9, 20) for _ in range(size)]


def _text(rng: Random, size: int) -> str:
    letters = rng.choices("abcde  ", k=3 * size)
    return " ".join("".join(letters).split())


def _tells_apart(values: Sequence[tuple[Any, Any]]) -> bool:
    """Whether neither a constant, nor the input itself, nor what is shown can pass."""
    shown, hidden = values[:SHOWN], values[SHOWN:]
    results = {repr(value) for _, value in hidden}
    unchanged = sum(repr(given) == repr(value) for given, value in hidden)
    known = {repr(given) for given, _ in shown}
    unseen = sum(repr(given) not in known for given, _ in hidden)
    return len(results) >= 4 and unchanged <= 3 and unseen >= 8
