"""What the viewer finds by columns alone, against the same said of whole groups."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_cases import group, random_groups, trajectory, turn

from agentrl.errors import ConfigError, RecordError
from agentrl.store import ParquetStore, read_group
from agentrl.types import Group, Verdict
from agentrl.viewer.details import Details
from agentrl.viewer.rows import Rows, Wanted, wanted_of


def a_store(folder: Path, seed: int) -> tuple[ParquetStore, list[Group]]:
    groups = random_groups(seed, groups=5)
    groups.append(group([trajectory(turn([1, 2], [3]), member=0)], [Verdict(invalid="E: late")]))
    groups.append(Group(task_id="gone", trajectories=(), verdicts=(), faults=("SandboxFault: x",)))
    store = ParquetStore(folder, secrets=())
    store.append(groups, version=3)
    return store, groups


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 4))
def test_rows_say_what_the_groups_are(tmp_path_factory: Any, seed: int, size: int) -> None:
    folder = tmp_path_factory.mktemp("rows")
    _, groups = a_store(folder, seed)
    rows, begin, more = [], 0, True
    while more:
        page, more = Rows(folder).page(Wanted(), begin=begin, size=size)
        rows += page
        begin += size
    assert [row["number"] for row in rows] == list(range(len(groups)))
    for row, one in zip(rows, groups, strict=True):
        assert (row["task_id"], tuple(row["faults"])) == (one.task_id, one.faults)
        for said, t, v in zip(row["members"], one.trajectories, one.verdicts, strict=True):
            assert (said["member"], said["ending"]) == (t.member, t.ending.value)
            assert (said["reward"], said["passed"], said["invalid"]) == (
                v.reward,
                v.passed,
                v.invalid,
            )
            assert (said["turns"], said["tokens"]) == (len(t.turns), len(t.token_ids))
            assert said["sampled"] == t.action_tokens


@pytest.mark.parametrize(
    ("outcome", "holds"),
    [
        ("mixed", lambda g: len({v.reward for v in g.verdicts} - {None}) > 1),
        ("faulted", lambda g: bool(g.faults) or any(v.reward is None for v in g.verdicts)),
    ],
)
def test_outcomes_are_those_of_the_groups(tmp_path: Path, outcome: Any, holds: Any) -> None:
    _, groups = a_store(tmp_path, 1)
    found, _ = Rows(tmp_path).page(Wanted(outcome=outcome), begin=0, size=50)
    assert [row["number"] for row in found] == [n for n, g in enumerate(groups) if holds(g)]
    assert found, "the case is there"


def test_one_group_is_read_alone_and_is_the_same(tmp_path: Path) -> None:
    store, groups = a_store(tmp_path, 2)
    whole = list(store.read(version=3))
    assert [read_group(store.path(3), n) for n in range(len(groups))] == whole
    with pytest.raises(RecordError, match="no group 99"):
        read_group(store.path(3), 99)


def test_a_step_that_is_taken_again_is_read_again(tmp_path: Path) -> None:
    store, _ = a_store(tmp_path, 3)
    rows = Rows(tmp_path)
    assert len(rows.of_step(3)) == 7
    store.append(random_groups(4, groups=2), version=3)
    assert len(rows.of_step(3)) == 2


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"foo": "1"}, "foo"), ({"outcome": "x"}, "mixed"), ({"step": "a"}, "step")],
)
def test_a_query_that_means_nothing_is_said(asked: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        wanted_of(asked)


def test_details_of_a_folder_of_step_files(tmp_path: Path) -> None:
    a_store(tmp_path, 5)
    told = Details(tmp_path).trajectory(3, 0, 0)
    assert told["exact"] is False and told["turns"][0]["action"]["ids"]
