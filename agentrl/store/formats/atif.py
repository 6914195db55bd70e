"""ATIF, the Agent Trajectory Interchange Format of Harbor, version 1.4 (with token ids)."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.protocols import Renderer
from agentrl.store.formats.grown import grown
from agentrl.store.formats.sample import (
    Row,
    Sample,
    Talk,
    assemble,
    facts_of,
    spelled,
)
from agentrl.types import Message, Messages, ToolCall, Turn

VERSION = "ATIF-v1.4"


def to_row(sample: Sample) -> Row:
    """One ATIF document. A call whose arguments are no JSON object has them under "raw"."""
    trajectory = sample.trajectory
    prompt = [
        {"source": "system" if m.role == "system" else "user", "message": m.content}
        for m in trajectory.prompt
    ]
    before: list[int] = []
    agent: list[Row] = []
    for turn in trajectory.turns:
        before += turn.observation.token_ids
        agent.append(_agent_step(turn, before))
        before += turn.action.token_ids
    steps = [{"step_id": n, **step} for n, step in enumerate([*prompt, *agent], start=1)]
    return {
        "schema_version": VERSION,
        "session_id": trajectory.id,
        "agent": {"name": "agentrl", "version": "1"},
        "steps": steps,
        "final_metrics": {
            "total_completion_tokens": trajectory.action_tokens,
            "total_steps": len(steps),
            "extra": {"reward": sample.verdict.reward},
        },
        "extra": {"agentrl": facts_of(sample)},
    }


def of_row(row: Row, renderer: Renderer | None) -> Sample:
    """A sample from any ATIF document. Raises ValueError, KeyError or TypeError.

    Ids come from `prompt_token_ids` and `completion_token_ids` where every agent step has them,
    else from the renderer.
    """
    if not str(row.get("schema_version", "")).startswith("ATIF-"):
        raise ValueError("it has no ATIF schema_version")
    steps: Sequence[Row] = row["steps"]
    talk = _talk(steps)
    metrics = [s.get("metrics") or {} for s in steps if s["source"] == "agent"]
    if all(m.get("prompt_token_ids") and m.get("completion_token_ids") for m in metrics):
        added = list(
            grown(
                talk,
                [m["prompt_token_ids"] for m in metrics],
                [m["completion_token_ids"] for m in metrics],
                [m.get("logprobs") for m in metrics],
            )
        )
    else:
        added = spelled(talk, renderer)
    facts: Row = (row.get("extra") or {}).get("agentrl") or {"id": row.get("session_id", "?")}
    final: Row = row.get("final_metrics") or {}
    return assemble(talk.prompt, added, (final.get("extra") or {}).get("reward"), facts)


def _agent_step(turn: Turn, before: Sequence[int]) -> Row:
    action, message = turn.action, turn.message
    step: Row = {"source": "agent", "message": message.content}
    if message.reasoning:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = [
            {
                "tool_call_id": call.id,
                "function_name": call.name,
                "arguments": _arguments(call.arguments),
            }
            for call in message.tool_calls
        ]
    if turn.reply:
        step["observation"] = {
            "results": [
                {"source_call_id": m.tool_call_id, "content": m.content} for m in turn.reply
            ]
        }
    step["metrics"] = {
        "prompt_tokens": len(before),
        "completion_tokens": len(action.token_ids),
        "prompt_token_ids": list(before),
        "completion_token_ids": list(action.token_ids),
        **({} if action.logprobs is None else {"logprobs": list(action.logprobs)}),
    }
    return step


def _talk(steps: Sequence[Row]) -> Talk:
    prompt: list[Message] = []
    turns: list[tuple[Message, Messages]] = []
    for step in steps:
        source, said = step["source"], str(step.get("message") or "")
        if source == "agent":
            turns.append((_message(step), tuple(_results(step))))
        elif source not in ("system", "user"):
            raise ValueError(f"unknown source {source!r}")
        elif turns:
            action, reply = turns[-1]
            turns[-1] = (action, (*reply, Message(role=source, content=said)))
        else:
            prompt.append(Message(role=source, content=said))
    if not turns:
        raise ValueError("there is no agent step")
    return Talk(prompt=tuple(prompt), turns=turns)


def _message(step: Row) -> Message:
    calls = tuple(
        ToolCall(
            id=str(call["tool_call_id"]),
            name=call["function_name"],
            arguments=_raw(call["arguments"]),
        )
        for call in step.get("tool_calls") or ()
    )
    return Message(
        role="assistant",
        content=str(step.get("message") or ""),
        reasoning=str(step.get("reasoning_content") or ""),
        tool_calls=calls,
    )


def _results(step: Row) -> Iterator[Message]:
    for result in (step.get("observation") or {}).get("results", ()):
        call = result.get("source_call_id")
        yield Message(
            role="user" if call is None else "tool",
            content=str(result.get("content") or ""),
            tool_call_id=call,
        )


def _arguments(raw: str) -> Row:
    try:
        found: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return {"raw": raw}
    # Another spelling of the same object would not come back as it was sampled.
    return found if isinstance(found, dict) and json.dumps(found) == raw else {"raw": raw}


def _raw(arguments: Row) -> str:
    if set(arguments) == {"raw"} and isinstance(arguments["raw"], str):
        return arguments["raw"]
    return json.dumps(arguments)
