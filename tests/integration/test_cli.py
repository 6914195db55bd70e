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
from agentrl.store import ParquetStore

QUICKSTART = str(small_run.QUICKSTART)


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
     "prune", "check", "check run", "check env", "check template", "sandbox", "sandbox build"],
)  # fmt: skip
def test_every_verb_has_help(verb: str, said: Say) -> None:
    assert "Usage: agentrl" in said(*verb.split(), "--help")


# ---------------------------------------------------------------- a run that is there


def test_a_finished_run_takes_no_step_more_and_is_not_overwritten(trained: Path, said: Say) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    arguments = ["train", QUICKSTART, "--quiet", *settings(f"run.dir={trained}")]
    said(*arguments)
    assert (trained / "metrics.jsonl").read_bytes() == before
    said(*arguments, "--no-resume", code=2)


def test_a_run_that_goes_on_says_what_is_other_than_before(
    trained: Path, said: Say, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    own = (f"run.dir={copy}", "run.steps=3", "learner.lr=0.001", "run.eval_every=0")
    rows = objects(said("train", QUICKSTART, "--json", *settings(*own)))
    assert [row["step"] for row in rows if row["kind"] == "step"] == [2]
    (note,) = [row["text"] for row in rows if row["kind"] == "note" and "resuming" in row["text"]]
    assert "step-000002" in note and "learner.lr: 0.0005 before, 0.001 now" in note
    assert "run.steps: 2 before, 3 now" in note and "run.dir" not in note
    said("train", QUICKSTART, *settings(*own, "model.tiny_hidden=64"), code=2)


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
    (written,) = objects(said("report", str(trained), "--json", "--out", str(tmp_path / "r.html")))
    assert written == {"report": str(tmp_path / "r.html")} and (tmp_path / "r.html").exists()
    (made,) = objects(said("init", "own_env", "--json", "--folder", str(tmp_path)))
    assert made == {"environment": str(tmp_path / "own_env.py")}
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text("{}")  # so that nothing is fetched
    (model,) = objects(said("fetch", "smollm2-135m", "--json", "--folder", str(tmp_path)))
    assert model == {"model": str(tmp_path / "smollm2-135m")}
    removed = objects(said("prune", str(trained), "--run-id", "nobody", "--json"))
    assert removed[0] == {"sandboxes": "bwrap", "removed": 0}
    assert removed[-1] == {"run": str(trained), "removed": 0}
    for check in (["template", "tiny"], ["env", "calculator", "--sample", "2"]):
        (audit,) = objects(said("check", *check, "--json"))
        assert audit["problems"] == []
    parts = {row["part"] for row in objects(said("doctor", "--json"))}
    assert {"torch", "bwrap", "docker", "vllm"} <= parts
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
    (lesson,) = group["lessons"]
    told = "no gradient: " if lesson["silent"] else "learned from: "
    taught = [line for line in shown if line.lstrip(" .").startswith(("no gradient", "learned"))]
    assert len(taught) == 4 and any(told in line for line in taught)


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
    folders = [".partial-warm_start-7", "checkpoints/.partial-step-9-7", "checkpoints/.old-x-7"]
    for folder in folders:
        (copy / folder).mkdir()
    files = ["metrics.jsonl.tmp", "trajectories/step-00000009.parquet.tmp"]
    for file in files:
        (copy / file).touch()
    assert f"{copy}: 5 half-written" in said("prune", str(copy))
    assert not any((copy / name).exists() for name in (*folders, *files))
    assert latest_checkpoint(copy / "checkpoints") is not None


# ---------------------------------------------------------------- mistakes


OWN = "from agentrl_environments.calculator import Calculator\nclass E(Calculator):\n"
SOURCES = {
    "BROKEN": "import a_module_that_nobody_has\n",
    "SYNTAX": "def (\n",
    "EMPTY": f"{OWN}    @staticmethod\n    def problems(split): return []\n",
    "UNMADE": f"{OWN}    def __init__(self, *, sandbox): raise RuntimeError('no luck')\n",
    "SCRIPT": f"{OWN}    scripts = {{'oracle': None, 'guess': None}}\n",
}
MISTAKES = {
    "a key that nobody knows": (["run.stepz=1"], "did you mean steps"),
    "a value of the wrong type": (["run.steps=many"], "run.steps"),
    "a group of one": (["rollout.group_size=1"], "rollout.group_size"),
    "a section that is none": (["run=3"], "run"),
    "not a setting": (["steps"], "section.field=value"),
    "a number that is none": (["learner.lr=nan"], "learner.lr"),
    "a number without end": (["rollout.timeout_s=.inf"], "rollout.timeout_s"),
    "moments that are not below 1": (["learner.betas=[0.9, 1]"], "learner.betas.1"),
    "a share of nothing": (["warm_start.scripts={oracle: 0}"], "warm_start.scripts.oracle"),
    "no shares": (["warm_start.scripts={}"], "warm_start.scripts"),
    "a folder that no disk can hold": (['run.dir="a\\0b"'], "run.dir"),
    "a value nested beyond reason": ([f"environment.options={'[' * 3000}"], "not YAML"),
    "a device that nobody has": (["model.device=gpu"], "model.device"),
    "a device without numbers": (["model.device=meta"], "model.device"),
    "a tracker that nobody has": (["run.tracker=tensorbord"], "run.tracker"),
    "a tool format that nobody has": (["model.tool_format=xml"], "known: tags"),
    "a model that is not there": (["model.path=/no/such"], "no folder /no/such; `agentrl list"),
    "a model that nobody has": (["model.path=models/nobodys"], "no folder models/nobodys"),
    "a model that is a file": (["model.path=BROKEN"], "is a file"),
    "a plug-in that nobody has": (["environment.name=calculater"], "calculator"),
    "an option that it lacks": (["environment.options={digitz: 1}"], "digits"),
    "an option out of range": (["environment.options={digits: 99}"], "digits"),
    "a sandbox that nobody has": (["sandbox.name=bwarp"], "bwrap"),
    "a script that it lacks": (["warm_start.scripts={orakle: 1}"], "orakle"),
    "actions longer than the context": (["sampling.max_action_tokens=96"], "context_tokens"),
    "an algorithm that nobody has": (["algorithm.preset=grpoo"], "grpo"),
    "sampling that cuts the support": (["sampling.top_p=0.9"], "top_p"),
    "a file that fails to import": (["environment.name=BROKEN"], "a_module_that_nobody_has"),
    "a file that is no Python": (["environment.name=SYNTAX"], "line 1"),
    "an environment that can't be made": (["environment.name=UNMADE"], "no luck"),
    "a script that is none": (["environment.name=SCRIPT"], "oracle is not a function"),
    "no problems": (["environment.name=EMPTY", "environment.options={}"], "problem"),
}


@pytest.fixture(scope="module")
def authors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment files of `SOURCES`, in one place: a process imports a name once."""
    folder = tmp_path_factory.mktemp("authors")
    for name, source in SOURCES.items():
        (folder / f"mistaken_{name.lower()}.py").write_text(source)
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(
    mistake: str, authors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, expected = MISTAKES[mistake]
    for name in SOURCES:
        overrides = [
            o.replace(name, str(authors / f"mistaken_{name.lower()}.py")) for o in overrides
        ]
    code = cli(["train", QUICKSTART, "--quiet", *settings(f"run.dir={tmp_path / 'r'}", *overrides)])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert [line for line in err.splitlines() if line.startswith("error: ")] == err.splitlines()
    assert len(err.splitlines()) == 1 and expected in err


def test_prompts_over_the_context_are_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("engine.context_tokens=16", "sampling.max_action_tokens=8", "warm_start.steps=0")
    options = "environment.options={digits: 6, count: 20}"
    code = cli(["train", QUICKSTART, "--quiet", *settings(f"run.dir={tmp_path}", *small, options)])
    err = capsys.readouterr().err
    assert code == 2 and "context_tokens (16): (" in err and "Traceback" not in err
    assert not (tmp_path / "trajectories").exists(), "found before anything was sampled"


@pytest.mark.parametrize(
    ("name", "grading", "said"),
    [
        ("raises", "raise KeyError('lost the key')", "lost the key"),
        ("gives_nan", "return [Verdict(reward=float('nan'))] * len(episodes)", "finite"),
        ("gives_nothing", "return None", "NoneType"),
        ("gives_too_few", "return [Verdict(reward=1.0)]", "1 verdicts for 4 episodes"),
    ],
)
def test_a_verifier_that_fails_is_counted_and_stops_the_run(
    name: str, grading: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / f"{name}_env.py"
    own.write_text(
        "from agentrl_environments.calculator import Calculator\n"
        "from agentrl.types import Verdict\n"
        "class Fails:\n"
        f"    async def grade(self, problem, episodes, sandboxes): {grading}\n"
        "class E(Calculator):\n"
        "    verifier = Fails()\n"
    )
    where = settings(
        f"run.dir={tmp_path / 'r'}", f"environment.name={own}", "run.eval_every=0",
        "warm_start.steps=0",
    )  # fmt: skip
    code = cli(["train", QUICKSTART, "--quiet", *where])
    err = capsys.readouterr().err
    assert code == 3 and "8 of 8 episodes" in err and said in err and "Traceback" not in err
    (group, _) = ParquetStore(tmp_path / "r" / "trajectories").read(version=0)
    assert [v.reward for v in group.verdicts] == [None] * 4, "nothing is lost, nothing is made up"


# What is done to a copy of a model, and what the error says.
MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (lambda m: os.truncate(m / "model.safetensors", 1000), "SafetensorError"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "model.safetensors"),
    "no configuration": (lambda m: (m / "config.json").unlink(), "no config.json"),
    "no known kind": (lambda m: (m / "config.json").write_text("{}"), "model_type"),
    "no tokenizer": (lambda m: (m / "tokenizer.json").write_text("{}"), "KeyError"),
    "a broken template": (
        lambda m: (m / "chat_template.jinja").write_text("{% if %}"),
        "chat template",
    ),
}


@pytest.mark.parametrize("damage", MODELS)
def test_a_damaged_model_is_one_line(
    damage: str, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    harm, said = MODELS[damage]
    copy = tmp_path / "model"
    shutil.copytree(trained / "warm_start", copy)
    harm(copy)
    assert cli(["rollout", QUICKSTART, "--quiet", "--model", str(copy), *settings()]) == 2
    out, err = capfd.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert out == "" and said in line and "itself failed" not in err


# A command line with {run} for a run, {empty} for a folder and {file} for a file, and the error.
ELSEWHERE = {
    "show {empty}": "no trajectories",
    "show {file}": "no step file",
    "show {run} --step 99": "steps 0 to 1",
    "show {run} --task nobody": "no task nobody",
    "show {run} --member 99": "member 99",
    "report {empty}": "no run directory",
    "report {run} --out {empty}": "Is a directory",
    "report {run} --out {empty}/no/r.html": "No such file",
    "check run {empty}": "no run directory",
    "check template {empty}": "no config.json",
    "check template {file}": "is a file",
    "check env nobody": "known environments",
    "prune {empty}": "no run directory",
    "prune {file}": "no such run directory",
    "list things": "known are",
    "init a-b --folder {empty}": "module name",
    "init class --folder {empty}": "module name",
    "init json --folder {empty}": "already is a module",
    "init x --folder {file}": "no such folder",
    "fetch nobody --folder {empty}": "smollm2-135m",
    "fetch smollm2-135m --folder {file}": "File exists",
    "train {empty}": "Is a directory",
    "train {file}": "sections",
    "train {empty}/none.py": "no such environment file",
    "eval {file} --split dev": "train or test",
    "eval {file} --problems 0": "greater than or equal to 1",
    "rollout": "Missing argument",
    "trian": "Did you mean 'train'",
    "doctor --quite": "--quite",
}


@pytest.mark.parametrize("line", ELSEWHERE)
def test_a_mistake_in_any_verb_is_one_line(
    line: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    places = {"run": trained, "empty": tmp_path / "empty", "file": tmp_path / "file"}
    assert cli([part.format(**places) for part in line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1, err
    assert err.startswith("error: ") and ELSEWHERE[line] in err
