"""Every verb on one real, small run: what it prints, what a script reads, what a mistake gets."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_run

from agentrl.cli.entry import run as cli
from agentrl.learning.checkpoint import latest_checkpoint
from agentrl.metrics import read_metrics

QUICKSTART = str(small_run.QUICKSTART)
STEP_FIELDS = {
    "kind", "step", "version", "reward_mean", "reward_stderr", "success_rate",
    "groups_with_signal", "endings", "faults", "action_tokens", "observation_tokens", "entropy",
    "kl_ref", "mismatch_k3", "mismatch_max", "clip_share", "grad_norm", "lag", "sample_s",
    "update_s", "publish_s",
}  # fmt: skip


def settings(*more: str) -> list[str]:
    return [part for override in (*small_run.SMALL, *more) for part in ("--set", override)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Nobody may change it."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert cli(["train", QUICKSTART, "--quiet", *settings(f"run.dir={folder}")]) == 0
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must succeed; returns its stdout."""

    def say(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        found = cli([*arguments])
        out, err = capsys.readouterr()
        assert found == code, (out, err)
        assert "Traceback" not in out + err
        return out

    return say


Say = Callable[..., str]


def objects(out: str) -> list[Any]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize(
    "verb",
    ["train", "sft", "eval", "rollout", "show", "list", "report", "doctor", "init", "fetch",
     "prune", "check", "check run", "check env", "check template"],
)  # fmt: skip
def test_every_verb_has_help(verb: str, said: Say) -> None:
    assert "Usage: agentrl" in said(*verb.split(), "--help")


# ---------------------------------------------------------------- what a run leaves


def test_each_line_of_metrics_holds_what_is_promised(trained: Path) -> None:
    rows = read_metrics(trained / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "step"]
    evals = [row for row in rows if row["kind"] == "eval"]
    for row in steps:
        assert set(row) >= STEP_FIELDS
        assert row["version"] == row["step"] + 1
        assert sum(row["endings"].values()) == 8 and row["faults"] == 0
        assert row["lag"] == 0 and row["action_tokens"] > 0
        assert min(row[name] for name in ("sample_s", "update_s", "publish_s")) > 0
    for row in evals:
        assert set(row) >= {"kind", "step", "split", "success", "stderr"}
        assert row["split"] == "test" and 0 <= row["success"] <= 1


def test_a_run_directory_is_whole(trained: Path) -> None:
    for name in ("config.yaml", "provenance.json", "metrics.jsonl", "trajectories", "tensorboard"):
        assert (trained / name).exists(), name
    facts = json.loads((trained / "provenance.json").read_text())
    assert len(facts["tokenizer_sha256"]) == len(facts["template_sha256"]) == 64
    assert latest_checkpoint(trained / "checkpoints") is not None


def test_a_finished_run_takes_no_step_more_and_is_not_overwritten(trained: Path, said: Say) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    arguments = ["train", QUICKSTART, "--quiet", *settings(f"run.dir={trained}")]
    said(*arguments)
    assert (trained / "metrics.jsonl").read_bytes() == before
    said(*arguments, "--no-resume", code=2)


# ---------------------------------------------------------------- what scripts read


def test_json_is_alone_on_stdout(trained: Path, said: Say, tmp_path: Path) -> None:
    where = settings(f"run.dir={trained}")
    (found,) = objects(
        said("eval", QUICKSTART, "--problems", "3", "--samples", "2", "--json", *where)
    )
    assert found["problems"] == 3 and set(found["pass_at_k"]) == {"1", "2"}
    assert found["ci95"][0] <= found["success"] <= found["ci95"][1]
    (group,) = objects(said("rollout", QUICKSTART, "--json", *where))
    assert len(group["trajectories"]) == len(group["verdicts"]) == 4
    assert len(objects(said("show", str(trained), "--groups", "2", "--json"))) == 2
    kinds = {row["kind"] for row in objects(said("list", "--json", "--runs", str(trained.parent)))}
    assert kinds >= {"environments", "sandboxes", "engines", "models", "presets", "runs"}
    (audit,) = objects(said("check", "run", str(trained), "--json"))
    assert audit["problems"] == []
    (doctor,) = objects(said("doctor", "--json"))
    assert {"torch", "bwrap", "docker", "vllm"} <= {row["part"] for row in doctor}
    rows = objects(
        said("train", QUICKSTART, "--json", *settings(f"run.dir={tmp_path / 'j'}", "run.steps=1"))
    )
    assert {row["kind"] for row in rows} >= {"step", "eval"}


def test_shown_tokens_are_marked_by_author(trained: Path, said: Say) -> None:
    shown = said("show", str(trained), "--plain").splitlines()
    assert any(line.lstrip().startswith(">") for line in shown)
    assert any(line.lstrip().startswith("<") for line in shown)
    (group,) = objects(said("show", str(trained), "--member", "1", "--json"))
    assert [t["member"] for t in group["trajectories"]] == [1]


def test_warm_start_alone_is_a_model_folder_and_is_not_repeated(tmp_path: Path, said: Say) -> None:
    arguments = ["sft", QUICKSTART, "--json", *settings(f"run.dir={tmp_path}")]
    (found,) = objects(said(*arguments))
    weights = Path(found["model"], "model.safetensors")
    before = weights.stat().st_mtime_ns
    said(*arguments)
    assert weights.stat().st_mtime_ns == before
    said(*arguments, "--force")
    assert weights.stat().st_mtime_ns > before


# ---------------------------------------------------------------- report, init, check, prune


def test_the_report_is_one_file_that_needs_no_network(trained: Path, said: Say) -> None:
    page = Path(said("report", str(trained)).strip()).read_text()
    assert page.count('<img src="data:image/svg+xml;base64,') >= 8
    assert "http" not in page.split("<h2>Configuration</h2>")[0].replace("http-equiv", "")
    assert "script" not in page.lower().split("<body>")[0]
    assert "held-out success" in page


def test_the_report_shows_hostile_text_as_text(trained: Path, said: Say, tmp_path: Path) -> None:
    copy = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(trained, copy)
    (copy / "config.yaml").write_text("</pre><script>alert(1)</script>")
    page = Path(said("report", str(copy), "--out", str(tmp_path / "r.html")).strip()).read_text()
    assert "<script" not in page and "<img src=x" not in page


def test_a_report_of_an_unfinished_or_damaged_run(trained: Path, said: Say, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    lines = (copy / "metrics.jsonl").read_bytes()
    (copy / "metrics.jsonl").write_bytes(
        b'\xff\xfe{"kind"\n[1]\n' + lines + b'{"kind": "step", "st'
    )
    for file in (copy / "trajectories").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert Path(said("report", str(copy)).strip()).stat().st_size > 10_000
    (copy / "metrics.jsonl").unlink()
    said("report", str(copy), code=2)


def test_a_new_environment_runs_as_it_stands(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said("init", "my_env")
    assert "in order" in said("check", "env", "my_env.py", "--sample", "2")
    said("init", "my_env", code=2)  # never over an author's work
    model = (
        "model.tiny_layers=1",
        "model.tiny_hidden=32",
        "warm_start.steps=4",
        "run.eval_problems=2",
    )
    pace = (
        "run.steps=1",
        "rollout.groups=2",
        "rollout.group_size=2",
        "sampling.max_action_tokens=32",
    )
    overrides = [
        part for o in (*model, *pace, f"run.dir={tmp_path / 'r'}") for part in ("--set", o)
    ]
    said("train", "my_env.py", "--quiet", *overrides)
    kinds = [row["kind"] for row in read_metrics(tmp_path / "r" / "metrics.jsonl")]
    assert kinds == ["eval", "step"]


def test_a_damaged_run_is_named_by_the_check(trained: Path, said: Say, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    (file, *_) = sorted((copy / "trajectories").glob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-20])
    assert file.name in said("check", "run", str(copy), code=1)


def test_prune_clears_what_a_killed_save_left(trained: Path, said: Say, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    half = copy / "checkpoints" / ".half-saved.tmp"
    half.mkdir()
    said("prune", str(copy))
    assert latest_checkpoint(copy / "checkpoints") is not None


# ---------------------------------------------------------------- mistakes


BROKEN = "import a_module_that_nobody_has\n"
EMPTY = (
    "from agentrl_environments.calculator import Calculator\n"
    "class E(Calculator):\n"
    "    @staticmethod\n"
    "    def problems(split): return []\n"
)
MISTAKES = {
    "a key that nobody knows": (["run.stepz=1"], "did you mean steps"),
    "a value of the wrong type": (["run.steps=many"], "run.steps"),
    "a group of one": (["rollout.group_size=1"], "rollout.group_size"),
    "a section that is none": (["run=3"], "run"),
    "not a setting": (["steps"], "section.field=value"),
    "a model that is not there": (["model.path=/no/such"], "model.path"),
    "a plug-in that nobody has": (["environment.name=calculater"], "calculator"),
    "an option that it lacks": (["environment.options={digitz: 1}"], "digits"),
    "an option out of range": (["environment.options={digits: 99}"], "digits"),
    "a sandbox that nobody has": (["sandbox.name=bwarp"], "bwrap"),
    "a script that it lacks": (["warm_start.scripts={orakle: 1}"], "orakle"),
    "actions longer than the context": (["sampling.max_action_tokens=96"], "context_tokens"),
    "an algorithm that nobody has": (["algorithm.preset=grpoo"], "grpo"),
    "sampling that cuts the support": (["sampling.top_p=0.9"], "top_p"),
    "a file that fails to import": (["environment.name=BROKEN"], "a_module_that_nobody_has"),
    "no problems": (["environment.name=EMPTY", "environment.options={}"], "problem"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, expected = MISTAKES[mistake]
    for name, source in (("BROKEN", BROKEN), ("EMPTY", EMPTY)):
        (tmp_path / f"{name.lower()}.py").write_text(source)
        overrides = [o.replace(name, str(tmp_path / f"{name.lower()}.py")) for o in overrides]
    code = cli(["train", QUICKSTART, "--quiet", *settings(f"run.dir={tmp_path / 'r'}", *overrides)])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert [line for line in err.splitlines() if line.startswith("error: ")] == err.splitlines()
    assert len(err.splitlines()) == 1 and expected in err


def test_a_prompt_over_the_context_stops_the_run_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("engine.context_tokens=16", "sampling.max_action_tokens=8", "warm_start.steps=0")
    options = "environment.options={digits: 6, count: 20}"
    code = cli(["train", QUICKSTART, "--quiet", *settings(f"run.dir={tmp_path}", *small, options)])
    err = capsys.readouterr().err
    assert code == 3 and "context_tokens" in err and "Traceback" not in err


def test_a_verifier_that_fails_is_counted_and_stops_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "no_verdict_env.py"
    own.write_text(
        "from agentrl_environments.calculator import Calculator\n"
        "class Fails:\n"
        "    async def grade(self, problem, episodes): raise KeyError('lost the key')\n"
        "class E(Calculator):\n"
        "    verifier = Fails()\n"
    )
    where = settings(f"run.dir={tmp_path / 'r'}", f"environment.name={own}", "run.eval_every=0")
    code = cli(["train", QUICKSTART, "--quiet", *where])
    err = capsys.readouterr().err
    assert code == 3 and "lost the key" in err and "Traceback" not in err
    assert list((tmp_path / "r" / "trajectories").glob("*.parquet")), "nothing is lost"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    assert cli(["train", QUICKSTART, "--quiet", *settings(f"run.dir={tmp_path / 'r'}")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
