"""A trajectory as people read it: who wrote what, turn by turn, and what it was worth.

What the model or a tool wrote is only ever data here: control characters are written out, and
every line of it carries its author's mark, so text can neither steer the terminal nor pose as
someone else's.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentrl.lesson import Lesson
from agentrl.types import ActionTokens, Group, Message, Task, Trajectory, Turn, Verdict

if TYPE_CHECKING:
    from rich.console import Console

Decode = Callable[[Sequence[int]], str]
WHOLE_FILE_BYTES = 4096
"""Of a file that the verifier saw, so much is shown."""


class Ink(StrEnum):
    """Who or what a line comes from."""

    HEAD = "head"
    OBSERVATION = "observation"
    MODEL = "model"
    FACT = "fact"
    BAD = "bad"


STYLES: Mapping[Ink, str] = {
    Ink.HEAD: "bold",
    Ink.OBSERVATION: "cyan",
    Ink.MODEL: "bold green",
    Ink.FACT: "dim",
    Ink.BAD: "red",
}
MARKS: Mapping[Ink, str] = {
    Ink.HEAD: "",
    Ink.OBSERVATION: "  < ",
    Ink.MODEL: "  > ",
    Ink.FACT: "  . ",
    Ink.BAD: "  ! ",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One printable line; `str` gives it with its mark, which says the same as the colour."""

    ink: Ink
    text: str

    def __str__(self) -> str:
        return f"{MARKS[self.ink]}{self.text}"


def print_lines(console: "Console", lines: Iterable[Line], *, plain: bool = False) -> None:
    """Print lines in their colours; `plain`: by their marks alone."""
    from rich.text import Text

    for line in lines:
        style = "" if plain else STYLES[line.ink]
        console.print(Text(str(line), style=style), soft_wrap=True)


def describe(
    group: Group,
    *,
    decode: Decode | None = None,
    member: int | None = None,
    lessons: Mapping[str, Lesson] = MappingProxyType({}),
    facts: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Line]:
    """The lines of a group: exact tokens where `decode` is given, else the parsed messages.

    `lessons` has, by trajectory id, what the learner made of it; `facts` is what was stored beside
    the step.
    """
    chosen = [
        (trajectory, verdict)
        for trajectory, verdict in zip(group.trajectories, group.verdicts, strict=True)
        if member in (None, trajectory.member)
    ]
    yield from _lines(Ink.HEAD, f"task {group.task_id}")
    for name, value in sandbox_of(group.task, facts).items():
        text = json.dumps(value) if isinstance(value, dict | list) else str(value)
        yield from _lines(Ink.FACT, f"sandbox {name}: {text}")
    for trajectory, verdict in chosen:
        yield from _trajectory(trajectory, verdict, decode)
        place = group.trajectories.index(trajectory)
        for name, data in sorted((group.artifacts[place] or {}).items()) if group.artifacts else ():
            yield from _artifact(name, data)
        if trajectory.id in lessons:
            yield from _lesson(lessons[trajectory.id])
    for fault in group.faults:
        yield from _lines(Ink.BAD, f"a member was lost: {fault}")


def record(value: Any) -> Any:
    """Any record as plain JSON values."""
    if is_dataclass(value):
        return {field.name: record(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, Mapping):
        return {str(name): record(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [record(part) for part in value]
    return value


def printable(text: str) -> str:
    """The text with control characters written out (newlines too)."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def find_decode(run: Path, facts: Mapping[str, str]) -> Decode | None:
    """How to turn a run's ids into text, if its tokenizer is at hand.

    Looks at the checkpoints, the warm start and the model folder. `facts` are what was stored
    beside the trajectories: a tokenizer of another vocabulary is not used.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    for path in _tokenizer_files(run):
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception:  # the library raises bare Exception for a file it can't read
            continue
        vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
        found = hashlib.sha256(repr(vocabulary).encode()).hexdigest()
        if facts.get("tokenizer_sha256", found) == found:
            return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
    return None


def _tokenizer_files(run: Path) -> Iterator[Path]:
    checkpoints = sorted(run.glob("checkpoints/step-*"), reverse=True)
    folders = [*checkpoints, run / "warm_start", *_model_folder(run / "config.yaml")]
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            yield folder / "tokenizer.json"


def _model_folder(config: Path) -> list[Path]:
    import yaml

    try:
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
        return [Path(str(tree["model"]["path"]))]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return []


def _trajectory(trajectory: Trajectory, verdict: Verdict, decode: Decode | None) -> Iterator[Line]:
    yield from _lines(
        Ink.HEAD,
        f"member {trajectory.member} · {_worth(verdict)} · {trajectory.ending} · seed "
        f"{trajectory.seed} · {len(trajectory.turns)} turns · {trajectory.action_tokens} of "
        f"{len(trajectory.token_ids)} tokens sampled",
    )
    if decode is None:
        for message in trajectory.prompt:
            yield from _message(Ink.OBSERVATION, message)
    for number, turn in enumerate(trajectory.turns):
        yield from _turn(number, turn, decode)
        for event in trajectory.events:
            if event.turn == number:
                cut = ", cut" if event.cut else ""
                left = "" if event.exit_code is None else f", exit {event.exit_code}"
                text = f"tool {event.name or '?'}: {event.status}{left}, {event.output_bytes} bytes"
                times = f"at {event.at_s:.3f} s for {event.seconds:.3f} s"
                yield from _lines(Ink.FACT, f"{text}{cut}, {times}")
    if decode is not None and trajectory.turns:
        # The last reply was never rendered for the model, so no token stands for it.
        for message in trajectory.turns[-1].reply:
            yield from _message(Ink.OBSERVATION, message)
    yield from _verdict(verdict)


def sandbox_of(task: Task | None, facts: Mapping[str, str]) -> dict[str, Any]:
    """What is known of a task's sandbox: backend, limits, and the files it began with."""
    spec = None if task is None else task.sandbox
    if spec is None:
        return {}
    try:
        found = json.loads(facts.get("sandbox") or "{}")
    except ValueError:
        found = {}
    used: dict[str, Any] = found if isinstance(found, dict) else {}
    files = {name: f"{len(data)} bytes" for name, data in spec.files.items()}
    return used | record(replace(spec, files={})) | {"files": files}


def _artifact(name: str, data: bytes) -> Iterator[Line]:
    """A file that the verifier saw: its size and its beginning."""
    cut = ", the first of them:" if len(data) > WHOLE_FILE_BYTES else ""
    yield from _lines(Ink.FACT, f"file {name}, {len(data)} bytes{cut}")
    shown = data[:WHOLE_FILE_BYTES].decode(errors="backslashreplace")
    yield from _lines(Ink.OBSERVATION, shown)


def _turn(number: int, turn: Turn, decode: Decode | None) -> Iterator[Line]:
    seen, action = turn.observation.token_ids, turn.action
    head = f"turn {number} · {len(seen)} observation tokens, {len(action.token_ids)} model tokens"
    yield from _lines(Ink.FACT, f"{head} · {_sampled(action)}")
    if decode is not None:
        yield from _lines(Ink.OBSERVATION, decode(seen))
        yield from _lines(Ink.MODEL, decode(action.token_ids))
        for call in turn.message.tool_calls:
            wrong = f" ({call.error})" if call.error else ""
            yield from _lines(Ink.FACT, f"call {call.name or '?'}({call.arguments}){wrong}")
        return
    yield from _message(Ink.MODEL, turn.message)
    for message in turn.reply:
        yield from _message(Ink.OBSERVATION, message)


def _sampled(action: ActionTokens) -> str:
    low, high = min(action.versions), max(action.versions)
    version = f"version {low}" if low == high else f"versions {low} to {high}"
    if action.logprobs is None:
        return f"{version}, {action.finish}, no logprobs"
    mean = sum(action.logprobs) / len(action.logprobs)
    return f"{version}, {action.finish}, logprob {mean:.3f} (least {min(action.logprobs):.3f})"


def _message(ink: Ink, message: Message) -> Iterator[Line]:
    thought = f"<think>{message.reasoning}</think>" if message.reasoning else ""
    yield from _lines(ink, f"{message.role}: {thought}{message.content}")
    for call in message.tool_calls:
        wrong = f" ({call.error})" if call.error else ""
        yield from _lines(ink, f"call {call.name or '?'}({call.arguments}){wrong}")


def _verdict(verdict: Verdict) -> Iterator[Line]:
    parts = [_worth(verdict)]
    parts += [f"{name} {value:g}" for name, value in verdict.components.items()]
    if verdict.step_rewards:
        parts.append(f"steps {json.dumps(list(verdict.step_rewards))}")
    parts += [verdict.note] if verdict.note else []
    yield from _lines(Ink.BAD if verdict.invalid else Ink.FACT, f"verdict: {', '.join(parts)}")


def _lesson(lesson: Lesson) -> Iterator[Line]:
    if lesson.silent is not None:
        yield from _lines(Ink.FACT, f"no gradient: {lesson.silent}")
        return
    advantages = ", ".join(f"{value:.4g}" for value in lesson.advantages)
    text = f"learned from: {lesson.trained_tokens} tokens, advantage by turn {advantages}"
    yield from _lines(Ink.FACT, text)


def _worth(verdict: Verdict) -> str:
    if verdict.reward is None:
        return f"invalid ({verdict.invalid})"
    return f"reward {verdict.reward:g}, {'passed' if verdict.passed else 'not passed'}"


def _lines(ink: Ink, text: str) -> Iterator[Line]:
    """The text as marked lines: every line of it shows who wrote it."""
    for part in text.split("\n"):
        yield Line(ink, printable(part))
