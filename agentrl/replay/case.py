"""A saved trajectory as a test: one file of pytest, and the record beside it."""

from dataclasses import replace
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.replay.records import Recorded, Records
from agentrl.store import Redactor, write_file

_TEST = '''"""Replays {what}."""

from pathlib import Path

from agentrl.rebuild import assert_replays


def test_{name}() -> None:
    assert_replays(Path(__file__).with_suffix(".parquet"))
'''


def save_case(records: Records, one: Recorded, path: Path) -> tuple[Path, Path]:
    """Write `path` (test_….py) and the record beside it (.parquet); returns both.

    The record holds the configuration, so that the test needs nothing of the run. Raises
    ConfigError for a name that pytest would not collect, or a file that is there already.
    """
    if path.suffix != ".py" or not path.stem.startswith("test_") or not path.stem.isidentifier():
        raise ConfigError(f"{path}: name a test file, such as tests/test_replayed.py")
    record = path.with_suffix(".parquet")
    for file in (path, record):
        if file.exists():
            raise ConfigError(f"{file} is there already: choose another name")
    group = one.group
    alone = replace(
        group,
        trajectories=(one.trajectory,),
        verdicts=(one.verdict,),
        artifacts=group.artifacts[one.place : one.place + 1],
        faults=(),
    )
    facts = {**records.facts(one.step), "config": records.config().model_dump_json()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(record, [alone], facts, Redactor(()))
    text = _TEST.format(what=f"{one.name} of {records.source.name}", name=path.stem[5:])
    path.write_text(text, encoding="utf-8")
    return path, record
