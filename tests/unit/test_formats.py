"""Other programs' formats: what goes out comes back, and what makes no sense is named by line."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, RecordError
from agentrl.rollout import Stage, run_group
from agentrl.store.formats import FORMATS, export_lines, import_lines
from agentrl.testing.fakes import (
    CharRenderer,
    FakeEnvironment,
    FakeVerifier,
    FixedEngine,
    a_problem,
    echo,
)
from agentrl.types import Group, Verdict

WITH_IDS = [name for name in FORMATS if name != "openai"]


async def a_group(*texts: str) -> Group:
    stage = Stage(
        engine=FixedEngine(*(texts or ('look\n@f {"a": 1}', "done"))),
        renderer=CharRenderer(),
        environment=FakeEnvironment(
            answer=echo, verifier=FakeVerifier(rate=lambda p, e: e.trajectory.member / 2)
        ),
    )
    return await run_group(stage, a_problem(id="t"), size=2, seed=3)


def again(group: Group, name: str) -> Group:
    (read,) = import_lines(export_lines([group], name), name, renderer=CharRenderer())
    return read


@pytest.mark.parametrize("name", WITH_IDS)
@pytest.mark.parametrize("text", ['look\n@f {"a": 1}', '@f {"a":  1}', "@f {bad", "@f 3"])
async def test_what_training_needs_comes_back(name: str, text: str) -> None:
    group = await a_group(text, "done")
    read = again(group, name)
    assert read.verdicts == group.verdicts
    for before, after in zip(group.trajectories, read.trajectories, strict=True):
        for what in ("token_ids", "action_mask", "behavior_logprobs", "versions", "ending", "seed"):
            assert getattr(after, what) == getattr(before, what), what
        assert [m.content for m in after.messages] == [m.content for m in before.messages]
        assert [c.arguments for m in after.messages for c in m.tool_calls] == [
            c.arguments for m in before.messages for c in m.tool_calls
        ]


async def test_openai_messages_come_back_with_new_ids_and_no_logprobs() -> None:
    group = await a_group()
    read = again(group, "openai")
    assert read.verdicts == group.verdicts
    for before, after in zip(group.trajectories, read.trajectories, strict=True):
        assert [m.content for m in after.messages] == [m.content for m in before.messages]
        assert after.action_mask[-5:] == (True,) * 5
        assert all(turn.action.logprobs is None for turn in after.turns)
    lines = list(export_lines([group], "openai"))
    with pytest.raises(RecordError, match="line 1 is no openai trajectory: it has no token ids"):
        list(import_lines(lines, "openai"))


@pytest.mark.parametrize("name", WITH_IDS)
async def test_an_invalid_verdict_stays_one(name: str) -> None:
    group = await a_group()
    group = replace(group, verdicts=(Verdict(invalid="E: x"), Verdict(reward=0.5, passed=True)))
    assert again(group, name).verdicts == group.verdicts


async def test_the_rows_have_the_names_that_their_readers_want() -> None:
    group = await a_group()

    def row(name: str) -> dict:
        return json.loads(next(export_lines([group], name)))

    atif = row("atif")
    assert [s["source"] for s in atif["steps"]] == ["user", "agent", "agent"]
    assert [s["step_id"] for s in atif["steps"]] == [1, 2, 3]
    step = atif["steps"][1]
    assert step["tool_calls"][0] == {
        "tool_call_id": "call_0",
        "function_name": "f",
        "arguments": {"a": 1},
    }
    assert step["observation"]["results"][0]["source_call_id"] == "call_0"
    metrics = step["metrics"]
    assert len(metrics["logprobs"]) == len(metrics["completion_token_ids"])
    assert len(metrics["prompt_token_ids"]) == metrics["prompt_tokens"]
    trl, verl = row("trl"), row("verl")
    assert trl["completion_ids"] == verl["response_ids"]
    assert trl["env_mask"] == verl["response_mask"] and set(trl["env_mask"]) == {0, 1}
    assert len(trl["logprobs"]) == len(trl["completion_ids"])
    traced = row("verifiers")
    assert (
        traced["trajectory"][1]["tokens"]["prompt_ids"][: len(trl["prompt_ids"])]
        == (trl["prompt_ids"])
    )
    assert [len(s["prompt"]) for s in traced["trajectory"]] == [1, 3]
    calls = row("openai")["messages"][1]["tool_calls"]
    assert calls[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


async def test_a_foreign_file_without_our_facts_is_read() -> None:
    group = await a_group()
    rows = [json.loads(line) for line in export_lines([group], "trl")]
    for row in rows:
        del row["extra_fields"], row["prompt"], row["completion"]
    (read,) = import_lines(map(json.dumps, rows), "trl")
    assert read.trajectories[0].token_ids == group.trajectories[0].token_ids
    assert read.trajectories[0].action_mask == group.trajectories[0].action_mask
    assert read.rewards == group.rewards


async def test_a_rewritten_history_is_refused_by_turn() -> None:
    (line, *_) = export_lines([await a_group()], "atif")
    row = json.loads(line)
    row["steps"][2]["metrics"]["prompt_token_ids"][0] += 1
    with pytest.raises(RecordError, match=r"line 1 .* turn 1: its prompt does not begin"):
        list(import_lines([json.dumps(row)], "atif"))


@pytest.mark.parametrize("name", FORMATS)
async def test_a_cut_last_line_is_skipped_a_cut_line_before_is_not(name: str) -> None:
    first, second = export_lines([await a_group()], name)
    with pytest.warns(UserWarning, match="skipped: line 2 is no JSON"):
        (read,) = import_lines([first, second[:50]], name, renderer=CharRenderer())
    assert len(read.trajectories) == 1
    with pytest.raises(RecordError, match="line 1 is no JSON"):
        list(import_lines([first[:50], second], name, renderer=CharRenderer()))


@pytest.mark.parametrize("name", FORMATS)
@given(
    row=st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "messages",
                        "steps",
                        "schema_version",
                        "prompt",
                        "completion",
                        "prompt_ids",
                        "role",
                    ]
                ),
                inner,
            )
        ),
        max_leaves=6,
    )
)
def test_any_other_json_is_named_by_its_line(name: str, row: object) -> None:
    try:
        list(import_lines([json.dumps(row)], name, renderer=CharRenderer()))
    except RecordError as error:
        assert "line 1" in str(error)


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ConfigError, match="no format 'parquet'; known: openai"):
        list(import_lines([], "parquet"))
