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


def test_a_closing_tag_inside_a_string_is_text() -> None:
    code = 'print("</tool_call>", "<tool_call>")'
    form = tool_format("hermes")
    message = form.parse(form.format(call("python", code=code)) + " after")
    (found,) = message.tool_calls
    assert (json.loads(found.arguments), found.error) == ({"code": code}, None)
    assert message.content == "after"


def test_what_follows_a_good_call_in_its_tag_is_a_bad_one() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}} and {"name": "g"</tool_call>'
    good, bad = parse("hermes", text).tool_calls
    assert good.error is None and "not JSON" in str(bad.error)


CODER_ERRORS = {
    "<function=f>": "no closing </function>",
    "<function=f><parameter=a>1</function>": "no closing </parameter>",
    "<function=f>x</function>": "<parameter=name>",
    "words": "must be <function=name>",
    "<function=></function>": "no closing",
}


@pytest.mark.parametrize("body", CODER_ERRORS)
def test_a_bad_coder_call_says_what_is_wrong(body: str) -> None:
    (found,) = parse("qwen-coder", f"<tool_call>{body}</tool_call>").tool_calls
    assert CODER_ERRORS[body] in str(found.error)


def test_coder_calls_keep_code_as_it_is_and_may_be_several() -> None:
    code = "\tif x < 3:\n\n\t\tprint('</function>')\n"
    arguments = f"<parameter=a>\n{code}\n</parameter>\n<parameter=b>\n2\n</parameter>"
    calls = f"<function=f>\n{arguments}\n</function>\n<function=g></function>"
    first, second = parse("qwen-coder", f"<tool_call>{calls}</tool_call>").tool_calls
    assert json.loads(first.arguments) == {"a": code, "b": "2"}
    assert (second.name, second.arguments, second.error) == ("g", "{}", None)


def test_json_that_names_no_tool_is_an_answer_in_llamas_style() -> None:
    assert parse("llama3-json", '{"answer": 4}').content == '{"answer": 4}'
    (bad,) = parse("llama3-json", '<|python_tag|>{"answer": 4}').tool_calls
    assert "no name" in str(bad.error)
    one, two = parse("llama3-json", '{ "name": "f"}; {"name": "g"}').tool_calls
    assert (one.name, two.name, two.error) == ("f", "g", None)
    _, cut = parse("llama3-json", '{"name": "f"}; {"name": "g", "para').tool_calls
    assert "not JSON" in str(cut.error)


def test_a_code_block_that_was_cut_is_not_run_and_no_answer() -> None:
    (found,) = parse("code-block", "```python\r\nprint(1)").tool_calls
    assert "closing fence" in str(found.error)


@pytest.mark.parametrize("text", ["[f(**{'a': 1})]", "[f(a=1e999)]", "[f(a={1, 2})]", "[f(1)]"])
def test_pythonic_arguments_that_are_no_json_are_refused(text: str) -> None:
    (found,) = parse("llama3-pythonic", text).tool_calls
    assert found.error is not None


HOSTILE = {
    "deep": "[" * 200_000,
    "deep call": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100_000,
    "many openings": "<tool_call>" * 90_000,
    "many objects": "<tool_call>" + '{"name": "f"} ' * 70_000 + "</tool_call>",
    "parameters": f"<tool_call><function=f>{'<parameter=a>' * 75_000}</function></tool_call>",
    "fences": "```python\n" * 100_000,
    "tags": "<search>" * 120_000,
    "spaces": "<tool_call>" + " " * 1_000_000 + "</tool_call>",
    "python": "[f(a=" + "-" * 1_000_000 + "1)]",
    "digits": '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 900_000 + "}}</tool_call>",
    "mistral": "[TOOL_CALLS]f[ARGS]" * 50_000,
}  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_megabyte_of_nonsense_takes_no_longer_than_its_length(name: str, text: str) -> None:
    assert parse(name, text).role == "assistant"
