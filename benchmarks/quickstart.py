"""The main job for several seeds: a table of what was learned, and the curves as a picture.

    python benchmarks/quickstart.py --seeds 0 1 2 --picture docs/images/quickstart.svg

Every seed is a run of its own, from random weights: warm start, training, evaluation. Seconds are
wall clock for all of it. Runs that are in the folder already are refused, not reused.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl import build
from agentrl.cli.display import reporter_for
from agentrl.config import load_config
from agentrl.metrics import read_metrics

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Success on held-out problems over the steps of one seed."""

    seed: int
    seconds: float
    steps: Sequence[int]
    success: Sequence[float]
    stderr: Sequence[float]


def measure(seed: int, folder: Path, overrides: Sequence[str]) -> Curve:
    """One run, from nothing."""
    run = folder / f"seed-{seed}"
    config = load_config(CONFIG, [f"run.dir={run}", f"run.seed={seed}", *overrides])
    began = time.perf_counter()
    with reporter_for(quiet=False, as_json=False) as reporter:
        build.train(config, reporter=reporter, resume=False)
    seconds = time.perf_counter() - began
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "eval"]
    return Curve(
        seed=seed,
        seconds=seconds,
        steps=[row["step"] for row in rows],
        success=[row["success"] for row in rows],
        stderr=[row["stderr"] for row in rows],
    )


def table(curves: Sequence[Curve]) -> str:
    """Markdown: a line a seed."""
    lines = [
        "| seed | after the warm start | after GRPO | minutes in all |",
        "|---|---|---|---|",
    ]
    for c in curves:
        first, last = (f"{c.success[i]:.3f} ± {c.stderr[i]:.3f}" for i in (0, -1))
        lines.append(f"| {c.seed} | {first} | {last} | {c.seconds / 60:.1f} |")
    return "\n".join(lines)


def draw(curves: Sequence[Curve], out: Path) -> None:
    """Success over steps, a line a seed, with a band of one standard error."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for curve, dash in zip(curves, ["-", "--", "-.", ":"] * len(curves), strict=False):
        low, high = (
            [s + sign * e for s, e in zip(curve.success, curve.stderr, strict=True)]
            for sign in (-1, 1)
        )
        (line,) = axes.plot(curve.steps, curve.success, dash, label=f"seed {curve.seed}")
        axes.fill_between(curve.steps, low, high, alpha=0.15, color=line.get_color())
    axes.set(xlabel="GRPO step", ylabel="success on held-out problems", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="svg", metadata={"Date": None})


def main() -> None:
    """Read the arguments, run, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dir", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--set", action="append", default=[], help="section.field=value")
    arguments = parser.parse_args()
    curves = [measure(seed, arguments.dir, arguments.set) for seed in arguments.seeds]
    print(table(curves))
    if arguments.picture:
        draw(curves, arguments.picture)


if __name__ == "__main__":
    main()
