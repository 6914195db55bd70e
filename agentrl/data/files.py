"""Problems from files, with the names of their fields given by the configuration."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Annotated, Any, cast

from pydantic import Field

from agentrl.data.rows import Row, read_rows
from agentrl.protocols import Split
from agentrl.tools import problem
from agentrl.types import Message, Messages, Problem, Role, system, user

_FIELD = re.compile(r"\{([\w.]+)\}")
_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
Share = Annotated[float, Field(ge=0, le=1)]


def from_files(
    split: Split,
    *,
    train: str,
    test: str = "",
    test_share: Share = 0.1,
    prompt: str = "prompt",
    reference: str = "reference",
    id: str = "",
    family: str = "",
    setup: Sequence[str] = (),
    system_prompt: str = "",
    pass_rate: str = "",
    pass_band: tuple[Share, Share] = (0.0, 1.0),
    deduplicate: bool = True,
) -> Iterator[Problem]:
    """The `problems` of an environment, from files: its parameters are the environment's options.

    `train` and `test` are files (.jsonl, .json, .csv, .parquet) or `hub:NAME[:SPLIT]`; without
    `test`, a share of `train` is, by the hash of each prompt. `prompt` is a field (a text or a list
    of messages) or a text with fields in braces; `reference`, `id` and `family` are fields, as are
    those that go to the task's `setup`. Training mostly passes over problems whose last pass rate
    lies outside `pass_band`; with `pass_rate`, a field with a share of passes that was measured
    before, it leaves such rows out altogether. Rows that repeat a prompt, and training prompts that
    are in the test split, are left out with a warning.

    Raises ValueError naming the row.
    """
    low, high = pass_band
    seen: set[str] = set()
    held_out = {_key(_prompt(row, prompt)) for row in read_rows(test)} if test else set[str]()
    repeated, leaked = list[str](), list[str]()
    for row in read_rows(test if test and split == "test" else train):
        messages = _prompt(row, prompt)
        key = _key(messages)
        if deduplicate and key in seen:
            repeated.append(row.name)
        elif test and split == "train" and key in held_out:
            leaked.append(row.name)
        elif test or _is_test(key, test_share) == (split == "test"):
            seen.add(key)
            if split == "test" or not pass_rate or low <= _share(row, pass_rate) <= high:
                opening = (system(system_prompt),) if system_prompt else ()
                made = problem(
                    (*opening, *messages),
                    _reference(row, reference),
                    id=str(row.get(id)) if id else row.name,
                    setup={name: row.get(name) for name in setup},
                )
                kind = str(row.get(family)) if family else ""
                yield replace(made, task=replace(made.task, family=kind), pass_band=pass_band)
    _warn(repeated, "repeat the prompt of another row")
    _warn(leaked, "have a prompt of the test split")


def _prompt(row: Row, prompt: str) -> Messages:
    """A field's text or messages, or a text with fields in it."""
    if "{" in prompt:
        return (user(_FIELD.sub(lambda found: _text(row, found[1]), prompt)),)
    value = row.get(prompt)
    if isinstance(value, list):
        return tuple(_message(row, one) for one in cast(list[Any], value))
    return (user(_text(row, prompt)),)


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"{row.name}: {field} is empty")
    return value if isinstance(value, str) else str(value)


def _message(row: Row, value: Any) -> Message:
    known = isinstance(value, Mapping) and value.get("role") in _ROLES
    if not known or not isinstance(value.get("content"), str):
        raise ValueError(f"{row.name}: a message needs a role ({', '.join(_ROLES)}) and a content")
    return Message(role=value["role"], content=value["content"])


def _reference(row: Row, field: str) -> Any:
    if not field:
        return None
    value = row.get(field)
    if value is None or value == "":
        raise ValueError(f"{row.name}: {field} is empty, so no answer could pass")
    return value


def _share(row: Row, field: str) -> float:
    try:
        share = float(row.get(field))
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{row.name}: {field} must be a share of passes, from 0 to 1")
    return share


def _key(messages: Messages) -> str:
    """What two prompts that say the same have in common: case and blanks aside."""
    text = "\0".join(f"{m.role}\0{' '.join(m.content.casefold().split())}" for m in messages)
    return sha256(text.encode(errors="surrogatepass")).hexdigest()


def _is_test(key: str, share: float) -> bool:
    return int(key[:8], 16) < share * 2**32


def _warn(names: Sequence[str], what: str) -> None:
    if names:
        shown = ", ".join(names[:5]) + ("…" if len(names) > 5 else "")
        warnings.warn(f"left out: {len(names)} rows {what} ({shown})", stacklevel=3)
