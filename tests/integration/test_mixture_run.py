"""A run over a mixture of a file and a built-in environment, with a curriculum."""

import re
from pathlib import Path
from typing import Any

import yaml
from small_run import QUICKSTART, SMALL

from agentrl import build
from agentrl.cli.display import QuietReporter
from agentrl.config import load_config
from agentrl.metrics import read_metrics
from agentrl.store import ParquetStore

DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def documented() -> tuple[str, str, dict[str, Any]]:
    """The page's file environment, its mixture, and its options."""
    text = DOCS.read_text(encoding="utf-8")
    file, mixture = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (options,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    return file, mixture, yaml.safe_load(options)["environment"]["options"]


def test_the_documented_mixture_trains_and_resumes(tmp_path: Path) -> None:
    file, mixture, options = documented()
    assert set(options) == {"train", "prompt", "reference"}
    (tmp_path / "mine_file.py").write_text(file)
    data = tmp_path / "sums.csv"
    data.write_text("q,a\n" + "".join(f"{n}+1,{n + 1}\n" for n in range(40)))
    mixed = mixture.replace('math="python-math"', f"sums='{tmp_path}/mine_file.py:Mine'")
    (tmp_path / "both_mixed.py").write_text(mixed)
    sums = f"{{train: {data}, prompt: q, reference: a}}"
    each = f"{{sums: {sums}, calculator: {{digits: 1, count: 50}}}}"
    settings = [s for s in SMALL if not s.startswith("environment")]
    more = [
        "warm_start.scripts={'null': 1}", f"environment.name={tmp_path}/both_mixed.py",
        f"environment.options={{each: {each}, weights: {{sums: 1}}, pass_band: [0.1, 0.9]}}",
        "rollout.groups=4",
    ]  # fmt: skip
    for folder, steps in (("run", 2), ("run", 3), ("unbroken", 3)):
        there = [f"run.dir={tmp_path / folder}", f"run.steps={steps}"]
        build.train(load_config(QUICKSTART, [*settings, *more, *there]), reporter=QuietReporter())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    families = {name for r in rows if r["kind"] == "step" for name in r["family_success"]}
    assert families == {"calculator", "sums"}
    (evaluated,) = [
        set(r["family_success"]) for r in rows if r["step"] == 2 and r["kind"] == "eval"
    ]
    assert evaluated == families
    drawn, unbroken = (
        [g.task_id for g in ParquetStore(tmp_path / folder / "trajectories").read()]
        for folder in ("run", "unbroken")
    )
    assert len(drawn) == 12
    assert drawn == unbroken, "the curriculum follows from the record"
