import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.parsing import FORMATS, format_of_template, tool_format
from agentrl.tools import call
from agentrl.types import Message

ALL = [*FORMATS, "tags"]


def parse(name: str, text: str) -> Message:
    return tool_format(name, ["search"]).parse(text)


@pytest.mark.parametrize("name", ALL)
@given(text=st.text())
def test_no_text_makes_a_parser_raise(name: str, text: str) -> None:
    for wrapped in (text, f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS]{text}", f"[f({text})]"):
        assert parse(name, wrapped).role == "assistant"


@pytest.mark.parametrize("name", ["hermes", "llama3-json", "mistral", "llama3-pythonic"])
@given(values=st.dictionaries(st.sampled_from("abc"), st.text() | st.integers(), max_size=3))
def test_what_is_written_parses_back(name: str, values: dict[str, object]) -> None:
    form = tool_format(name)
    (found,) = form.parse(form.format(call("tool", **values))).tool_calls
    assert (found.name, json.loads(found.arguments), found.error) == ("tool", values, None)


HERMES_ERRORS = {
    "not JSON": '{"name": "f", "arguments": {"a": "x}',
    "must be an object": '{"name": "f", "arguments": [1]}',
    "no name": '{"arguments": {}}',
    "is an object": "7",
    "is empty": "",
}


@pytest.mark.parametrize("said", HERMES_ERRORS)
def test_a_bad_call_says_what_is_wrong(said: str) -> None:
    (found,) = parse("hermes", f"<tool_call>{HERMES_ERRORS[said]}</tool_call>").tool_calls
    assert found.error is not None and said in found.error


@pytest.mark.parametrize("value", ["null", "[]", "7", '"x"'])
def test_arguments_must_be_an_object(value: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {value}}}</tool_call>'
    assert "must be an object" in str(parse("hermes", text).tool_calls[0].error)


def test_calls_come_in_order_and_two_in_one_tag_are_two() -> None:
    one, two = '{"name": "a", "arguments": {}}', '{"name": "b", "arguments": {}}'
    text = f"first <tool_call>{one}\n{two}</tool_call> then <tool_call>{one}</tool_call>"
    message = parse("hermes", text)
    assert [c.name for c in message.tool_calls] == ["a", "b", "a"]
    assert [c.id for c in message.tool_calls] == ["call_0", "call_1", "call_2"]
    assert message.content == "first  then"


def test_a_good_call_beside_bad_ones_stays_good() -> None:
    good = '<tool_call>{"name": "f", "arguments": {"a": "{x,y"}}</tool_call>'
    calls = parse("hermes", f'<tool_call>{{"name": 5}}</tool_call>{good}').tool_calls
    assert [c.error is None for c in calls] == [False, True]
    assert json.loads(calls[1].arguments) == {"a": "{x,y"}


def test_a_call_that_was_cut_is_not_run() -> None:
    (found,) = parse("hermes", '<tool_call>{"name": "f", "arguments": {}}').tool_calls
    assert "closing" in str(found.error)
    (found,) = parse("tags", "<search>what").tool_calls
    assert "closing" in str(found.error)


def test_json_without_a_tag_is_no_call() -> None:
    assert parse("hermes", '```json\n{"name": "f", "arguments": {}}\n```').tool_calls == ()


def test_a_long_bad_call_is_shortened_in_its_error() -> None:
    (found,) = parse("hermes", f"<tool_call>{'x' * 10_000}</tool_call>").tool_calls
    assert found.error is not None and len(found.error) < 400


def test_the_first_code_block_is_the_action() -> None:
    text = "Plan.\n```python\nprint(1)\n```\nand\n```python\nprint(2)\n```"
    (found,) = parse("code-block", text).tool_calls
    assert json.loads(found.arguments) == {"code": "print(1)\n"}


def test_coder_style() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\nx\ny\n</parameter>\n</function>\n</tool_call>"
    (found,) = parse("qwen-coder", text).tool_calls
    assert (found.name, json.loads(found.arguments)) == ("f", {"a": "x\ny"})


def test_pythonic_calls_hold_plain_values_only() -> None:
    (found,) = parse("llama3-pythonic", "[f(a=__import__('os').getcwd())]").tool_calls
    assert "plain values" in str(found.error)


def test_other_tags_are_text() -> None:
    message = parse("tags", "<b>bold</b> <search>q</search>")
    assert (message.content, len(message.tool_calls)) == ("<b>bold</b>", 1)


@pytest.mark.parametrize(
    ("template", "name"),
    [("x [TOOL_CALLS] y", "mistral"), ("<function=", "qwen-coder"), ("", "hermes")],
)
def test_the_format_follows_from_the_template(template: str, name: str) -> None:
    assert format_of_template(template) == name
