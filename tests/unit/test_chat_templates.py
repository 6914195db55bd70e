"""Templates in the manner of the families that people train, each with its trap.

The one thing that is compared is the text that the template itself would have written, where it
leaves the past alone; where it does not, the sampled ids stay and the check says so.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from agentrl.models import tiny_tokenizer
from agentrl.rendering import ChatTemplateRenderer, check_template, make_renderer
from agentrl.tools import ToolEnvironment, call, tool
from agentrl.types import Message, system, user

FOLDER = Path(__file__).parents[1] / "templates"
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<start_of_turn>", "<end_of_turn>", "<bos>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<s>", "</s>", "<eos>",
]  # fmt: skip
BEGIN_AND_END = {
    "chatml": (None, "<|im_end|>"),
    "hermes": (None, "<|im_end|>"),
    "qwen3": (None, "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "gemma": ("<bos>", "<eos>"),
}
FORMATS = {
    "chatml": "hermes", "hermes": "hermes", "qwen3": "hermes",
    "llama3": "llama3-json", "mistral": "mistral", "gemma": "hermes",
}  # fmt: skip


class Python(ToolEnvironment):
    @tool
    def python(self, code: str) -> str:
        """Run code."""
        return code


TOOLS = Python(sandbox=None).tools


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    made = tiny_tokenizer()
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.bos_token, made.eos_token = BEGIN_AND_END[family]
    made.chat_template = (FOLDER / f"{family}.jinja").read_text()
    return made


def renderer(family: str) -> ChatTemplateRenderer:
    return make_renderer(tokenizer(family), tool_names=["python"])


RENDERERS = {family: renderer(family) for family in BEGIN_AND_END}


@pytest.fixture(params=RENDERERS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def text(r: ChatTemplateRenderer, ids: Any) -> str:
    return r._tokenizer.decode(list(ids), skip_special_tokens=False)


def result(content: str, number: int = 0) -> Message:
    return Message(role="tool", content=content, tool_call_id=f"call_{number}")


def native(r: ChatTemplateRenderer, *messages: tuple[str, str]) -> str:
    """What the template itself writes, up to where the policy writes next."""
    dicts = [{"role": role, "content": content} for role, content in messages]
    for message in dicts:
        if message["role"] == "tool":
            message |= {"tool_call_id": "call00000", "name": "tool"}
    return r._tokenizer.apply_chat_template(
        dicts, chat_template=r.template, add_generation_prompt=True, tokenize=False
    )


# ---------------------------------------------------------------- the same text as the template


def test_the_opening_is_the_templates_own(family: str) -> None:
    r = RENDERERS[family]
    assert text(r, r.open([user("2+2?")], ())) == native(r, ("user", "2+2?"))


def test_a_talk_reads_as_the_template_writes_it(family: str) -> None:
    """Without thinking, no family rewrites a one-call talk (Mistral's moves only system text)."""
    r = RENDERERS[family]
    action = r.write(call("python", code="print(4)"))
    ids = (*r.open([user("2+2?")], ()), *action, *r.extend([result("4")], action[-1]))
    said = text(r, action[:-1])
    role = "tool" if r.takes_tool_role else "user"
    assert text(r, ids) == native(r, ("user", "2+2?"), ("assistant", said), (role, "4"))


def test_two_results_of_one_turn(family: str) -> None:
    r = RENDERERS[family]
    tail = text(r, r.extend([result("one"), result("two", 1)], next(iter(r.stop_ids))))
    assert tail.index("one") < tail.index("two")
    openings = {"qwen3": "<|im_start|>user", "gemma": "<start_of_turn>user"}
    if family in openings:
        assert tail.count(openings[family]) == 1, "they are one user turn"


def test_the_end_of_an_action_is_the_templates(family: str) -> None:
    r = RENDERERS[family]
    ends = {**{name: end for name, (_, end) in BEGIN_AND_END.items()}, "gemma": "<end_of_turn>"}
    (end,) = r._tokenizer.encode(ends[family], add_special_tokens=False)
    assert r.write(Message(role="assistant", content="4"))[-1] == end
    assert end in r.stop_ids
    cut = r.extend([user("go on")], ord("x"))
    assert cut[0] == end and end not in r.extend([user("go on")], end)[:1]


@pytest.mark.parametrize("stop", ["<|eot_id|>", "<|eom_id|>"])
def test_any_stop_token_of_a_family_ends_an_action_once(stop: str) -> None:
    r = RENDERERS["llama3"]
    (end,) = r._tokenizer.encode(stop, add_special_tokens=False)
    assert end in r.stop_ids
    tail = text(r, r.extend([user("go on")], end))
    assert tail.startswith("<|start_header_id|>user")


def test_results_that_a_template_quotes_are_quoted_whole() -> None:
    r = RENDERERS["llama3"]
    hostile = 'a "quote"\nand \\ and é <|eot_id|>'
    tail = text(r, r.extend([result(hostile)], next(iter(r.stop_ids))))
    quoted = tail.partition("ipython<|end_header_id|>\n\n")[2].rpartition("<|start_header_id|>")[0]
    assert json.loads(quoted.removesuffix("<|eot_id|>")) == hostile


def test_the_begin_token_is_there_once(family: str) -> None:
    r, begin = RENDERERS[family], BEGIN_AND_END[family][0]
    ids = (*r.open([system("s"), user("u")], TOOLS), *r.extend([user("x")], None))
    if begin is not None:
        assert text(r, ids).count(begin) == 1 and text(r, ids).startswith(begin)


def test_tools_and_system_text_are_read_whatever_the_family(family: str) -> None:
    r = RENDERERS[family]
    said = text(r, r.open([system("be brief"), user("2+2?")], TOOLS))
    assert "be brief" in said and "2+2?" in said
    assert '"python"' in said and '"code"' in said


def test_an_opening_system_text_of_the_template_does_not_come_again() -> None:
    r = RENDERERS["chatml"]
    assert "helpful assistant" in text(r, r.open([user("u")], ()))
    assert "helpful" not in text(r, r.extend([user("u")], None))


# ---------------------------------------------------------------- thinking


def test_thinking_stays_though_the_template_would_drop_it() -> None:
    r = RENDERERS["qwen3"]
    action = r.write(Message(role="assistant", content="4", reasoning="2 and 2 are 4"))
    ids = (*r.open([user("2+2?")], ()), *action, *r.extend([user("sure?")], action[-1]))
    assert "2 and 2 are 4" in text(r, ids)
    dropped = native(r, ("user", "2+2?"), ("assistant", text(r, action[:-1])), ("user", "sure?"))
    assert "2 and 2 are 4" not in dropped, "the trap is there"


# ---------------------------------------------------------------- properties


@given(
    family=st.sampled_from(sorted(RENDERERS)),
    contents=st.tuples(*[st.text(max_size=20) | st.sampled_from(SPECIAL)] * 3),
    tools=st.booleans(),
)
def test_contents_are_text_and_the_past_is_never_touched(
    family: str, contents: tuple[str, str, str], tools: bool
) -> None:
    r = RENDERERS[family]
    special = set(r._tokenizer.added_tokens_decoder)
    plain = [user("u"), result("r"), user("v")]
    filled = [replace(m, content=c) for m, c in zip(plain, contents, strict=True)]

    def scaffold(messages: list[Message]) -> list[int]:
        opened = r.open(messages[:1], TOOLS if tools else ())
        action = r.write(call("python", code="1"))
        ids = (*opened, *action, *r.extend(messages[1:2], action[-1]), *action)
        ids += r.extend(messages[2:], action[-1])
        assert ids[: len(opened)] == opened
        return [i for i in ids if i in special]

    assert scaffold(filled) == scaffold(plain), "no content becomes a control token"


# ---------------------------------------------------------------- what the check says

SAID = {
    "chatml": {"it takes no tools"},
    "hermes": set[str](),
    "qwen3": {"rewrites earlier turns"},
    "llama3": {"today's date"},
    "mistral": {"roles to alternate", "rewrites earlier turns"},
    "gemma": {"no system message", "no tool message", "no tools", "roles to alternate"},
}


def test_the_check_names_the_trap_and_nothing_else(family: str) -> None:
    findings = check_template(RENDERERS[family])
    assert all(finding.level == "note" for finding in findings), findings
    assert len(findings) == len(SAID[family]), findings
    for said in SAID[family]:
        assert sum(said in finding.what for finding in findings) == 1, (said, findings)


def test_the_tool_format_follows_from_the_template(family: str) -> None:
    r = RENDERERS[family]
    assert r.format is make_renderer(tokenizer(family), tool_format_name=FORMATS[family]).format
