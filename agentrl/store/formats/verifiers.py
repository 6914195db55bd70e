"""Traces of the `verifiers` library: a rollout with one trajectory step for each request."""

from typing import Any

from agentrl.protocols import Renderer
from agentrl.store.formats.grown import grown
from agentrl.store.formats.sample import (
    Row,
    Sample,
    assemble,
    facts_of,
    message_of,
    openai_message,
    spelled,
    talk_of,
)
from agentrl.types import Ending, Turn


def to_row(sample: Sample) -> Row:
    """One rollout, as `verifiers` saves it."""
    trajectory, verdict = sample.trajectory, sample.verdict
    prompt = [openai_message(m) for m in trajectory.prompt]
    talk = [openai_message(m) for m in trajectory.messages]
    steps: list[Row] = []
    before: list[int] = []
    shown = len(prompt)
    for turn in trajectory.turns:
        before += turn.observation.token_ids
        steps.append(_step(sample, turn, talk[:shown], before))
        before += turn.action.token_ids
        shown += 1 + len(turn.reply)
    return {
        "example_id": trajectory.task_id,
        "task": trajectory.task_id,
        "prompt": prompt,
        "completion": talk[len(prompt) :],
        "reward": verdict.reward,
        "metrics": dict(verdict.components),
        "is_completed": trajectory.ending is Ending.ANSWERED,
        "is_truncated": trajectory.ending is not Ending.ANSWERED,
        "stop_condition": trajectory.ending.value,
        "error": verdict.invalid,
        "trajectory": steps,
        "info": {"agentrl": facts_of(sample)},
    }


def of_row(row: Row, renderer: Renderer | None) -> Sample:
    """A sample from a saved rollout. Raises ValueError, KeyError or TypeError."""
    messages = [message_of(m) for m in (*row["prompt"], *(row["completion"] or ()))]
    talk = talk_of(messages)
    tokens: list[Any] = [step.get("tokens") for step in row.get("trajectory") or ()]
    if tokens and all(tokens):
        added = list(
            grown(
                talk,
                [t["prompt_ids"] for t in tokens],
                [t["completion_ids"] for t in tokens],
                [t.get("completion_logprobs") for t in tokens],
            )
        )
    else:
        added = spelled(talk, renderer)
    info = row.get("info")
    named = {"task_id": row.get("example_id", row.get("task", "imported"))}
    facts: Row = (info.get("agentrl") if isinstance(info, dict) else None) or named
    return assemble(talk.prompt, added, row.get("reward"), facts)


def _step(sample: Sample, turn: Turn, prompt: list[Row], before: list[int]) -> Row:
    action, truncated = turn.action, turn.action.finish == "length"
    return {
        "prompt": prompt,
        "completion": [openai_message(turn.message)],
        "tokens": {
            "prompt_ids": list(before),
            "prompt_mask": [0] * len(before),
            "completion_ids": list(action.token_ids),
            "completion_mask": [1] * len(action.token_ids),
            "completion_logprobs": list(action.logprobs or ()),
            "overlong_prompt": False,
            "is_truncated": truncated,
        },
        "reward": sample.verdict.reward,
        "advantage": None,
        "is_truncated": truncated,
        "trajectory_id": sample.trajectory.id,
        "extras": {},
    }
