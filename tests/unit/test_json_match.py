"""JSON answers: equal by value or fitting a schema, and strict about what is JSON."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifier_cases import verdicts

from agentrl.verifiers import JsonMatch, strict_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(
        alphabet=st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(VALUES)
def test_every_value_is_itself_however_it_is_written(value: Any) -> None:
    spaced = json.dumps(value, indent=2, sort_keys=True)
    fenced = f"```json\n{spaced}\n```"
    for text in (json.dumps(value, ensure_ascii=False), spaced, fenced):
        (verdict,) = verdicts(JsonMatch(), json.dumps(value), text)
        assert verdict.reward == 1.0


@pytest.mark.parametrize(
    ("said", "reference", "passed"),
    [
        ('{"b": 1, "a": [1, 2]}', {"a": [1, 2], "b": 1.0}, True),
        ('{"a": [2, 1]}', {"a": [1, 2]}, False),
        ('{"a": true}', {"a": 1}, False),
        ('{"a": "1"}', {"a": 1}, False),
        ('{"a": 1, "b": null}', {"a": 1}, False),
        ("[0]", [False], False),
        ('"x"', '"x"', True),
        ("x", '"x"', False),
        ("9007199254740993", 9007199254740992.0, False),
        ("1e0", 1, True),
        ("", {}, False),
    ],
)
def test_equality(said: str, reference: Any, passed: bool) -> None:
    (verdict,) = verdicts(JsonMatch(), reference, said)
    assert verdict.passed is passed and verdict.reward == float(passed)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1} or {"a": 2}', 'it is {"a": 1}', '{"a": 1, "a": 2}', '{"a": NaN}', "Infinity",
        "-Infinity", "1e999", "[1,]", "{'a': 1}", "[" * 100_000, "9" * 5000, '"\\ud800"', "\ufeff1",
        "1" * 300_000, "```json\n1\n```\n```json\n2\n```", "01", "",
    ],
)  # fmt: skip
def test_what_is_not_strictly_one_document_is_no_json(text: str) -> None:
    with pytest.raises(ValueError):
        strict_json(text)
    (verdict,) = verdicts(JsonMatch(), 1, text)
    assert verdict.reward == 0.0 and "no JSON" in verdict.note


@pytest.mark.parametrize("reference", ["", "a text", float("nan"), {1, 2}, '{"a": 1, "a": 1}'])
def test_a_reference_that_is_no_json_is_invalid(reference: Any) -> None:
    for verifier in (JsonMatch(), JsonMatch(by="schema")):
        assert verdicts(verifier, reference, "1", "")[0].reward is None


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1}, "s": {"pattern": "^(a+)+$"}},
    "required": ["n"],
    "additionalProperties": False,
}
BY_SCHEMA = JsonMatch(by="schema", limit_s=1.0)


def test_a_schema_says_what_fits() -> None:
    said = {
        '{"n": 1}': True,
        '{"n": 2.0, "s": "aaa"}': True,
        '{"n": 0}': False,
        '{"n": "1"}': False,
        "{}": False,
        '{"n": 1, "more": 2}': False,
        '{"n": 1, "n": 1}': False,
        "nothing": False,
    }
    graded = verdicts(BY_SCHEMA, SCHEMA, *said)
    assert [v.passed for v in graded] == list(said.values())
    assert all(v.reward is not None for v in graded)
    assert "$.n" in graded[2].note
    assert verdicts(BY_SCHEMA, json.dumps(SCHEMA), '{"n": 1}')[0].passed


def test_a_text_that_a_pattern_hangs_on_fails_and_the_others_are_graded() -> None:
    begun = time.monotonic()
    hanging = json.dumps({"n": 1, "s": "a" * 40 + "b"})
    graded = verdicts(BY_SCHEMA, SCHEMA, '{"n": 1}', hanging, '{"n": 2}')
    assert [v.reward for v in graded] == [1.0, 0.0, 1.0]
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    "schema", [{"type": "no such"}, {"type": 5}, 7, [], {"$ref": "http://127.0.0.1:9/x"}]
)
def test_a_schema_that_is_none_never_passes_anything(schema: Any) -> None:
    assert not any(v.passed for v in verdicts(BY_SCHEMA, schema, "1", "{}", '""'))


def test_wrong_options_are_said() -> None:
    with pytest.raises(ValueError, match="limit_s"):
        JsonMatch(limit_s=0)
