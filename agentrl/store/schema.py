"""How a group is laid out in rows and columns, and read back.

A row is a trajectory with its verdict; the rows of a group lie side by side and share `group`. A
group that lost all its members is one row without a trajectory (`id` is null). Ids are stored
once. `spans` cuts them into runs of one author and one policy version; an action is one or more
policy spans, of which the last has the engine's finish reason. `logprobs` holds one number for
each id of the spans that are `scored`. The group's `task` (JSON) and the `files` of its sandbox
stand in its first row. References are in no column.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

import pyarrow as pa

from agentrl.store.redaction import Redactor
from agentrl.types import (
    ActionTokens,
    Ending,
    Group,
    Message,
    Messages,
    ObservationTokens,
    SandboxSpec,
    Task,
    ToolCall,
    ToolEvent,
    Trajectory,
    Turn,
    Verdict,
)

VERSION = "2"
"""Of the layout. Schema 1 lacks task, files, artifacts and the turns' `seen`, and has maps where
this one has lists of names and values."""
READABLE = ("1", VERSION)
"""Older layouts are brought to this one while they are read."""

Row = dict[str, Any]

_CALL = pa.struct(
    {"id": pa.string(), "name": pa.string(), "arguments": pa.string(), "error": pa.string()}
)
_MESSAGE = pa.struct(
    {
        "role": pa.string(),
        "content": pa.string(),
        "reasoning": pa.string(),
        "tool_calls": pa.list_(_CALL),
        "tool_call_id": pa.string(),
    }
)
_SPAN = pa.struct(
    {
        "author": pa.string(),
        "length": pa.int32(),
        "version": pa.int32(),
        "finish": pa.string(),
        "scored": pa.bool_(),
    }
)
_TURN = pa.struct(
    {
        "message": _MESSAGE,
        "reply": pa.list_(_MESSAGE),
        "reward": pa.float64(),
        "seen": pa.string(),
    }
)
_EVENT = pa.struct(
    {
        "turn": pa.int32(),
        "call_id": pa.string(),
        "name": pa.string(),
        "status": pa.string(),
        "at_s": pa.float64(),
        "seconds": pa.float64(),
        "output_bytes": pa.int64(),
        "cut": pa.bool_(),
        "exit_code": pa.int32(),
    }
)
# Not maps: `datasets` can't read those.
_NUMBERS = pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()}))
_BYTES = ("files", "snapshot")
"""Of a sandbox spec, kept in the column `files`: the snapshot under the name that no file has."""
_FILES = pa.list_(pa.struct({"name": pa.string(), "value": pa.binary()}))

COLUMNS = pa.schema(
    {
        "group": pa.int32(),
        "task_id": pa.string(),
        "faults": pa.list_(pa.string()),
        "task": pa.string(),
        "files": _FILES,
        "id": pa.string(),
        "member": pa.int32(),
        "seed": pa.int64(),
        "ending": pa.string(),
        "reward": pa.float64(),
        "passed": pa.bool_(),
        "invalid": pa.string(),
        "components": _NUMBERS,
        "step_rewards": pa.list_(pa.float64()),
        "note": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "spans": pa.list_(_SPAN),
        "logprobs": pa.list_(pa.float32()),
        "prompt": pa.list_(_MESSAGE),
        "turns": pa.list_(_TURN),
        "events": pa.list_(_EVENT),
        "metrics": _NUMBERS,
        "artifacts": _FILES,
    }
)


def encode(groups: Iterable[tuple[int, Group]], redactor: Redactor) -> pa.RecordBatch:
    """The rows of numbered groups; everything has passed the redactor."""
    rows = [row for number, group in groups for row in _group_rows(number, group, redactor)]
    return pa.RecordBatch.from_pylist([_cleaned(row, redactor) for row in rows], schema=COLUMNS)


def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[Group]:
    """The groups of a file, one at a time.

    Raises ValueError, TypeError, KeyError or IndexError when the rows don't make sense.
    """
    rows = (row for batch in batches for row in _rows(batch))
    for _, members in groupby(rows, key=lambda row: row["group"]):
        yield _group(list(members))


def _group_rows(number: int, group: Group, redactor: Redactor) -> Iterator[Row]:
    shared: Row = {"group": number, "task_id": group.task_id, "faults": group.faults}
    artifacts = group.artifacts or (None,) * len(group.trajectories)
    task = _task_row(group.task)
    for trajectory, verdict, left in zip(
        group.trajectories, group.verdicts, artifacts, strict=True
    ):
        files = {"artifacts": None if left is None else _pairs(left)}
        shown = redactor.tokens(trajectory)
        yield shared | task | _trajectory_row(shown) | _verdict_row(verdict) | files
        task = {}
    if not group.trajectories:
        yield shared | task


def _task_row(task: Task | None) -> Row:
    """The public half of a problem. A set-up that JSON can't hold is not kept, nor is its task."""
    if task is None:
        return {}
    spec = task.sandbox
    limits = None if spec is None else {k: v for k, v in _fields(spec).items() if k not in _BYTES}
    public = {
        "id": task.id,
        "prompt": [_message_row(m) for m in task.prompt],
        "sandbox": limits,
        "artifacts": task.artifacts,
        "setup": dict(task.setup),
        **({"family": task.family} if task.family else {}),
    }
    try:
        text = json.dumps(public)
    except (TypeError, ValueError):
        return {}
    files = {} if spec is None else {**spec.files, **({"": spec.snapshot} if spec.snapshot else {})}
    return {"task": text, "files": _pairs(files)}


def _trajectory_row(trajectory: Trajectory) -> Row:
    return {
        "id": trajectory.id,
        "member": trajectory.member,
        "seed": trajectory.seed,
        "ending": trajectory.ending.value,
        "token_ids": trajectory.token_ids,
        "spans": [span for turn in trajectory.turns for span in _span_rows(turn)],
        "logprobs": [p for turn in trajectory.turns for p in turn.action.logprobs or ()],
        "prompt": [_message_row(m) for m in trajectory.prompt],
        "turns": [_turn_row(turn) for turn in trajectory.turns],
        "events": [_fields(event) for event in trajectory.events],
        "metrics": _pairs(trajectory.metrics),
    }


def _verdict_row(verdict: Verdict) -> Row:
    return _fields(verdict) | {"components": _pairs(verdict.components)}


def _span_rows(turn: Turn) -> Iterator[Row]:
    yield {"author": "environment", "length": len(turn.observation.token_ids)}
    action = turn.action
    runs = [(version, len(list(run))) for version, run in groupby(action.versions)]
    for place, (version, length) in enumerate(runs, start=1):
        yield {
            "author": "policy",
            "length": length,
            "version": version,
            "finish": action.finish if place == len(runs) else None,
            "scored": action.logprobs is not None,
        }


def _turn_row(turn: Turn) -> Row:
    return {
        "message": _message_row(turn.message),
        "reply": [_message_row(m) for m in turn.reply],
        "reward": turn.reward,
        "seen": turn.seen,
    }


def _message_row(message: Message) -> Row:
    return _fields(message) | {"tool_calls": [_fields(call) for call in message.tool_calls]}


def _fields(record: Message | ToolCall | ToolEvent | Verdict | SandboxSpec) -> Row:
    """The fields of a flat record (`dataclasses.asdict` would copy deeply)."""
    return {name: getattr(record, name) for name in record.__slots__}


def _pairs(mapping: Mapping[str, Any]) -> list[Row]:
    return [{"name": name, "value": value} for name, value in mapping.items()]


def _mapping(pairs: Any) -> dict[str, Any]:
    """What `_pairs` was given; in schema 1 they are tuples."""
    named = (tuple(pair.values()) if isinstance(pair, dict) else pair for pair in pairs or ())
    return dict(named)


def _cleaned(value: Any, redactor: Redactor) -> Any:
    """A copy with every text cleaned. Numbers, which are most of a row, are passed by."""
    if isinstance(value, str):
        return redactor.text(value)
    if isinstance(value, bytes):
        return redactor.data(value)
    if isinstance(value, dict):
        return {name: _cleaned(part, redactor) for name, part in value.items()}
    if isinstance(value, list | tuple) and not (value and isinstance(value[0], int | float)):
        parts = (_cleaned(part, redactor) for part in value)
        return tuple(parts) if isinstance(value, tuple) else list(parts)
    return value


def _rows(batch: pa.RecordBatch) -> Iterator[Row]:
    """The rows of a batch. The two long columns take a faster way than `to_pylist`."""
    fast = ("token_ids", "logprobs")
    long = {name: _slices(batch.column(name)) for name in fast}
    rest = batch.drop_columns(list(fast)).to_pylist()
    for row, ids, logprobs in zip(rest, *long.values(), strict=True):
        yield row | {"token_ids": ids, "logprobs": logprobs}


def _slices(column: Any) -> Iterator[tuple[Any, ...]]:
    flat = column.flatten().to_numpy(zero_copy_only=False)
    end = 0
    for length in column.value_lengths().to_pylist():
        begin, end = end, end + (length or 0)
        yield tuple(flat[begin:end].tolist())


def _group(rows: Sequence[Row]) -> Group:
    members = [row for row in rows if row["id"] is not None]
    left = [row.get("artifacts") for row in members]
    return Group(
        task_id=rows[0]["task_id"],
        trajectories=tuple(_trajectory(row) for row in members),
        verdicts=tuple(_verdict(row) for row in members),
        faults=tuple(rows[0]["faults"]),
        task=_task(rows[0]),
        artifacts=() if None in left else tuple(_mapping(files) for files in left),
    )


def _task(row: Row) -> Task | None:
    if row.get("task") is None:
        return None
    public = json.loads(row["task"])
    limits: Row | None = public["sandbox"]
    if limits is not None:
        files = _mapping(row["files"])
        held = {"snapshot": files.pop("", b""), "files": files}
        limits = limits | held | {"egress": tuple(limits["egress"])}
    return Task(
        id=public["id"],
        prompt=_messages(public["prompt"]),
        sandbox=None if limits is None else SandboxSpec(**limits),
        artifacts=tuple(public["artifacts"]),
        setup=public["setup"],
        family=public.get("family", ""),
    )


def _trajectory(row: Row) -> Trajectory:
    tokens = list(_tokens(row["token_ids"], row["spans"], row["logprobs"]))
    return Trajectory(
        id=row["id"],
        task_id=row["task_id"],
        member=row["member"],
        seed=row["seed"],
        prompt=_messages(row["prompt"]),
        turns=tuple(
            Turn(
                observation=observation,
                action=action,
                message=_message(said["message"]),
                reply=_messages(said["reply"]),
                reward=said["reward"],
                seen=said.get("seen") or "",
            )
            for (observation, action), said in zip(tokens, row["turns"], strict=True)
        ),
        ending=Ending(row["ending"]),
        events=tuple(ToolEvent(**event) for event in row["events"]),
        metrics=_mapping(row["metrics"]),
    )


def _tokens(
    token_ids: Sequence[int], spans: Sequence[Row], logprobs: Sequence[float]
) -> Iterator[tuple[ObservationTokens, ActionTokens]]:
    """What each turn added, put together from its spans."""
    if sum(span["length"] for span in spans) != len(token_ids):
        raise ValueError("the spans don't cover the ids")
    ids, scores = iter(token_ids), iter(logprobs)
    remaining = iter(spans)
    for opening in remaining:
        if opening["author"] != "environment":
            raise ValueError("a turn begins with a span of the policy")
        observation = ObservationTokens(token_ids=_take(ids, opening["length"]))
        yield observation, _action(remaining, ids, scores)
    if next(scores, None) is not None:
        raise ValueError("there are more logprobs than scored ids")


def _action(spans: Iterator[Row], ids: Iterator[int], logprobs: Iterator[float]) -> ActionTokens:
    versions: list[int] = []
    for span in spans:
        if span["author"] != "policy":
            break
        versions += [span["version"]] * span["length"]
        if span["finish"] is not None:
            return ActionTokens(
                token_ids=_take(ids, len(versions)),
                logprobs=_take(logprobs, len(versions)) if span["scored"] else None,
                versions=tuple(versions),
                finish=span["finish"],
            )
    raise ValueError("an action has no end")


def _take(source: Iterator[Any], count: int) -> tuple[Any, ...]:
    taken = tuple(islice(source, count))
    if len(taken) != count:
        raise ValueError(f"{count} entries wanted, {len(taken)} are there")
    return taken


def _messages(rows: Iterable[Row]) -> Messages:
    return tuple(_message(row) for row in rows)


def _message(row: Row) -> Message:
    fields: Row = row | {"tool_calls": tuple(ToolCall(**call) for call in row["tool_calls"])}
    return Message(**fields)


def _verdict(row: Mapping[str, Any]) -> Verdict:
    return Verdict(
        reward=row["reward"],
        invalid=row["invalid"],
        passed=row["passed"],
        components=_mapping(row["components"]),
        step_rewards=tuple(row["step_rewards"]),
        note=row["note"],
    )
