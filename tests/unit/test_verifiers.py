import asyncio
import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.protocols import Verifier
from agentrl.tools import problem
from agentrl.types import (
    ActionTokens,
    Ending,
    Episode,
    Message,
    ObservationTokens,
    ToolCall,
    Trajectory,
    Turn,
    Verdict,
)
from agentrl.verifiers import (
    ChoiceMatch,
    ExactMatch,
    F1Match,
    FormatPart,
    MathMatch,
    NumericMatch,
    Submitted,
    Weighted,
    last_boxed,
)
from agentrl.verifiers.numbers import numbers_in, whole_number


def episode(message: Message | str, *, prompt: str = "q", shown: str = "") -> Episode:
    """One tool turn whose reply is `shown`, then the last action."""
    last = message if isinstance(message, Message) else Message(role="assistant", content=message)

    def turn(said: Message, reply: tuple[Message, ...] = ()) -> Turn:
        return Turn(
            observation=ObservationTokens(token_ids=(1,)),
            action=ActionTokens(token_ids=(2,), logprobs=None, versions=(0,), finish="stop"),
            message=said,
            reply=reply,
        )

    seen = (Message(role="tool", content=shown, tool_call_id="call_0"),)
    return Episode(
        trajectory=Trajectory(
            id="t",
            task_id="t",
            member=0,
            seed=0,
            prompt=(Message(role="user", content=prompt),),
            turns=(turn(Message(role="assistant", content="look"), seen), turn(last)),
            ending=Ending.ANSWERED,
        )
    )


def grade(verifier: Verifier, reference: object, *episodes: Episode) -> list[Verdict]:
    return list(asyncio.run(verifier.grade(problem("q", reference, id="t"), episodes, None)))


def graded(verifier: Verifier, said: str, reference: object) -> Verdict:
    (verdict,) = grade(verifier, reference, episode(said))
    return verdict


@pytest.mark.parametrize(
    ("said", "reference", "passed"),
    [
        ("so she pays $1,250.00.", "1250", True),
        ("so she pays $1,250.00.", "250", False),
        ("That makes 48, as asked.", "48", True),
        ("The answer is 48!", "48", True),
        ("so...48", "48", True),
        ("**Answer:** **48**", "48", True),
        ("=> 48", "48", True),
        ("- 48", "48", True),
        ("3 * 5 = 15", "15", True),
        ("2**5 = 32", "32", True),
        ("step 1: take 5, step 2: 48", 48, True),
        ("-12", "-12", True),
        ("-12", "12", False),
        ("−12", "-12", True),
        ("–12", "-12", True),
        ("-$12", "-12", True),
        ("$-12", "-12", True),
        ("x = - 12", "12", False),
        ("13.20%", "13.2%", True),
        ("13.20 percent", "13.2", True),
        ("13.20%", "0.132", True),
        ("13.20%", "132", False),
        ("50%", "0.5%", False),
        (r"\boxed{3} then \boxed{4}", "4", True),
        (r"\boxed{3} then \boxed{4}", "3", False),
        (r"it is 5 \boxed{4}", "5", False),
        (r"\boxed{1{,}250\text{ cm}}", "1250", True),
        (r"\boxed{x = 4}", "4", True),
        (r"\boxed{\$4.00}", "4", True),
        (r"\boxed{2\pi}", "2", False),
        (r"\boxed{\pm 7}", "7", False),
        (r"\boxed{\sqrt{2}}", "2", False),
        (r"\boxed{5!}", "5", False),
        (r"\boxed{5 or 6}", "6", False),
        (r"\boxed{5, 6}", "6", False),
        ("no number", "5", False),
        ("", "5", False),
        ("2.0", "2", True),
        ("1e3", "1000", True),
        ("x12", "12", False),
        ("12x", "12", False),
        ("5²", "5", False),
        ("5²", "52", False),
        ("5 or 6", "6", False),
        ("5, 6", "6", False),
        ("between 5 and 6", "6", False),
        ("1 2 3 4 5", "5", False),
        ("1,2,3,5", "1235", False),
        ("1\n2\n5", "5", False),
        ("5 or 5", "5", True),
        ("(37+18)*4", "4", False),
        ("10 - 4", "4", False),
        ("10-4", "4", False),
        ("3/4", "4", False),
        ("x > 5", "5", False),
        ("1.2.3", "3", False),
        ("9" * 5000, "9", False),
        ("1e" + "9" * 50, "1", False),
    ],
)
def test_numbers(said: str, reference: object, passed: bool) -> None:
    verdict = graded(NumericMatch(), said, reference)
    assert (verdict.reward, verdict.passed) == (float(passed), passed)


@given(
    st.decimals(allow_nan=False, allow_infinity=False, places=3), st.sampled_from(["", "-", "$"])
)
def test_a_number_that_is_written_out_is_read(value: Decimal, mark: str) -> None:
    positive = abs(value)
    text = f"It comes to {mark}{positive:,f}."
    (found,) = numbers_in(text)
    assert found.value == (-positive if mark == "-" else positive)


@given(st.text(alphabet="0123456789.,-−+*/ $%e(){}\\boxed xor", max_size=60), st.integers(-9, 9))
def test_whatever_is_said_gets_a_verdict(said: str, reference: int) -> None:
    verdict = graded(NumericMatch(), said, reference)
    assert verdict.reward in (0.0, 1.0)
    if whole_number(said) is not None:
        assert graded(NumericMatch(only_number=True), said, said.strip()).passed


def test_long_texts_are_read_in_linear_time() -> None:
    begun = time.monotonic()
    for text in ("1," * 50_000, "\\boxed{" * 30_000, "- " * 50_000, "{" * 100_000, "9" * 200_000):
        assert graded(NumericMatch(), text, "7").reward == 0.0
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("said", ["1 2 3 5", "5 5", "it is 5", "(2+3)", "5."])
def test_only_the_number_wanted(said: str) -> None:
    assert graded(NumericMatch(only_number=True), said, "5").reward == 0.0


def test_a_tolerance_is_an_option() -> None:
    assert not graded(NumericMatch(), "16.7", "16.66").passed
    assert graded(NumericMatch(tolerance=0.1), "16.7", "16.66").passed
    with pytest.raises(ValueError, match="tolerance"):
        NumericMatch(tolerance=-1)


@pytest.mark.parametrize("reference", ["", "none", "1 or 2", None, "about 5", float("nan"), True])
def test_an_unreadable_reference_is_invalid_never_a_number(reference: object) -> None:
    for said in ("1", "", str(reference)):
        verdict = graded(NumericMatch(), said, reference)
        assert verdict.reward is None and verdict.invalid


@pytest.mark.parametrize(
    "verifier",
    [
        NumericMatch(require_box=True),
        MathMatch(require_box=True),
    ],
)
def test_where_a_box_is_wanted_prose_earns_nothing(verifier: Verifier) -> None:
    assert graded(verifier, "48", "48").reward == 0.0
    assert graded(verifier, r"so \boxed{48}", "48").reward == 1.0
    assert graded(verifier, r"48 \boxed{}", "48").reward == 0.0


def test_only_the_answer_is_read_not_prompt_or_tool_text() -> None:
    parts: list[tuple[Verifier, object]] = [
        (NumericMatch(), "5"),
        (ExactMatch(), "5"),
        (MathMatch(), "5"),
        (ChoiceMatch(), "B"),
        (F1Match(), "five"),
        (FormatPart(), None),
    ]
    for verifier, reference in parts:
        text = rf"\boxed{{{reference}}}"
        (verdict,) = grade(verifier, reference, episode("I can't say", prompt=text, shown=text))
        assert verdict.reward == 0.0, verifier


def test_exact_match_is_about_text() -> None:
    assert graded(ExactMatch(), "  Paris\n", "paris").passed
    assert not graded(ExactMatch(), "Paris or Rome", "paris").passed
    assert not graded(ExactMatch(normalise=False), "Paris", "paris").passed
    assert graded(ExactMatch(), "", "").reward is None
    assert graded(ExactMatch(), "5", 5).reward is None


@pytest.mark.parametrize(
    ("said", "passed"),
    [
        ("D", True),
        ("(D)", True),
        ("D.", True),
        ("The answer is D", True),
        ("A is wrong since B holds. Answer: D", True),
        (r"first \boxed{B}, in the end \boxed{\text{D}}", True),
        (r"\boxed{(D)}", True),
        (r"\boxed{D} or was it \boxed{B}", False),
        ("B", False),
        ("A or B or C or D", False),
        (r"\boxed{B or D}", False),
        ("answer: B or D", False),
        ("d", False),
        ("Dog", False),
        ("", False),
    ],
)
def test_choices(said: str, passed: bool) -> None:
    assert graded(ChoiceMatch(), said, "D").passed is passed


@pytest.mark.parametrize("reference", ["", "E", "AB", None, "d"])
def test_a_reference_that_is_no_choice_is_invalid(reference: object) -> None:
    assert graded(ChoiceMatch(), "A", reference).reward is None


def test_boxes_balance_their_braces() -> None:
    assert last_boxed(r"\boxed{\frac{3}{4}}") == r"\frac{3}{4}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{1} \boxed{2") == "1"
    assert last_boxed(r"} \boxed {1}") == "1"
    assert last_boxed("nothing") is None
    long = "x" * 180
    assert last_boxed("text " * 100 + rf"\boxed{{{long}}}") == long


SHARED = MathMatch(limit_s=5.0)


@pytest.mark.parametrize(
    ("said", "reference", "passed"),
    [
        (r"\boxed{\frac{3}{4}}", "3/4", True),
        (r"\boxed{\frac{3}{4}}", "3/5", False),
        (r"\boxed{\frac34}", "0.75", True),
        (r"\boxed{\text{21}}", "21", True),
        ("2/3", r"\frac{2}{3}", True),
        ("50/3", "16.7", False),
        ("0.333333", "1/3", False),
        ("x=1,2", "x=1,3", False),
        ("(0,2)", "(0,2.5)", False),
        ("(0,2)", "[0,2]", False),
        (r"\pm 7", "7", False),
        ("7", r"\pm 7", False),
        ("2x-y+5=0", "2x+3y+6=0", False),
        ("(x+1)^2", "x^2+2x+1", True),
        ("$x = 3$", "3", True),
        (r"\boxed{3 or 4}", "4", False),
        (r"\boxed{13.2\%}", "13.2", True),
        ("1,250", "1250", True),
        ("−12", "-12", True),
        ("1e3", "1000", True),
        ("the answer is five", "5", False),
        ("}5{", "5", False),
        ("", "5", False),
    ],
)
def test_equivalent_mathematics(said: str, reference: str, passed: bool) -> None:
    verdict = graded(SHARED, said, reference)
    assert (verdict.reward, verdict.passed) == (float(passed), passed)


@pytest.mark.parametrize(
    "reference", ["", "the value of the sum", "see below", None, "{", r"\frac"]
)
def test_an_unreadable_expression_as_reference_is_invalid(reference: object) -> None:
    for said in ("5", str(reference), ""):
        assert graded(SHARED, said, reference).reward is None


def test_expressions_that_hang_are_ended_and_the_next_is_answered_at_once() -> None:
    verifier = MathMatch(limit_s=0.5, concurrency=2)
    graded(verifier, "x+1", "1+x")  # the workers are up
    hanging = [episode(rf"\boxed{{9^{{9^{{9^{{{n}}}}}}}}}") for n in range(9, 29)]
    begun = time.monotonic()
    verdicts = grade(verifier, "x+1", *hanging)
    assert [v.reward for v in verdicts] == [0.0] * 20, "the agent's doing is no fault"
    assert time.monotonic() - begun < 20 * 0.5 / 2 + 6
    begun = time.monotonic()
    assert graded(verifier, "1+x", "x+1").passed
    assert time.monotonic() - begun < 0.5


def test_a_math_worker_that_dies_is_invalid_and_replaced() -> None:
    verifier = MathMatch()
    assert graded(verifier, "1+x", "x+1").passed
    worker = verifier._pool._idle.get_nowait()
    worker.kill()
    verifier._pool._idle.put(worker)

    async def both() -> list[Verdict]:
        asked = problem("q", "7", id="t"), [episode("2x+y-2x")], None
        return [*(await verifier.grade(*asked)), *(await verifier.grade(*asked))]

    first, second = asyncio.run(both())
    assert first.reward is None and "worker process" in (first.invalid or "")
    assert second.reward == 0.0


def test_token_overlap() -> None:
    assert graded(F1Match(), "The Eiffel Tower.", "eiffel tower").reward == 1.0
    assert graded(F1Match(), "eiffel", "eiffel tower").reward == pytest.approx(2 / 3)
    assert graded(F1Match(), "rome", ["paris", "Rome"]).passed
    assert graded(F1Match(), "", "paris").reward == 0.0
    half = graded(F1Match(pass_at=0.6), "eiffel", "eiffel tower")
    assert half.passed and half.reward != 1.0
    for reference in ("", [], None, "the", [1], ["paris", ""]):
        assert graded(F1Match(), "paris", reference).reward is None


@pytest.mark.parametrize(
    ("content", "reasoning", "fits"),
    [
        (r"so \boxed{5}", "first add the two", 1.0),
        (r"so \boxed{5}", "", 0.0),
        (r"so \boxed{5}", "add add add add", 0.0),
        (r"so \boxed{ }", "first add the two", 0.0),
        (r"\boxed{5} \boxed{6}", "first add the two", 0.0),
        ("5", "first add the two", 0.0),
    ],
)
def test_form_alone(content: str, reasoning: str, fits: float) -> None:
    message = Message(role="assistant", content=content, reasoning=reasoning)
    (verdict,) = grade(FormatPart(reasoning_words=3), None, episode(message))
    assert verdict.reward == fits
    assert not verdict.passed, "form alone is no success"


def test_a_weighted_sum_names_its_parts_and_one_decides() -> None:
    verifier = Weighted(
        parts={"correct": (1.0, NumericMatch()), "format": (0.1, FormatPart())}, decides="correct"
    )
    right = graded(verifier, r"\boxed{5}", "5")
    assert right.reward == pytest.approx(1.1) and right.passed
    assert right.components == {"correct": 1.0, "format": 1.0}
    formed = graded(verifier, r"\boxed{6}", "5")
    assert formed.reward == pytest.approx(0.1) and not formed.passed
    broken = graded(verifier, r"\boxed{6}", "a sentence")
    assert broken.reward is None and (broken.invalid or "").startswith("correct:")
    with pytest.raises(ConfigError, match="corect"):
        Weighted(parts={"correct": (1.0, NumericMatch())}, decides="corect")
    with pytest.raises(ConfigError, match="finite"):
        Weighted(parts={"correct": (float("nan"), NumericMatch())}, decides="correct")


def test_one_episode_that_breaks_a_verifier_leaves_the_others_alone() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            return True

    bad = episode(Message(role="assistant", content=Odd()))  # type: ignore[arg-type]
    verdicts = grade(NumericMatch(), "5", episode("5"), bad, episode("6"))
    assert [v.reward for v in verdicts] == [1.0, None, 0.0]


def test_what_a_final_tool_was_given_can_be_graded() -> None:
    verifier = Submitted(tool="submit", argument="answer", verifier=NumericMatch())

    def said(arguments: str, name: str = "submit", error: str | None = None) -> float | None:
        calls = (ToolCall(id="call_0", name=name, arguments=arguments, error=error),)
        (verdict,) = grade(
            verifier, "5", episode(Message(role="assistant", content="7", tool_calls=calls))
        )
        return verdict.reward

    assert said('{"answer": "5"}') == 1.0
    assert said('{"answer": 5}') == 1.0
    assert said('"5"') == 1.0
    assert said('{"answer": "5"}', name="other") == 0.0
    assert said('{"answer": "5"}', error="bad") == 0.0
    assert said("{") == 0.0
    assert graded(verifier, "5", "5").reward == 0.0, "text is no submission"
