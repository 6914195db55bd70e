"""What every format is made from and read into: a graded trajectory, and its parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from agentrl.protocols import Renderer, Writer
from agentrl.types import (
    ActionTokens,
    Ending,
    Finish,
    Message,
    Messages,
    ObservationTokens,
    ToolCall,
    Trajectory,
    Turn,
    Verdict,
)

Row = dict[str, Any]
UNKNOWN_VERSION = -1
"""The policy version of tokens that come from elsewhere."""
UNKNOWN_MEMBER = -1
"""The member of a row that does not say which it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory with its verdict."""

    trajectory: Trajectory
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What one turn added, in ids and words. `logprobs` may be missing."""

    observation: Sequence[int]
    action: Sequence[int]
    logprobs: Sequence[float] | None
    message: Message
    reply: Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A conversation cut at its actions: the prompt, then each action with its reply."""

    prompt: Messages
    turns: Sequence[tuple[Message, Messages]]


def facts_of(sample: Sample) -> Row:
    """What the formats have no field for: kept under "agentrl", so that an import loses nothing
    that training needs.
    """
    trajectory, verdict = sample.trajectory, sample.verdict
    return {
        "id": trajectory.id,
        "task_id": trajectory.task_id,
        "member": trajectory.member,
        "seed": trajectory.seed,
        "ending": trajectory.ending.value,
        "finish": [turn.action.finish for turn in trajectory.turns],
        "versions": [list(turn.action.versions) for turn in trajectory.turns],
        "passed": verdict.passed,
        "invalid": verdict.invalid,
        "components": dict(verdict.components),
    }


def assemble(prompt: Messages, added: Sequence[Added], reward: Any, facts: Row) -> Sample:
    """A sample from its turns. Without facts, every action stopped by itself.

    Raises ValueError, KeyError or TypeError where the parts don't fit.
    """
    versions = facts.get("versions") or [[UNKNOWN_VERSION] * len(a.action) for a in added]
    finish = facts.get("finish") or ["stop"] * len(added)
    turns = tuple(
        Turn(
            observation=ObservationTokens(token_ids=_ids(one.observation)),
            action=ActionTokens(
                token_ids=_ids(one.action),
                logprobs=None if one.logprobs is None else tuple(map(float, one.logprobs)),
                versions=tuple(_whole(v, "version", bits=32) for v in version),
                finish=_finish(end),
            ),
            message=one.message,
            reply=one.reply,
        )
        for one, version, end in zip(added, versions, finish, strict=True)
    )
    trajectory = Trajectory(
        id=str(facts.get("id", "imported")),
        task_id=str(facts.get("task_id", "imported")),
        member=_whole(facts.get("member", UNKNOWN_MEMBER), "member", bits=32),
        seed=_whole(facts.get("seed", 0), "seed", bits=64),
        prompt=prompt,
        turns=turns,
        ending=Ending(facts.get("ending", "answered")),
    )
    return Sample(trajectory=trajectory, verdict=_verdict(reward, facts))


def spelled(talk: Talk, renderer: Renderer | None) -> list[Added]:
    """The turns of a talk that has no ids: written by the renderer, so without logprobs.

    Raises ValueError when there is no renderer, or one that can't write.
    """
    if renderer is None or not isinstance(renderer, Writer):
        raise ValueError("it has no token ids: name the model whose tokenizer should write them")
    out: list[Added] = []
    observation: tuple[int, ...] = renderer.open(talk.prompt, ())
    for message, reply in talk.turns:
        action = renderer.write(message)
        out.append(
            Added(
                observation=observation, action=action, logprobs=None, message=message, reply=reply
            )
        )
        observation = renderer.extend(reply, action[-1]) if reply else ()
    return out


def talk_of(messages: Sequence[Message]) -> Talk:
    """The conversation cut before each assistant message. Raises ValueError without one."""
    first = next((n for n, m in enumerate(messages) if m.role == "assistant"), None)
    if first is None:
        raise ValueError("there is no assistant message")
    turns: list[tuple[Message, Messages]] = []
    for is_action, some in groupby(messages[first:], key=lambda m: m.role == "assistant"):
        if is_action:
            turns += [(message, ()) for message in some]
        else:
            turns[-1] = (turns[-1][0], tuple(some))
    return Talk(prompt=tuple(messages[:first]), turns=turns)


def openai_message(message: Message) -> Row:
    """A message in the OpenAI chat form. Raw arguments stay as sampled."""
    row: Row = {"role": message.role, "content": message.content}
    if message.reasoning:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    return row


def message_of(row: Mapping[str, Any]) -> Message:
    """A message from the OpenAI chat form; content parts become their text."""
    content = row.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    calls = tuple(
        ToolCall(
            id=str(call.get("id", "")),
            name=call["function"]["name"],
            arguments=call["function"]["arguments"],
        )
        for call in row.get("tool_calls") or ()
    )
    role = row["role"]
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"unknown role {role!r}")
    return Message(
        role=role,
        content=str(content),
        reasoning=str(row.get("reasoning_content") or ""),
        tool_calls=calls,
        tool_call_id=row.get("tool_call_id"),
    )


def _ids(given: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_whole(number, "token id", bits=32) for number in given)


def _whole(number: Any, what: str, *, bits: int) -> int:
    """A whole number that a record can hold. Raises ValueError for anything else."""
    if type(number) is not int or not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise ValueError(f"{what} {str(number)[:40]!r} is no whole number of {bits} bits")
    return number


def _finish(word: Any) -> Finish:
    if word in ("stop", "length", "abort"):
        return word
    raise ValueError(f"unknown finish {word!r}")


def _verdict(reward: Any, facts: Row) -> Verdict:
    parts: Row = {"passed": bool(facts.get("passed")), "components": facts.get("components") or {}}
    if reward is None:
        return Verdict(invalid=facts.get("invalid") or "the file has no reward", **parts)
    return Verdict(reward=float(reward), **parts)
