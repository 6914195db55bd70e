"""What the page shows of a run, a group and a trajectory, as plain JSON values."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentrl.errors import RecordError
from agentrl.lesson import Lesson
from agentrl.metrics import read_metrics
from agentrl.replay.diff import TurnDiff, diff
from agentrl.replay.records import Recorded
from agentrl.show import WHOLE_FILE_BYTES, Decode, find_decode, record, sandbox_of
from agentrl.store import read_facts, read_group
from agentrl.types import Group, Messages, Turn
from agentrl.viewer.rows import Rows

_CURVE_POINTS = 1000
_CHARACTER_IDS = 6
"""Ids that may together spell one character of UTF-8 (4 bytes), with room for odd tokenizers."""


Read = TypeVar("Read")


class _Latest(Generic[Read]):
    """What was read last: pages and exports ask for the same again and again."""

    def __init__(self) -> None:
        self._kept: tuple[object, Read] | None = None

    def get(self, key: object, read: Callable[[], Read]) -> Read:
        """What was kept under `key`, else what `read` gives."""
        kept = self._kept
        if kept is None or kept[0] != key:
            kept = self._kept = key, read()
        return kept[1]


class Details:
    """A run directory, finished or not, or a folder of step files.

    Raises RecordError for anything else.
    """

    def __init__(self, source: Path) -> None:
        folder = source / "trajectories"
        is_run = folder.is_dir() or (source / "config.yaml").is_file()
        self.rows = Rows(folder if is_run else source)
        self.run = source if is_run else source.parent
        if not is_run and not self.rows.steps():
            raise RecordError(f"{source} is neither a run directory nor a folder of step files")
        self._name = source.resolve().name
        self._decoder: Decode | None = None
        self._group = _Latest[Group]()
        self._taught = _Latest[Sequence[Lesson]]()

    def overview(self) -> dict[str, Any]:
        """The run itself: its steps, metrics, configuration and what it was made of."""
        provenance = _text(self.run / "provenance.json")
        return {
            "name": self._name,
            "steps": self.rows.steps(),
            "metrics": _spaced(read_metrics(self.run / "metrics.jsonl")),
            "config": _text(self.run / "config.yaml"),
            "provenance": _json(provenance),
        }

    def group(self, step: int, number: int) -> dict[str, Any]:
        """A group side by side: its task, and for each member what it said and was worth."""
        group = self.recorded(step, number)
        lessons = self._lessons(step, number)
        return {
            "step": step,
            "number": number,
            "task_id": group.task_id,
            "task": record(group.task),
            "faults": group.faults,
            "members": [
                {
                    "place": place,
                    "member": trajectory.member,
                    "ending": trajectory.ending.value,
                    "verdict": record(verdict),
                    "lesson": record(lessons.get(trajectory.id)),
                    "turns": [_said(turn) for turn in trajectory.turns],
                }
                for place, (trajectory, verdict) in enumerate(
                    zip(group.trajectories, group.verdicts, strict=True)
                )
            ],
        }

    def trajectory(self, step: int, number: int, place: int) -> dict[str, Any]:
        """One trajectory with every token: its text, id, author, and logprob if it was sampled."""
        one = self.episode(step, number, place)
        trajectory = one.trajectory
        lesson = self._lessons(step, number).get(trajectory.id)
        shown, decode = trajectory.prompt, self._decode(step)
        turns: list[dict[str, Any]] = []
        for turn in trajectory.turns:
            turns.append(_said(turn) | _strip(turn, shown, decode))
            shown = turn.reply
        return {
            "step": step,
            "number": number,
            "id": trajectory.id,
            "task_id": trajectory.task_id,
            "member": trajectory.member,
            "count": len(one.group.trajectories),
            "seed": trajectory.seed,
            "ending": trajectory.ending.value,
            "prompt": record(trajectory.prompt),
            "turns": turns,
            "events": record(trajectory.events),
            "metrics": record(trajectory.metrics),
            "verdict": record(one.verdict),
            "lesson": record(lesson),
            "sandbox": self._sandbox(one),
            "artifacts": [_file(*named) for named in sorted((one.artifacts or {}).items())],
            "exact": decode is not None,
        }

    def difference(self, step: int, number: int, left: int, right: int) -> dict[str, Any]:
        """Where two members part; what they said is in their `group`."""
        one, other = (self.episode(step, number, place) for place in (left, right))
        found = diff(one.trajectory, other.trajectory)
        return {"parts_at": found.parts_at, "turns": [_parting(turn) for turn in found.turns]}

    def recorded(self, step: int, number: int) -> Group:
        """The group as it was stored. Raises RecordError."""
        path = self.rows.store.path(step)
        return self._group.get((number, _state(path)), lambda: read_group(path, number))

    def episode(self, step: int, number: int, place: int) -> Recorded:
        """One trajectory of a group: a member, or a part of its talk. Raises RecordError."""
        group = self.recorded(step, number)
        if not 0 <= place < len(group.trajectories):
            raise RecordError(f"group {number} of step {step} has no trajectory {place}")
        return Recorded(step=step, number=number, group=group, place=place)

    def _decode(self, step: int) -> Decode | None:
        """The tokenizer is looked for until there is one: a run may write it while it is viewed."""
        if self._decoder is None:
            self._decoder = find_decode(self.run, self._facts(step))
        return self._decoder

    def _facts(self, step: int) -> Mapping[str, str]:
        return read_facts(self.rows.store.path(step))

    def _lessons(self, step: int, number: int) -> dict[str, Lesson]:
        state = _state(self.rows.store.lessons_path(step))
        lessons = self._taught.get(state, lambda: self._lessons_of_step(step))
        return {one.trajectory_id: one for one in lessons if one.group == number}

    def _lessons_of_step(self, step: int) -> Sequence[Lesson]:
        try:
            return self.rows.store.lessons(step)[0]
        except RecordError:
            return ()

    def _sandbox(self, one: Recorded) -> dict[str, Any]:
        return sandbox_of(one.task, self._facts(one.step))


def _spaced(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each kind no more rows than a curve can show, evenly spaced, with the last."""
    kept: list[Mapping[str, Any]] = []
    for kind in ("step", "eval"):
        some = [row for row in rows if row["kind"] == kind]
        stride = -(-len(some) // _CURVE_POINTS) or 1
        kept += some[(len(some) - 1) % stride :: stride]
    return kept


def _parting(turn: TurnDiff) -> dict[str, Any]:
    return {
        "turn": turn.turn,
        "same_observation": turn.same_observation,
        "token": turn.token,
        "logprobs": turn.logprobs,
    }


def _strip(turn: Turn, shown: Messages, decode: Decode | None) -> dict[str, Any]:
    seen, action = turn.observation.token_ids, turn.action
    before = list(_pieces(seen, decode))
    return {
        "seen": {
            "ids": seen,
            "texts": before,
            "scaffold": list(_scaffold(before, [message.content for message in shown])),
        },
        "action": {
            "ids": action.token_ids,
            "texts": list(_pieces(action.token_ids, decode)),
            "logprobs": action.logprobs,
            "versions": sorted(set(action.versions)),
            "finish": action.finish,
        },
    }


def _said(turn: Turn) -> dict[str, Any]:
    return {
        "message": record(turn.message),
        "reply": record(turn.reply),
        "reward": turn.reward,
        "sampled": len(turn.action.token_ids),
    }


def _pieces(ids: Sequence[int], decode: Decode | None) -> Iterator[str]:
    """The text of each id. Of several that spell one character, the first has it, the rest ""."""
    if decode is None:
        yield from (f" {number}" for number in ids)
        return
    place = 0
    while place < len(ids):
        text, size = decode(ids[place : place + 1]), 1
        while "\ufffd" in text and size < _CHARACTER_IDS and place + size < len(ids):
            size += 1
            text = decode(ids[place : place + size])
        if "\ufffd" in text:
            text, size = decode(ids[place : place + 1]), 1
        yield text
        yield from ("" for _ in range(size - 1))
        place += size


def _scaffold(texts: Sequence[str], contents: Sequence[str]) -> Iterator[bool]:
    """Which tokens of an observation lie outside the contents of what was shown: the template's.

    Told by looking for the contents, in order, in the text of the tokens; what the template
    changed is not found and counts as the template's.
    """
    whole, spans, at = "".join(texts), list[tuple[int, int]](), 0
    for content in contents:
        found = whole.find(content.strip(), at) if content.strip() else -1
        if found >= 0:
            at = found + len(content.strip())
            spans.append((found, at))
    begin = 0
    remaining = iter([*spans, (len(whole) + 1, len(whole) + 1)])
    span = next(remaining)
    for text in texts:
        end = begin + len(text)
        while span[1] <= begin:
            span = next(remaining)
        yield end <= span[0]
        begin = end


def _file(name: str, data: bytes) -> dict[str, Any]:
    shown = data[:WHOLE_FILE_BYTES].decode(errors="backslashreplace")
    return {"name": name, "bytes": len(data), "text": shown, "cut": len(data) > WHOLE_FILE_BYTES}


def _state(path: Path) -> object:
    return path, path.stat().st_mtime_ns if path.exists() else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
