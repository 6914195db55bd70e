"""The families of reasoning-gym that are kept: solvable, and blind to nonsense and hedges."""

import asyncio

import pytest
from agentrl_environments.python_math import library
from agentrl_environments.reasoning import Question, Reasoning, ReasoningScore
from agentrl_environments.reasoning_families import FAMILIES, LEFT_OUT

from agentrl.errors import ConfigError
from agentrl.plugins import find_environment, problems_of
from agentrl.testing.environment import check_environment
from agentrl.types import Problem
from agentrl.verifiers import Reply

NONSENSE = ("", " ", "nan", "NaN", "nan+nanj", "inf", "None", "[]", "{}", "I don't know", "x" * 999)


async def test_it_keeps_the_contract() -> None:
    options = {"families": ["chain_sum", "jugs", "mini_sudoku", "caesar_cipher"], "count": 40}
    assert await check_environment(find_environment("reasoning"), options=options, sample=4) == ()


def test_every_family_of_the_library_is_kept_or_left_out_for_a_reason() -> None:
    from reasoning_gym.factory import DATASETS

    library()
    assert not set(FAMILIES) & set(LEFT_OUT)
    assert set(FAMILIES) | set(LEFT_OUT) >= set(DATASETS)
    assert len(FAMILIES) == len(set(FAMILIES))


def cheats(problem: Problem, others: list[str]) -> dict[str, str]:
    gold = str(problem.reference)
    texts = {repr(text)[:20]: text for text in NONSENSE}
    texts |= {
        "the prompt": problem.task.prompt[-1].content,
        "maybe before": f"maybe {gold}",
        "not before": f"it is not {gold}",
        "maybe not after": f"{gold} or maybe not",
        "code": f"(lambda: {gold!r})()",
    }
    for name, mark in (("or", " or "), ("lines", "\n"), ("commas", ", ")):
        if others:
            texts[f"gold first, {name}"] = mark.join([gold, *others])
            texts[f"gold last, {name}"] = mark.join([*others, gold])
    return {name: text for name, text in texts.items() if text.strip() != gold.strip()}


@pytest.mark.slow
async def test_each_family_takes_its_gold_and_nothing_that_solves_nothing() -> None:
    """Two problems a family; all texts of a problem are scored in one process."""
    pool = ReasoningScore()._pool
    asked: list[tuple[Problem, dict[str, str]]] = []
    for family in FAMILIES:
        few = problems_of(Reasoning, "train", {"families": [family]}, 4)
        golds = dict.fromkeys(str(p.reference) for p in few)
        for problem in few[:2]:
            others = [gold for gold in golds if gold != str(problem.reference)][:3]
            asked.append((problem, cheats(problem, others)))

    def question(problem: Problem, texts: dict[str, str]) -> tuple[str, str, list[str]]:
        wanted: Question = problem.reference
        return wanted.family, wanted.entry, [wanted.answer, *texts.values()]

    replies = await pool.ask([question(*a) for a in asked], limit_s=60, concurrency=2)
    seen: dict[str, set[str]] = {}
    for (problem, texts), reply in zip(asked, replies, strict=True):
        family = problem.reference.family
        if not isinstance(reply, Reply) or reply.status != "done" or reply.value is None:
            seen.setdefault(family, set()).add(str(reply))
            continue
        gold, *found = reply.value
        took = {name for name, full in zip(texts, found, strict=True) if full}
        if not gold or took:
            seen.setdefault(family, set()).update(took or {"not its gold"})
    assert not seen, seen


def test_questions_repeat_and_splits_share_none() -> None:
    options = {"families": ["gcd", "maze"], "count": 60}
    first, again = (problems_of(Reasoning, "train", options) for _ in range(2))
    assert first == again and {p.task.family for p in first} == {"gcd", "maze"}
    other = problems_of(Reasoning, "test", {**options, "seed": 4})
    texts = {p.task.prompt[-1].content for p in first}
    assert not texts & {p.task.prompt[-1].content for p in other}


@pytest.mark.parametrize(
    ("family", "said"),
    [("countdown", "code"), ("mazes", "did you mean maze"), ("qqq", "no family")],
)
def test_a_family_that_is_not_kept_is_refused_with_the_reason(family: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        problems_of(Reasoning, "train", {"families": [family]}, 1)


def test_a_scorer_that_runs_its_input_as_code_is_stopped() -> None:
    """`binary_matrix` evaluates its answer; here that raises, and is worth nothing."""
    import base64
    import pickle

    entry = library().create_dataset("binary_matrix", seed=1, size=1)[0]
    packed = base64.b64encode(pickle.dumps(dict(entry))).decode()
    texts = ["[[__import__('os').getpid()]]", "[[1]]", entry["answer"]]
    pool = ReasoningScore()._pool
    (reply,) = asyncio.run(pool.ask([("binary_matrix", packed, texts)], limit_s=60))
    assert isinstance(reply, Reply) and reply.value == [False, False, True]
