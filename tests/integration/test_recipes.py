"""Every recipe loads, is planned, and takes a step with the tiny model and rows made here."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl import build
from agentrl.cli.app import app
from agentrl.cli.display import QuietReporter
from agentrl.config import load_config
from agentrl.metrics import read_metrics

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
TINY = (
    "model.path=tiny", "model.tiny_layers=1", "model.tiny_hidden=32", "model.dtype=float32",
    "run.steps=1", "run.eval_every=0", "warm_start.steps=0", "engine.name=transformers",
    "engine.context_tokens=2048",
    "sampling.max_action_tokens=12", "rollout.groups=2", "rollout.group_size=3",
    "rollout.max_turns=2", "sandbox.name=bwrap", "learner.minibatches=1", "learner.lr=1e-3",
)  # fmt: skip
ROWS = {
    "math": [{"question": f"{n} + 1?", "problem": f"{n} + 1?", "answer": f"so\n#### {n + 1}"}
             for n in range(20)],
    "corpus": [{"id": str(n), "contents": f"Town {n}\nThe river is called Wem{n}."}
               for n in range(9)],
    "questions": [{"question": f"The river of Town {n}?", "golden_answers": [f"Wem{n}"]}
                  for n in range(9)],
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    for name, given in ROWS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in given))
    return {name: folder / f"{name}.jsonl" for name in ROWS}


def offline(recipe: Path, rows: dict[str, Path]) -> list[str]:
    """What stands in for data and models that have to be fetched."""
    environment = load_config(recipe).environment
    options = environment.options
    if "train" in options:
        return [f"environment.options.train={rows['math']}", "environment.options.test=''"]
    if "corpus" in options:
        words = {"corpus": rows["corpus"], "questions": rows["questions"], "retriever": "bm25"}
        return [f"environment.options.{name}={value}" for name, value in words.items()]
    return ["environment.options.count=6"] if environment.name == "bugfix" else []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_planned_and_takes_a_step(
    recipe: Path, rows: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["plan", str(recipe), "--gpu", "h200", "--gpus", "8", "--json"]
    planned = CliRunner().invoke(app, arguments)
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["fits"]
    given = [*TINY, *offline(recipe, rows), f"run.dir={tmp_path}"]
    build.train(load_config(recipe, given), reporter=QuietReporter())
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["version"] == 1 and row["faults"] == 0 and row["episodes"] >= 6


def test_the_docs_name_every_recipe() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    told = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert told == {path.stem for path in RECIPES}
