import asyncio

import pytest

from agentrl.tools import problem
from agentrl.types import (
    ActionTokens,
    Ending,
    Episode,
    Message,
    ObservationTokens,
    Trajectory,
    Turn,
)
from agentrl.verifiers import ExactMatch, NumericMatch, last_boxed


def graded(verifier, said: str, reference: object):
    turn = Turn(
        observation=ObservationTokens(token_ids=(1,)),
        action=ActionTokens(token_ids=(2,), logprobs=None, versions=(0,), finish="stop"),
        message=Message(role="assistant", content=said),
    )
    trajectory = Trajectory(
        id="t", task_id="t", member=0, seed=0, prompt=(), turns=(turn,), ending=Ending.ANSWERED
    )
    (verdict,) = asyncio.run(
        verifier.grade(problem("q", reference, id="t"), [Episode(trajectory=trajectory)])
    )
    return verdict


@pytest.mark.parametrize(
    ("said", "reference", "passed"),
    [
        ("so she pays $1,250.00.", "1250", True),
        ("That makes 48, as asked.", "48", True),
        ("-12", "-12", True),
        ("-12", "12", False),
        ("−12", "-12", True),
        ("13.20%", "13.2%", True),
        ("13.20%", "0.132", True),
        ("13.20%", "132", False),
        (r"\boxed{3} then \boxed{4}", "4", True),
        (r"it is 5 \boxed{4}", "5", False),
        ("no number", "5", False),
        ("", "5", False),
        ("2.0", "2", True),
        ("1e3", "1000", True),
        ("x12", "12", False),
    ],
)
def test_numbers(said: str, reference: str, passed: bool) -> None:
    verdict = graded(NumericMatch(), said, reference)
    assert (verdict.reward, verdict.passed) == (float(passed), passed)


@pytest.mark.parametrize("said", ["1 2 3 5", "5 5", "it is 5", "(2+3)", "5."])
def test_only_the_number_wanted(said: str) -> None:
    assert graded(NumericMatch(only_number=True), said, "5").reward == 0.0


@pytest.mark.parametrize("reference", ["", "none", "1 or 2", None])
def test_an_unreadable_reference_is_invalid_never_a_number(reference: object) -> None:
    verdict = graded(NumericMatch(), "1", reference)
    assert verdict.reward is None and verdict.invalid


def test_exact_match_is_about_text() -> None:
    assert graded(ExactMatch(), "  Paris\n", "paris").passed
    assert not graded(ExactMatch(), "Paris or Rome", "paris").passed
    assert graded(ExactMatch(), "", "").reward is None


def test_boxes_balance_their_braces() -> None:
    assert last_boxed(r"\boxed{\frac{3}{4}}") == r"\frac{3}{4}"
    assert last_boxed(r"\boxed{1} \boxed{2") == "1"
    assert last_boxed("nothing") is None
