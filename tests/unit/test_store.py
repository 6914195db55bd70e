"""Records: what goes in comes out, nothing secret goes in, and a bad file is named."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentrl.errors import RecordError
from agentrl.lesson import Lesson
from agentrl.rollout import Stage, run_group
from agentrl.store import ParquetStore, secret_values
from agentrl.store.footer import SEAL, UNSEALED, seal
from agentrl.store.redaction import REDACTED, REDACTED_ID, Redactor
from agentrl.testing.fakes import (
    CharRenderer,
    FakeEnvironment,
    FakeVerifier,
    FixedEngine,
    a_problem,
    echo,
)
from agentrl.types import (
    ActionTokens,
    Ending,
    Group,
    Message,
    ObservationTokens,
    SandboxSpec,
    Task,
    ToolCall,
    ToolEvent,
    Trajectory,
    Turn,
    Verdict,
)

GOLDEN = Path(__file__).parents[1] / "golden"

# ---------------------------------------------------------------- arbitrary groups

TEXT = st.text(max_size=12)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6).map(tuple)
SMALL = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)
MAYBE_TEXT = st.none() | TEXT
CALLS = st.builds(ToolCall, id=TEXT, name=TEXT, arguments=TEXT, error=MAYBE_TEXT)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=TEXT,
    reasoning=TEXT,
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    tool_call_id=MAYBE_TEXT,
)
EVENTS = st.builds(
    ToolEvent,
    turn=SMALL,
    call_id=TEXT,
    name=TEXT,
    status=st.sampled_from(["ok", "error", "malformed", "unknown", "timeout"]),
    at_s=FLOATS,
    seconds=FLOATS,
    output_bytes=st.integers(0, 2**40),
    cut=st.booleans(),
    exit_code=st.none() | st.integers(-255, 255),
)
NUMBERS = st.dictionaries(TEXT, FLOATS, max_size=2)


@st.composite
def actions(draw: st.DrawFn) -> ActionTokens:
    ids = draw(IDS)
    many = {"min_size": len(ids), "max_size": len(ids)}
    return ActionTokens(
        token_ids=ids,
        logprobs=draw(st.none() | st.lists(LOGPROBS, **many).map(tuple)),
        versions=tuple(draw(st.lists(st.integers(-1, 3), **many))),
        finish=draw(st.sampled_from(["stop", "length", "abort"])),
    )


TURNS = st.builds(
    Turn,
    observation=st.builds(ObservationTokens, token_ids=IDS),
    action=actions(),
    message=MESSAGES,
    reply=st.lists(MESSAGES, max_size=2).map(tuple),
    reward=FLOATS,
    seen=st.sampled_from(["", "0123456789abcdef"]),
)
PATHS = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5)
FILES = st.dictionaries(PATHS, st.binary(max_size=9), max_size=2)
SPECS = st.builds(
    SandboxSpec,
    image=TEXT,
    files=FILES,
    snapshot=st.binary(max_size=9),
    memory_mb=st.integers(1, 4096),
    cpus=st.floats(0.1, 64),
    egress=st.lists(TEXT, max_size=2).map(tuple),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    task_id = draw(TEXT)
    size = draw(st.integers(0, 3))
    trajectories = st.builds(
        Trajectory,
        id=TEXT,
        task_id=st.just(task_id),
        member=SMALL,
        seed=st.integers(0, 2**63 - 1),
        prompt=st.lists(MESSAGES, max_size=2).map(tuple),
        turns=st.lists(TURNS, max_size=3).map(tuple),
        ending=st.sampled_from(Ending),
        events=st.lists(EVENTS, max_size=2).map(tuple),
        metrics=NUMBERS,
    )
    parts = {
        "passed": st.booleans(),
        "components": NUMBERS,
        "step_rewards": st.lists(FLOATS, max_size=2).map(tuple),
        "note": TEXT,
    }
    verdicts = st.builds(Verdict, reward=FLOATS, **parts) | st.builds(
        Verdict, invalid=TEXT, **parts
    )
    task = st.builds(
        Task,
        id=st.just(task_id or "t"),
        prompt=st.lists(MESSAGES, max_size=2).map(tuple),
        sandbox=st.none() | SPECS,
        artifacts=st.lists(PATHS, max_size=2).map(tuple),
        setup=st.dictionaries(TEXT, JSON, max_size=2),
    )
    return Group(
        task_id=task_id,
        trajectories=tuple(replace(draw(trajectories), member=n) for n in range(size)),
        verdicts=tuple(draw(verdicts) for _ in range(size)),
        faults=tuple(draw(st.lists(TEXT, max_size=2))),
        task=draw(st.none() | task),
        artifacts=draw(st.just(()) | st.lists(FILES, min_size=size, max_size=size).map(tuple)),
    )


@given(st.lists(groups(), max_size=4))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_goes_in_comes_out(tmp_path: Path, written: list[Group]) -> None:
    store = ParquetStore(tmp_path, secrets=())
    store.append(written, version=0)
    read = list(store.read(version=0))
    assert read == written
    for before, after in zip(written, read, strict=True):
        for a, b in zip(before.trajectories, after.trajectories, strict=True):
            assert (a.token_ids, a.action_mask, a.versions) == (
                b.token_ids,
                b.action_mask,
                b.versions,
            )


# ---------------------------------------------------------------- plain groups


def action(*ids: int, version: int = 0, logprob: float = -0.5) -> ActionTokens:
    return ActionTokens(
        token_ids=ids,
        logprobs=(logprob,) * len(ids),
        versions=(version,) * len(ids),
        finish="stop",
    )


def a_group(
    task_id: str = "t", *, size: int = 2, ids: int = 3, text: str = "hi", note: str = ""
) -> Group:
    turn = Turn(
        observation=ObservationTokens(token_ids=tuple(range(ids))),
        action=action(*range(ids)),
        message=Message(role="assistant", content=text),
        reply=(Message(role="tool", content=text, tool_call_id="call_0"),),
    )
    members = tuple(
        Trajectory(
            id=f"{task_id}/{member}",
            task_id=task_id,
            member=member,
            seed=5,
            prompt=(Message(role="user", content=text),),
            turns=(turn, turn),
            ending=Ending.ANSWERED,
        )
        for member in range(size)
    )
    verdicts = tuple(Verdict(reward=float(m), note=note) for m in range(size))
    return Group(task_id=task_id, trajectories=members, verdicts=verdicts)


def only(folder: Path) -> Path:
    (path,) = folder.glob("step-*.parquet")
    return path


async def test_real_episodes_come_back(tmp_path: Path) -> None:
    stage = Stage(
        engine=FixedEngine('@f {"x": 1}', "@g nonsense", "done", version=4),
        renderer=CharRenderer(),
        environment=FakeEnvironment(answer=echo, verifier=FakeVerifier(rate=lambda *_: 0.25)),
    )
    group = await run_group(stage, a_problem("Größe? 🙂"), size=3, seed=2**40)
    store = ParquetStore(tmp_path)
    store.append([group], version=4)
    (read,) = store.read(version=4)
    assert read == group
    assert read.trajectories[0].behavior_logprobs == group.trajectories[0].behavior_logprobs


def test_steps_are_read_in_order_and_alone(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path)
    for version in (10, 2, 0):
        store.append([a_group(f"a{version}"), a_group(f"b{version}")], version=version)
    assert store.versions() == [0, 2, 10]
    assert [g.task_id for g in store.read()] == ["a0", "b0", "a2", "b2", "a10", "b10"]
    assert [g.task_id for g in store.read(version=2)] == ["a2", "b2"]


def test_neighbouring_groups_of_one_task_stay_apart(tmp_path: Path) -> None:
    written = [a_group("same", size=2), a_group("same", size=1), a_group("same", size=0)]
    ParquetStore(tmp_path).append(written, version=0)
    assert list(ParquetStore(tmp_path).read()) == written


def test_group_larger_than_a_reading_batch_is_one_group(tmp_path: Path) -> None:
    written = [a_group("a", size=50), a_group("b", size=7)]
    ParquetStore(tmp_path).append(written, version=0)
    assert list(ParquetStore(tmp_path).read()) == written


def test_step_taken_again_replaces_the_first(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path)
    store.append([a_group("old")], version=3)
    store.append([a_group("new")], version=3)
    assert [g.task_id for g in store.read()] == ["new"]


def test_action_over_two_policy_versions_keeps_both(tmp_path: Path) -> None:
    group = a_group(size=1)
    mixed = ActionTokens(token_ids=(1, 2, 3), logprobs=None, versions=(4, 4, 5), finish="length")
    turn = replace(group.trajectories[0].turns[0], action=mixed)
    group = replace(group, trajectories=(replace(group.trajectories[0], turns=(turn, turn)),))
    ParquetStore(tmp_path).append([group], version=5)
    assert list(ParquetStore(tmp_path).read()) == [group]
    spans = pq.read_table(only(tmp_path))["spans"].to_pylist()[0]
    assert [(s["author"], s["length"], s["version"], s["finish"]) for s in spans[:3]] == [
        ("environment", 3, None, None),
        ("policy", 2, 4, None),
        ("policy", 1, 5, "length"),
    ]


def test_logprobs_are_float32_of_sampled_tokens_only(tmp_path: Path) -> None:
    group = a_group(size=1, ids=7)
    ParquetStore(tmp_path).append([group], version=0)
    table = pq.read_table(only(tmp_path))
    assert table.schema.field("logprobs").type == pa.list_(pa.float32())
    assert len(table["logprobs"][0]) == group.trajectories[0].action_tokens == 14
    assert len(table["token_ids"][0]) == 28


def test_double_logprobs_are_rounded_to_float32(tmp_path: Path) -> None:
    group = a_group(size=1)
    turn = replace(group.trajectories[0].turns[0], action=action(1, 2, logprob=-0.1))
    group = replace(group, trajectories=(replace(group.trajectories[0], turns=(turn,)),))
    ParquetStore(tmp_path).append([group], version=0)
    (read,) = ParquetStore(tmp_path).read()
    (rounded,) = struct.unpack("f", struct.pack("f", -0.1))
    assert read.trajectories[0].turns[0].action.logprobs == (rounded, rounded)


def test_pandas_reads_it(tmp_path: Path) -> None:
    ParquetStore(tmp_path, metadata={"tokenizer_sha256": "ab"}).append(
        [a_group("x"), Group(task_id="lost", trajectories=(), verdicts=(), faults=("E: 1",))],
        version=0,
    )
    frame = pd.read_parquet(only(tmp_path))
    assert list(frame.task_id) == ["x", "x", "lost"]
    assert frame.reward.mean() == 0.5
    assert list(frame.token_ids[0]) == [0, 1, 2] * 4
    assert frame.ending[0] == "answered" and frame.id.isna()[2]


def test_duckdb_and_datasets_read_it(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path / "trajectories")
    for version in range(2):
        group = replace(a_group(f"t{version}"), artifacts=({"a": b"1"},) * 2)
        store.append([group], version=version)
    store.append_lessons([], {}, version=1)
    files = str(tmp_path / "trajectories" / "step-*.parquet")
    duckdb = pytest.importorskip("duckdb")
    query = f"select task_id, avg(reward), sum(len(token_ids)) from '{files}' group by 1 order by 1"
    assert duckdb.sql(query).fetchall() == [("t0", 0.5, 24), ("t1", 0.5, 24)]
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert rows["task_id"] == ["t0", "t0", "t1", "t1"] and len(rows[0]["token_ids"]) == 12


def test_metadata_is_kept_beside_the_step(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path, metadata={"tokenizer_sha256": "ab", "template_sha256": "cd"})
    store.append([a_group()], version=1)
    facts = store.metadata(1)
    assert facts["tokenizer_sha256"] == "ab" and facts["template_sha256"] == "cd"
    with pytest.raises(RecordError, match="does not exist"):
        store.metadata(2)


# ---------------------------------------------------------------- size and memory


def test_records_are_small(tmp_path: Path) -> None:
    tokens = 50_000
    ids = tuple((7 * i * i) % 5_000 for i in range(tokens))
    group = a_group(size=1)
    turn = replace(
        group.trajectories[0].turns[0],
        observation=ObservationTokens(token_ids=ids[: tokens // 2]),
        action=action(*ids[tokens // 2 :]),
    )
    group = replace(group, trajectories=(replace(group.trajectories[0], turns=(turn,)),))
    ParquetStore(tmp_path).append([group], version=0)
    assert only(tmp_path).stat().st_size / tokens < 6


def test_reading_holds_one_group_at_a_time(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path)
    for version in range(2):
        many = [a_group(f"{version}.{i}", size=4, ids=500) for i in range(100)]
        store.append(many, version=version)
    ids = 2 * 100 * 4 * 2000
    list(store.read(version=0))  # first use loads modules
    tracemalloc.start()
    try:
        total = sum(len(t.token_ids) for group in store.read() for t in group.trajectories)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == ids
    assert peak_bytes < 8 * ids / 4  # a tuple of all ids alone would hold 8 bytes each
    assert pa.total_allocated_bytes() < 50_000_000


# ---------------------------------------------------------------- secrets and references


def test_secrets_of_the_environment_never_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        "SERVICE_API_KEY": "sk-live-0123456789",
        "HF_TOKEN": "hf_abcdefghijkl",
        "DB_PASSWORD": 'pa"ss\\word\n1',
        "PROXY_URL": "https://user:hunter2hunter2@proxy.local/x",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    spoken = " and ".join(secrets.values())
    raw = ToolCall(id="c", name="f", arguments=json.dumps({"a": spoken}), error=spoken)
    group = a_group(text=spoken, note=spoken)
    said = Message(role="assistant", content="", reasoning=spoken, tool_calls=(raw,))
    turns = tuple(replace(t, message=said) for t in group.trajectories[0].turns)
    group = replace(
        group,
        trajectories=(replace(group.trajectories[0], turns=turns), group.trajectories[1]),
        faults=(f"SandboxFault: {spoken}",),
    )
    ParquetStore(tmp_path, metadata={"note": spoken}).append([group], version=0)
    rows = repr(pq.read_table(only(tmp_path)).to_pylist())
    facts = repr(pq.read_schema(only(tmp_path)).metadata)
    for hidden in ("sk-live-0123456789", "hf_abcdefghijkl", "pa\\", "word", "hunter2hunter2"):
        assert hidden not in rows and hidden not in facts
    assert rows.count(REDACTED) > 20 and "user:" in rows
    (read,) = ParquetStore(tmp_path).read()
    assert read.trajectories[0].token_ids == group.trajectories[0].token_ids


def test_what_looks_like_a_secret() -> None:
    environ = {
        "OPENAI_API_KEY": "0123456789",
        "AWS_SECRET_ACCESS_KEY": "abcdefghij",
        "token": "lowercase-too",
        "SHORT_TOKEN": "short",
        "TOKENIZERS_PARALLELISM": "false-or-true",
        "MONKEY": "not-a-secret",
        "HOME": "/home/someone",
        "INDEX": "https://me:secret-word@index.local",
    }
    assert secret_values(environ) == ("0123456789", "abcdefghij", "lowercase-too", "secret-word")


def test_longer_secrets_go_before_their_own_parts() -> None:
    clean = Redactor(["password", "password-and-more"]).text
    assert clean("x password-and-more password") == f"x {REDACTED} {REDACTED}"


async def test_no_reference_is_in_the_file(tmp_path: Path) -> None:
    stage = Stage(
        engine=FixedEngine("done"),
        renderer=CharRenderer(),
        environment=FakeEnvironment(answer=echo, verifier=FakeVerifier(rate=lambda *_: 1.0)),
    )
    problem = replace(a_problem(), reference="the-gold-answer")
    ParquetStore(tmp_path).append([await run_group(stage, problem, size=2, seed=0)], version=0)
    assert "the-gold-answer" not in repr(pq.read_table(only(tmp_path)).to_pylist())
    assert not set(pq.read_schema(only(tmp_path)).names) & {"reference", "gold", "problem"}


def test_secrets_leave_files_and_ids_too(tmp_path: Path) -> None:
    secret, renderer = "sk-live-0123456789", CharRenderer()
    ids = renderer.write(Message(role="assistant", content=f"key {secret}, {secret[:9]}"))
    group = a_group(size=1)
    turn = replace(group.trajectories[0].turns[0], action=action(*ids))
    group = replace(
        group,
        trajectories=(replace(group.trajectories[0], turns=(turn, turn)),),
        task=Task(id="t", prompt=(), sandbox=SandboxSpec(files={"k": secret.encode()})),
        artifacts=({"out": f"<{secret}>".encode()},),
    )
    store = ParquetStore(tmp_path, secrets=[secret], decode=renderer.text)
    store.append([group], version=0)
    (read,) = store.read()
    (trajectory,) = read.trajectories
    assert renderer.text(trajectory.token_ids).count(f"key , {secret[:9]}") == 2
    assert trajectory.token_ids.count(REDACTED_ID) == 2 * len(secret) + sum(
        i == REDACTED_ID for i in group.trajectories[0].token_ids
    )
    assert trajectory.metrics["redacted_tokens"] == 2 * len(secret)
    assert trajectory.action_mask == group.trajectories[0].action_mask
    assert read.artifacts == ({"out": f"<{REDACTED}>".encode()},)
    assert read.task is not None and read.task.sandbox is not None
    assert read.task.sandbox.files == {"k": REDACTED.encode()}


@given(
    before=st.text("ab-", max_size=8), between=st.text("ab-", max_size=8), after=st.text(max_size=5)
)
@example(before="abba", between="abba-", after="")
def test_no_part_of_a_spelled_secret_stays(before: str, between: str, after: str) -> None:
    secret, renderer = "abba-abba", CharRenderer()
    text = f"{before}{secret}{between}{secret}{after}"
    spelled = renderer.write(Message(role="assistant", content=text))
    turn = replace(a_group().trajectories[0].turns[0], action=action(*spelled))
    trajectory = replace(a_group().trajectories[0], turns=(turn,))
    kept = Redactor([secret], decode=renderer.text).tokens(trajectory)
    assert secret not in renderer.text(kept.token_ids)
    assert len(kept.token_ids) == len(trajectory.token_ids)


def test_half_a_surrogate_pair_is_replaced_not_a_crash(tmp_path: Path) -> None:
    group = a_group(text='{"a": "\ud83d"} \ud83d\ude42 ok')
    ParquetStore(tmp_path).append([group], version=0)
    (read,) = ParquetStore(tmp_path).read()
    assert read.trajectories[0].answer == '{"a": "\ufffd"} 🙂 ok'


# ---------------------------------------------------------------- bad files


@pytest.fixture
def store(tmp_path: Path) -> ParquetStore:
    store = ParquetStore(tmp_path)
    for version in range(3):
        store.append([a_group(f"t{version}", ids=40)], version=version)
    return store


def path_of(tmp_path: Path, version: int = 1) -> Path:
    return tmp_path / f"step-{version:08d}.parquet"


def rewrite(path: Path, **changes: Any) -> None:
    """The same rows with other columns or metadata, as another program might write them."""
    table = pq.read_table(path)
    for name, values in changes.pop("columns", {}).items():
        place = table.schema.get_field_index(name)
        field = table.schema.field(name)
        table = table.set_column(place, field, pa.array(values, type=field.type))
    metadata = changes.get("metadata", dict(table.schema.metadata or {}))
    table = table.replace_schema_metadata({**metadata, SEAL: UNSEALED})
    pq.write_table(table, path)
    seal(path)


def spoil_rows(path: Path, **columns: Any) -> None:
    rewrite(path, columns=columns)


BAD = {
    "empty": lambda p: p.write_bytes(b""),
    "cut": lambda p: p.write_bytes(p.read_bytes()[:-100]),
    "cut in half": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "text": lambda p: p.write_text("hello\n" * 50),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "foreign": lambda p: pq.write_table(pa.table({"a": [1]}), p),
    "older schema": lambda p: rewrite(p, metadata={"agentrl_schema": "0"}),
    "spans too short": lambda p: spoil_rows(
        p, spans=[[{"author": "environment", "length": 3}]] * 2
    ),
    "no action": lambda p: spoil_rows(p, spans=[[{"author": "environment", "length": 160}]] * 2),
    "policy first": lambda p: spoil_rows(p, spans=[[{"author": "policy", "length": 160}]] * 2),
    "logprobs missing": lambda p: spoil_rows(p, logprobs=[[], []]),
    "too many logprobs": lambda p: spoil_rows(p, logprobs=[[-1.0] * 99] * 2),
    "unknown ending": lambda p: spoil_rows(p, ending=["exploded"] * 2),
    "reward and reason": lambda p: spoil_rows(p, invalid=["why"] * 2),
    "no ids": lambda p: spoil_rows(p, token_ids=[None, None]),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_file_is_named_when_asked_for_and_skipped_in_a_sweep(
    store: ParquetStore, tmp_path: Path, kind: str
) -> None:
    path = path_of(tmp_path)
    BAD[kind](path)
    with pytest.raises(RecordError, match=r"step-00000001\.parquet") as caught:
        list(store.read(version=1))
    assert "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match=r"skipped: .*step-00000001"):
        assert [g.task_id for g in store.read()] == ["t0", "t2"]


def test_message_says_foreign_or_other_schema(store: ParquetStore, tmp_path: Path) -> None:
    BAD["foreign"](path_of(tmp_path, 0))
    BAD["older schema"](path_of(tmp_path, 1))
    with pytest.raises(RecordError, match="not written by agentrl"):
        list(store.read(version=0))
    with pytest.raises(RecordError, match="has schema 0, this agentrl reads schemas 1 to 2"):
        list(store.read(version=1))


def test_missing_step_is_named(store: ParquetStore, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"step-00000009\.parquet does not exist"):
        list(store.read(version=9))
    assert list(ParquetStore(tmp_path / "nowhere").read()) == []


def test_other_things_in_the_folder_are_named_and_left_alone(
    store: ParquetStore, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000003.parquet.tmp").write_bytes(b"PAR1")
    with pytest.warns(UserWarning) as caught:
        assert len(list(store.read())) == 3
    told = " ".join(str(w.message) for w in caught)
    assert "notes.txt is not a step file" in told
    assert "step-00000003.parquet.tmp is half-written" in told
    assert (tmp_path / "notes.txt").exists()


@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_changed_byte_gives_a_named_error_or_the_record(
    tmp_path: Path, place: float, flip: int
) -> None:
    store = ParquetStore(tmp_path, secrets=())
    store.append([a_group(ids=40)], version=0)
    data = bytearray(path_of(tmp_path, 0).read_bytes())
    data[int(place * len(data))] ^= flip
    path_of(tmp_path, 0).write_bytes(data)
    try:
        list(store.read(version=0))
    except RecordError as error:
        assert "step-00000000.parquet" in str(error)


def test_every_changed_byte_of_the_footer_is_noticed(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path, secrets=())
    store.append([a_group()], version=0)
    path = path_of(tmp_path, 0)
    whole = path.read_bytes()
    begin = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for place in range(begin, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(RecordError, match=r"step-00000000\.parquet is cut or damaged"):
            list(store.read(version=0))
    path.write_bytes(whole)
    assert len(list(store.read(version=0))) == 1


def test_an_older_schema_is_migrated(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "step-schema-1.parquet", path_of(tmp_path, 0))
    store = ParquetStore(tmp_path)
    first, lost = store.read(version=0)
    assert first == a_group("x") and lost.faults == ("E: 1",)
    assert store.metadata(0)["tokenizer_sha256"] == "ab"
    store.append([first, lost], version=1)
    assert list(store.read(version=1)) == [first, lost]
    assert store.metadata(1)["agentrl_schema"] == "2"


def test_a_newer_schema_is_refused_by_name(store: ParquetStore, tmp_path: Path) -> None:
    rewrite(path_of(tmp_path, 0), metadata={"agentrl_schema": "3"})
    with pytest.raises(RecordError, match=r"step-00000000\.parquet has schema 3"):
        list(store.read(version=0))


# ---------------------------------------------------------------- what the learner made of them


def test_lessons_lie_beside_their_step_and_go_when_it_is_taken_again(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path)
    store.append([a_group()], version=4)
    taught = [
        Lesson(group=0, trajectory_id="t/0", member=0, advantages=(-0.5, -0.5), trained_tokens=6),
        Lesson(
            group=0, trajectory_id="t/1", member=1, advantages=(), trained_tokens=0, silent="why"
        ),
    ]
    store.append_lessons(taught, {"loss": -0.25, "grad_norm": 1e-3}, version=4)
    assert store.lessons(4) == (taught, {"loss": -0.25, "grad_norm": 1e-3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.versions() == [4]
    joined = pd.read_parquet(tmp_path / "step-00000004.parquet").merge(
        pd.read_parquet(tmp_path / "lessons-00000004.parquet"), on=["group", "id", "member"]
    )
    assert list(joined.silent.fillna("")) == ["", "why"] and len(joined) == 2
    store.append([a_group()], version=4)
    with pytest.raises(RecordError, match=r"lessons-00000004\.parquet does not exist"):
        store.lessons(4)
    (tmp_path / "lessons-00000004.parquet").write_bytes(b"PAR1")
    with pytest.raises(RecordError, match=r"lessons-00000004\.parquet is cut or damaged"):
        store.lessons(4)


# ---------------------------------------------------------------- whole or not at all


def test_failed_write_leaves_the_earlier_file_and_no_scrap(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path)
    store.append([a_group("good")], version=0)
    huge = replace(a_group("bad").trajectories[0], seed=2**70)
    bad = Group(task_id="bad", trajectories=(huge,), verdicts=(Verdict(reward=0.0),))
    with pytest.raises((OverflowError, pa.ArrowInvalid)):
        store.append([a_group("fine"), bad], version=0)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000.parquet"]
    assert [g.task_id for g in store.read()] == ["good"]


def test_killed_writer_leaves_no_step(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from agentrl.store import ParquetStore
from agentrl.types import Group

class Deadly(tuple):
    def __iter__(self):
        os.kill(os.getpid(), signal.SIGKILL)

store = ParquetStore(Path(sys.argv[1]))
good = Group(task_id="good", trajectories=(), verdicts=())
store.append([good], version=0)
bad = Group(task_id="bad", trajectories=(), verdicts=())
object.__setattr__(bad, "trajectories", Deadly())
store.append([good, bad], version=1)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=os.environ, timeout=60)
    assert done.returncode == -9
    store = ParquetStore(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert store.versions() == [0]
    store.append([a_group("again")], version=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000000.parquet",
        "step-00000001.parquet",
    ]


def test_reading_stops_when_the_reader_does(store: ParquetStore) -> None:
    groups: Iterator[Group] = store.read()
    assert next(groups).task_id == "t0"
    groups.close()  # type: ignore[attr-defined]
