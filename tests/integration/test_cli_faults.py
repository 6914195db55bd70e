"""The command line against a hostile world: full disks, forbidden folders, signals, floods.

Everything here runs in processes of their own, as a user's would.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.cli.audit import audit_run
from agentrl.cli.entry import run as cli
from agentrl.learning.checkpoint import latest_checkpoint
from agentrl.metrics import read_metrics

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
SMALL = (
    "model.tiny_layers=1", "model.tiny_hidden=32", "warm_start.steps=4", "warm_start.traces=8",
    "warm_start.batch=4", "warm_start.scripts={oracle: 1}", "rollout.groups=2",
    "rollout.group_size=4", "run.eval_every=0", "run.steps=2", "run.checkpoint_every=1",
    "run.keep_checkpoints=1",
)  # fmt: skip
PLAIN = """
from agentrl.tools import ToolEnvironment, answer, problem
from agentrl.verifiers import NumericMatch


class Echo(ToolEnvironment):
    verifier = NumericMatch()

    @staticmethod
    def problems(split):
        return [problem(f"{n}", n, id=f"{split} {n}") for n in range(20)]

    @staticmethod
    def oracle(problem):
        yield answer(str(problem.reference))

    scripts = {"oracle": oracle}
"""
"""An environment without tools: it runs where no sandbox can be opened."""


@pytest.fixture
def plain(tmp_path: Path) -> tuple[str, ...]:
    """Settings of a run that needs no sandbox, in `tmp_path`/place/run."""
    (tmp_path / "place").mkdir()
    (tmp_path / "plain_env.py").write_text(PLAIN)
    where = (f"environment.name={tmp_path / 'plain_env.py'}", "environment.options={}")
    return (*where, f"run.dir={tmp_path / 'place' / 'run'}")


def train(*more: str, verb: str = "train") -> list[str]:
    settings = [part for override in (*SMALL, *more) for part in ("--set", override)]
    return [sys.executable, "-m", "agentrl", verb, QUICKSTART, "--quiet", *settings]


def run(command: Sequence[str], *bwrap: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; with `bwrap` arguments, in a changed view of the machine."""
    if bwrap:
        command = ["bwrap", "--dev-bind", "/", "/", *bwrap, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    assert "agentrl itself failed" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def is_one_error(text: str, *names: str) -> bool:
    return len(text.splitlines()) == 1 and text.startswith("error: ") and all(
        name in text for name in names
    )  # fmt: skip


# ---------------------------------------------------------------- files that can't be written


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    plain: tuple[str, ...], tmp_path: Path
) -> None:
    """On a disk of its own, most of which another file takes at first."""
    place = tmp_path / "place"
    script = f"""
        head -c 280000 /dev/zero > {place}/ballast
        "$@"; echo "full: $?"
        rm {place}/ballast
        "$@"; echo "again: $?"
        {sys.executable} -m agentrl check run {place}/run --json
    """
    command = ["bash", "-c", script, "bash", *train(*plain)]
    code, out, err = run(command, "--size", "700000", "--tmpfs", str(place))
    assert "full: 2" in out and "again: 0" in out, (out, err)
    assert is_one_error(err, "checkpoints/step-"), "and a quiet run says nothing else"
    audit = json.loads(out.splitlines()[-1])
    assert (code, audit["problems"]) == (0, []) and "2 steps" in audit["checked"]


def test_a_disk_that_can_only_be_read_is_one_line(plain: tuple[str, ...], tmp_path: Path) -> None:
    place = tmp_path / "place"
    code, out, err = run(train(*plain), "--ro-bind", str(place), str(place))
    assert (code, out) == (2, "") and is_one_error(err, "place", "Read-only"), err


@pytest.mark.parametrize("verb", ["show", "report", "check run", "prune", "init"])
def test_a_folder_that_is_forbidden_is_one_line(verb: str, tmp_path: Path) -> None:
    """Without capabilities, root too is held to the permissions of files."""
    run_dir = tmp_path / "place"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("{}")
    (run_dir / "metrics.jsonl").write_text('{"kind": "step", "step": 0}\n')
    (run_dir / "trajectories").mkdir()
    agentrl = [sys.executable, "-m", "agentrl"]
    commands = {
        "init": [*agentrl, "init", "x", "--folder", str(run_dir)],
        "report": [*agentrl, "report", str(run_dir), "--out", str(run_dir / "r.html")],
    }
    command = commands.get(verb, [*agentrl, *verb.split(), str(run_dir)])
    for path in (run_dir / "metrics.jsonl", run_dir / "trajectories", run_dir):
        path.chmod(0)
    try:
        code, out, err = run(command, "--unshare-user", "--uid", "1000", "--cap-drop", "ALL")
    finally:
        for path in (run_dir, run_dir / "metrics.jsonl", run_dir / "trajectories"):
            path.chmod(0o700)
    assert (code, out) == (2, "") and is_one_error(err, "place"), err


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_is_finished_by_the_same_command(
    how: signal.Signals, tmp_path: Path
) -> None:
    """The signal goes to every process of the run, as Ctrl-C does: sandboxes die, too."""
    run_dir = tmp_path / "run"
    own = (f"run.dir={run_dir}", "environment.options={digits: 1, count: 50}")
    command = [*train(*own, "run.steps=300"), "--json"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert running.stdout is not None
    steps = 4
    while steps:
        steps -= json.loads(running.stdout.readline())["kind"] == "step"
    os.killpg(running.pid, how)
    rest, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (-9 if how == signal.SIGKILL else 130, "")
    if how != signal.SIGKILL:
        assert all(json.loads(line) for line in rest.splitlines()), "lines are whole"

    last = latest_checkpoint(run_dir / "checkpoints")
    assert last is not None
    done = int(last.name.rpartition("-")[2]) + 2
    assert cli([*train(*own, f"run.steps={done}")[3:]]) == 0
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(done)), "each step once, in order"
    audit = audit_run(run_dir)
    assert (audit.problems, audit.steps) == ([], done)


# ---------------------------------------------------------------- tools that flood

FLOODS = r"""
import json
from pathlib import Path

from agentrl.tools import ToolEnvironment, answer, call, problem, run_python, tool
from agentrl.types import SandboxSpec
from agentrl.verifiers import NumericMatch


class Floods(ToolEnvironment):
    verifier = NumericMatch()

    @tool(timeout_s=60)
    async def python(self, code: str) -> str:
        "Run code in the sandbox."
        return await run_python(self.sandbox, code, timeout_s=50)

    @tool(timeout_s=60)
    def own(self, what: str) -> str | bytes:
        "Run code of the environment."
        return {"long": "x" * 10**8, "bytes": b"\xff\xfe ok \x80", "half": "a\ud800b"}[what]

    @staticmethod
    def problems(split):
        return [problem(split, 7, sandbox=SandboxSpec())]

    @staticmethod
    def oracle(problem):
        def seen_by(name, **arguments):
            (seen,) = yield call(name, **arguments)
            return seen.content

        seen = [
            (yield from seen_by("python", code="import sys; sys.stdout.write('x' * 10**8)")),
            (yield from seen_by("python", code="import os; os.write(1, bytes([255, 254, 111]))")),
            (yield from seen_by("own", what="long")),
            (yield from seen_by("own", what="bytes")),
            (yield from seen_by("own", what="half")),
        ]
        Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
        yield answer("7")

    scripts = {"oracle": oracle}
"""


def test_tools_that_print_100_mb_or_no_utf_8_become_short_observations(tmp_path: Path) -> None:
    """The oracle of the environment calls them all and writes down what it was shown."""
    (tmp_path / "floods_env.py").write_text(FLOODS)
    room = ("engine.context_tokens=2048", "rollout.max_observation_tokens=300")
    turns = ("rollout.max_turns=8", "sampling.max_action_tokens=200", "warm_start.traces=1")
    own = (f"environment.name={tmp_path / 'floods_env.py'}", "environment.options={}")
    command = train(*room, *turns, *own, f"run.dir={tmp_path / 'run'}", verb="sft")
    code, out, err = run(command)
    assert (code, out.strip(), err) == (0, str(tmp_path / "run" / "warm_start"), "")
    printed, odd, long, raw, half = json.loads((tmp_path / "seen.json").read_text())
    assert len(printed) < 400 and "[output cut: first" in printed
    assert len(long) < 400 and "[output cut: first 16384 of 100000000 bytes shown]" in long
    assert (odd, raw, half) == ("\ufffd\ufffdo", "\ufffd\ufffd ok \ufffd", "a\ufffdb")


# ---------------------------------------------------------------- output that nobody reads


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    script = f"{sys.executable} -m agentrl list --json | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{", "")


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    script = f"{sys.executable} -m agentrl list > /dev/full"
    code, _, err = run(["bash", "-c", script])
    assert code == 2 and is_one_error(err, "stdout", "No space left"), err
