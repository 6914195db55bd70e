"""Every rung of the ladder on the records of one real, very short quickstart run."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.entry import run as cli
from agentrl.rebuild import Replay, assert_replays
from agentrl.replay.case import save_case
from agentrl.replay.fork import Edit
from agentrl.replay.records import Recorded, Records
from agentrl.store import ParquetStore, Redactor, read_facts, read_file, write_file
from agentrl.types import Trajectory, Verdict

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
SMALL = (
    "model.tiny_layers=2", "model.tiny_hidden=64", "warm_start.steps=150", "warm_start.traces=150",
    "warm_start.batch=16", "warm_start.lr=4.0e-3", "warm_start.scripts={oracle: 0.5, guess: 0.5}",
    "rollout.groups=6", "rollout.group_size=8", "run.eval_every=0", "run.steps=3",
    "run.checkpoint_every=2", "sandbox.name=bwrap",
    "environment.options={digits: 1, count: 30, operators: ['+']}", "algorithm.replay_share=0.5",
)  # fmt: skip


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Nobody may change it."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    overrides = [part for o in (*SMALL, f"run.dir={folder}") for part in ("--set", o)]
    assert cli(["train", QUICKSTART, "--quiet", *overrides]) == 0
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line; returns its stdout."""

    def say(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        found = cli([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert found == code, (out, err)
        assert "Traceback" not in out + err
        return out + err if code else out

    return say


Say = Callable[..., str]


def with_a_call(run: Path) -> Recorded:
    """An episode with two turns: a call that worked, then an answer."""
    return next(
        one
        for one in Records(run).episodes()
        if len(one.trajectory.turns) == 2 and one.trajectory.events[0].status == "ok"
    )


def changed(run: Path, folder: Path, change: Callable[[Trajectory], Trajectory]) -> Path:
    """The run's first step with one trajectory changed, as a file that reads well."""
    source = ParquetStore(run / "trajectories").path(0)
    first, *rest = read_file(source)
    first = replace(first, trajectories=(change(first.trajectories[0]), *first.trajectories[1:]))
    path = folder / "step-00000000.parquet"
    write_file(path, [first, *rest], read_facts(source), Redactor(()))
    return path


# ---------------------------------------------------------------- what the store kept


def test_a_step_file_says_what_it_was_made_of(run: Path) -> None:
    facts = read_facts(ParquetStore(run / "trajectories").path(0))
    assert len(facts["tokenizer_sha256"]) == len(facts["template_sha256"]) == 64
    assert json.loads(facts["sandbox"])["backend"] == "bwrap"
    assert "torch" in json.loads(facts["versions"])["packages"]
    assert json.loads(facts["config"])["environment"]["name"] == "calculator"
    one = with_a_call(run)
    assert one.task is not None and one.task.sandbox is not None
    assert one.task.sandbox.memory_mb == 256
    assert all(len(turn.seen) == 16 for turn in one.trajectory.turns)
    assert one.trajectory.events[0].exit_code == 0


def test_every_trajectory_has_a_lesson(run: Path) -> None:
    store = ParquetStore(run / "trajectories")
    for step in store.versions():
        lessons, stats = store.lessons(step)
        ids = [t.id for group in store.read(version=step) for t in group.trajectories]
        assert [lesson.trajectory_id for lesson in lessons] == ids
        row = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][step]
        assert stats["grad_norm"] == row["grad_norm"]
        assert any(x.silent is None for x in lessons) == (row["groups_with_signal"] > 0)


# ---------------------------------------------------------------- the rungs, as recorded


def test_check_and_regrade_find_everything_in_order(run: Path, said: Say) -> None:
    assert said("replay", run) == "3 steps checked: as recorded\n"
    assert said("replay", run, "--depth", "regrade") == "48 verdicts given again: as recorded\n"


def test_reexecute_runs_real_sandboxes_again(run: Path, said: Say) -> None:
    told = said("replay", run, "--depth", "reexecute", "--step", "0")
    assert told == "48 episodes run again: as recorded\n"


def test_relearn_gives_the_same_loss_and_gradient(run: Path) -> None:
    """Step 1 is reached from the start by learning step 0 again, step 2 from its checkpoint."""
    for step, taken in ((1, [0, 1]), (2, [2])):
        done = Replay(Records(run)).relearn(step)
        assert [one.version for one in done] == taken
        for one in done:
            assert one.differences() == {}
            assert one.stats["grad_norm"] == one.recorded["grad_norm"]
            total = sum(share.share for share in one.shares)
            if one.version == 0:
                assert total == pytest.approx(1.0 if one.stats["grad_norm"] else 0.0)
            else:
                assert 0 <= total < 1 + 1e-6, "groups of earlier steps have their part"


def test_another_preset_makes_something_else_of_the_same_step(run: Path, said: Say) -> None:
    told = said(
        "replay", run, "--depth", "relearn", "--step", "0", "--set", "algorithm.preset=rloo"
    )
    assert "grad_norm" in told and "no gradient" in told
    found = Replay(Records(run)).relearn(0)[-1]
    pulls = [pull for share in found.shares for pull in share.hardest]
    silent = [share for share in found.shares if share.lesson.silent]
    assert all(share.pull == 0 for share in silent)
    for share in found.shares:
        for pull in share.hardest:
            advantage = share.lesson.advantages[pull.turn]
            assert (pull.value < 0) == (advantage > 0)  # towards a lower loss
    assert bool(pulls) == (found.stats["grad_norm"] > 0)


def test_reforward_with_the_same_weights_drifts_by_rounding_only(run: Path, said: Say) -> None:
    episodes = list(Records(run, step=0).episodes())
    same = Replay(Records(run)).reforward(episodes)
    assert len(same) == 48 and max(d.max_abs for d in same) < 1e-4
    for drift, one in zip(same, episodes, strict=True):
        assert len(drift.tokens) == one.trajectory.action_tokens
        assert [span.turn for span in drift.spans] == list(range(len(one.trajectory.turns)))
    told = said("replay", run, "--depth", "reforward", "--step", "0", "--episode", "0.0")
    assert "k3" in told


def test_reforward_with_other_weights_drifts(run: Path) -> None:
    store = ParquetStore(run / "trajectories")
    taught = [x for step in store.versions() for x in store.lessons(step)[0] if x.silent is None]
    assert taught, "the run taught nothing: its weights are still the first ones"
    one = with_a_call(run)
    later = Replay(Records(run), model=str(run / "checkpoints" / "step-000003"))
    (drift,) = later.reforward([one])
    assert drift.max_abs > 1e-3
    worst = max(drift.spans, key=lambda span: span.max_abs)
    begin = sum(span.tokens for span in drift.spans[: worst.turn])
    assert abs(drift.tokens[begin + worst.worst]) == worst.max_abs


def test_a_fork_without_an_edit_is_the_record_and_with_one_is_not(run: Path, said: Say) -> None:
    one = next(e for e in Records(run, step=0).episodes() if len(e.trajectory.turns) == 2)
    replay = Replay(Records(run))
    same = replay.fork(one, Edit(turn=1)).trajectories[0]
    assert same.token_ids == one.trajectory.token_ids
    edited = replay.fork(one, Edit(turn=1, observation="7")).trajectories[0]
    assert edited.turns[1].observation.token_ids != one.trajectory.turns[1].observation.token_ids
    forced = replay.fork(one, Edit(turn=0, action="<python>print(6*7)</python>"), samples=2)
    assert [t.turns[0].reply[0].content for t in forced.trajectories] == ["42", "42"]
    told = said(
        "replay", run, "--depth", "fork", "--episode", one.trajectory.id, "--turn", "1",
        "--temperature", "0",
    )  # fmt: skip
    assert "live from turn 1 with" in told


def test_diff_of_members_and_of_checkpoints(run: Path, said: Say) -> None:
    group = next(Records(run, step=0).groups(0))
    ids = [t.id for t in group.trajectories]
    told = said("replay", run, "--depth", "diff", "--episode", ids[0], "--other", ids[1])
    assert told.startswith(f"< {ids[0]}")
    checkpoint = run / "checkpoints" / "step-000002"
    told = said("replay", run, "--depth", "diff", "--episode", ids[0], "--other", checkpoint)
    assert "turn 0" in told


def test_a_trajectory_becomes_a_test_that_needs_nothing_of_its_run(
    run: Path, said: Say, tmp_path: Path
) -> None:
    one = with_a_call(run)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    case = tmp_path / "cases" / "test_saved_call.py"
    said("replay", copy, "--episode", one.trajectory.id, "--pytest", case)
    shutil.rmtree(copy)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(case)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    said("replay", run, "--episode", one.trajectory.id, "--pytest", case, code=2)  # never over one
    said("replay", run, "--episode", one.trajectory.id, "--pytest", tmp_path / "x.py", code=2)


def test_a_saved_test_fails_once_the_verdict_is_another(run: Path, tmp_path: Path) -> None:
    one = with_a_call(run)
    _, record = save_case(Records(run), one, tmp_path / "test_case.py")
    assert_replays(record)
    (group,) = read_file(record)
    other = replace(group, verdicts=(Verdict(reward=0.25),))
    write_file(record, [other], read_facts(record), Redactor(()))
    with pytest.raises(AssertionError, match="the verdict was"):
        assert_replays(record)


# ---------------------------------------------------------------- corrupted, changed, foreign


def test_a_changed_record_fails_the_check(run: Path, said: Say, tmp_path: Path) -> None:
    def other_words(trajectory: Trajectory) -> Trajectory:
        turn = trajectory.turns[0]
        turn = replace(turn, message=replace(turn.message, content="other", tool_calls=()))
        return replace(trajectory, turns=(turn, *trajectory.turns[1:]))

    path = changed(run, tmp_path, other_words)
    assert "don't parse to its message" in said("replay", path, code=1)


def test_a_changed_reply_is_named_by_turn_tool_and_bytes(
    run: Path, said: Say, tmp_path: Path
) -> None:
    one = with_a_call(run)
    text = one.trajectory.turns[0].reply[0].content

    def lied(trajectory: Trajectory) -> Trajectory:
        turn = one.trajectory.turns[0]
        reply = (replace(turn.reply[0], content=f"{text}!"),)
        turns = (replace(turn, reply=reply), *one.trajectory.turns[1:])
        return replace(
            trajectory, turns=turns, ending=one.trajectory.ending, events=one.trajectory.events
        )

    path = changed(run, tmp_path, lied)
    told = said("replay", path, "--depth", "reexecute", "--episode", "0.0", code=1)
    assert "departs turn 0, tool python: reply, bytes" in told
    assert "likely cause: a change" in told


@pytest.mark.parametrize("depth", ["check", "regrade", "reexecute", "reforward", "relearn"])
def test_cut_and_foreign_files_are_one_line_at_every_depth(
    run: Path, said: Say, tmp_path: Path, depth: str
) -> None:
    source = ParquetStore(run / "trajectories").path(0).read_bytes()
    footer = bytearray(source)
    footer[-60] ^= 1
    for name, data in (("cut", source[:-40]), ("footer", footer), ("foreign", b"hello" * 9)):
        path = tmp_path / name / "step-00000000.parquet"
        path.parent.mkdir()
        path.write_bytes(data)
        told = said("replay", path, "--depth", depth, code=1 if depth == "check" else 2)
        assert "step-00000000.parquet" in told and "cut or damaged" in told


def test_mistakes_are_one_line(run: Path, said: Say, tmp_path: Path) -> None:
    cases: dict[str, list[Any]] = {
        "no episode": [run, "--depth", "fork", "--episode", "9.9"],
        "name the episode": [run, "--depth", "fork"],
        "name what it is compared with": [run, "--depth", "diff", "--episode", "0.0"],
        "no step 7": [run, "--step", "7"],
        "no such file": [tmp_path / "nothing"],
        "algorithm": [run, "--depth", "relearn", "--set", "learner.lr=1"],
        "--ignore": [run, "--depth", "reexecute", "--ignore", "("],
        "no problem": [run, "--depth", "regrade", "--environment", "python-math"],
    }
    for expected, arguments in cases.items():
        told = said("replay", *arguments, code=2)
        assert expected in told and len(told.splitlines()) == 1, told


def test_json_lines_are_alone_on_stdout(run: Path, said: Say) -> None:
    for depth in ("regrade", "reforward", "relearn"):
        rows = said("replay", run, "--depth", depth, "--step", "0", "--json").splitlines()
        assert [json.loads(row) for row in rows]


# ---------------------------------------------------------------- other programs' formats


def test_a_run_goes_out_as_atif_and_comes_back_to_be_scored(
    run: Path, said: Say, tmp_path: Path
) -> None:
    lines = tmp_path / "run.jsonl"
    said("export", run, "--format", "atif", "--out", lines)
    said("import", lines, tmp_path / "back", "--format", "atif")
    before = [
        t for step in Records(run).steps for g in Records(run).groups(step) for t in g.trajectories
    ]
    after = [one.trajectory for one in Records(tmp_path / "back").episodes()]
    assert [t.token_ids for t in after] == [t.token_ids for t in before]
    assert [t.behavior_logprobs for t in after] == [t.behavior_logprobs for t in before]
    said("import", lines, tmp_path / "back", "--format", "atif", code=2)  # never over a step
    assert "line 1 is no verl trajectory" in said(
        "import", lines, tmp_path / "other", "--format", "verl", code=2
    )


def test_openai_messages_get_ids_from_a_tokenizer(run: Path, said: Say, tmp_path: Path) -> None:
    lines = tmp_path / "run.jsonl"
    lines.write_text(said("export", run, "--format", "openai", "--step", "0"))
    said("import", lines, tmp_path / "back", "--model", "tiny")
    back = [one.trajectory for one in Records(tmp_path / "back").episodes()]
    assert len(back) == 48 and all(t.turns[0].action.logprobs is None for t in back)
