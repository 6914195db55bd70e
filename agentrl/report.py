"""The report of a run: one HTML page that needs no network, with curves, configuration, episodes.

Each figure is an SVG image inside the page, with a line of text that says what it shows. Works on
runs that are going on, and on what a killed run left.
"""

import base64
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from jinja2 import Environment

from agentrl.atomic import whole_file
from agentrl.errors import ConfigError, RecordError
from agentrl.metrics import read_metrics
from agentrl.show import Line, describe, find_decode

Row = Mapping[str, Any]
Points = tuple[list[float], list[float]]

# Okabe and Ito's palette: distinguishable with any colour vision. Lines differ in dash, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MAX_TRAJECTORY_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a figure: its metric, whose name is its label, from `kind` rows."""

    metric: str
    label: str
    kind: str = "step"
    band: str = ""
    """The metric that holds its standard error; drawn as a band of 1.96 times it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot: a title, curves over the step, or a metric that holds counts by name."""

    title: str
    curves: Sequence[Curve] = ()
    shares_of: str = ""


FIGURES: Sequence[Figure] = (
    Figure(
        title="Success",
        curves=(
            Curve(metric="success_rate", label="training episodes"),
            Curve(metric="success", label="held-out problems", kind="eval", band="stderr"),
        ),
    ),
    Figure(
        title="Reward",
        curves=(Curve(metric="reward_mean", label="mean reward", band="reward_stderr"),),
    ),
    Figure(title="Entropy (nats)", curves=(Curve(metric="entropy", label="entropy"),)),
    Figure(
        title="Engine against learner",
        curves=(
            Curve(metric="mismatch_k3", label="k3 (nats)"),
            Curve(metric="mismatch_max", label="largest difference (nats)"),
        ),
    ),
    Figure(title="KL to the reference (nats)", curves=(Curve(metric="kl_ref", label="KL"),)),
    Figure(title="Clipped tokens (share)", curves=(Curve(metric="clip_share", label="clipped"),)),
    Figure(title="Gradient norm", curves=(Curve(metric="grad_norm", label="before clipping"),)),
    Figure(
        title="Tokens of a step",
        curves=(
            Curve(metric="action_tokens", label="sampled by the model"),
            Curve(metric="observation_tokens", label="observations"),
        ),
    ),
    Figure(
        title="Seconds of a step",
        curves=(
            Curve(metric="sample_s", label="sample and grade"),
            Curve(metric="update_s", label="update"),
            Curve(metric="publish_s", label="publish"),
        ),
    ),
    Figure(
        title="Groups with signal, and faults",
        curves=(
            Curve(metric="groups_with_signal", label="groups with signal"),
            Curve(metric="faults", label="faults"),
        ),
    ),
    Figure(title="How episodes ended (share)", shares_of="endings"),
)


def write_report(run: Path, out: Path) -> None:
    """Write the report of a run to `out`, whole or not at all.

    Raises ConfigError when matplotlib is missing, RecordError when there is nothing to show yet.
    """
    rows = read_metrics(run / "metrics.jsonl")
    if not rows:
        raise RecordError(f"{run} has no metrics yet: nothing to report")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    text = page.render(
        run=run.name,
        summary=_summary(rows),
        figures=[f for figure in FIGURES if (f := _figure(figure, rows))],
        config=_text_of(run / "config.yaml"),
        provenance=_text_of(run / "provenance.json"),
        episodes=list(_episodes(run)),
    )
    with whole_file(out) as file:
        file.write(text.encode(errors="replace"))


def _summary(rows: Sequence[Row]) -> Sequence[tuple[str, str]]:
    steps = [row for row in rows if row["kind"] == "step"]
    evals = [row for row in rows if row["kind"] == "eval"]
    seconds = [_number(row.get(name)) or 0.0 for row in steps for name in ("sample_s", "update_s")]
    out = [("steps", str(len(steps))), ("time in steps", f"{sum(seconds) / 60:.1f} min")]
    for label, chosen, metric in (
        ("held-out success", evals, "success"),
        ("training success", steps, "success_rate"),
        ("mean reward", steps, "reward_mean"),
    ):
        values = _points(chosen, metric)[1]
        if values:
            out.append((label, f"{values[0]:.3f} at first, {values[-1]:.3f} at last"))
    faults = sum(_number(row.get("faults")) or 0 for row in steps)
    return [*out, ("faults", f"{faults:.0f}")]


def _figure(figure: Figure, rows: Sequence[Row]) -> Mapping[str, str] | None:
    """A figure as an image and a sentence, or None when the run has no such numbers."""
    pairs = _share_curves(figure, rows) if figure.shares_of else _curves(figure, rows)
    drawn = [(label, points, band) for label, points, band in pairs if points[0]]
    if not drawn:
        return None
    said = [f"{label} from {ys[0]:.3g} to {ys[-1]:.3g}" for label, (_, ys), _ in drawn]
    svg = _draw(figure.title, drawn)
    return {
        "title": figure.title,
        "image": f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}",
        "says": f"{figure.title}: {'; '.join(said)}",
    }


Drawn = tuple[str, Points, list[float]]


def _curves(figure: Figure, rows: Sequence[Row]) -> Iterator[Drawn]:
    for curve in figure.curves:
        chosen = [row for row in rows if row["kind"] == curve.kind]
        chosen = [row for row in chosen if _number(row.get(curve.metric)) is not None]
        band = [_number(row.get(curve.band)) or 0.0 for row in chosen] if curve.band else []
        yield curve.label, _points(chosen, curve.metric), band


def _share_curves(figure: Figure, rows: Sequence[Row]) -> Iterator[Drawn]:
    """One curve for each name of a metric that holds counts: its share of the step's."""
    counts = [
        (float(row["step"]), row[figure.shares_of])
        for row in rows
        if row["kind"] == "step" and isinstance(row.get(figure.shares_of), dict)
    ]
    for name in sorted({name for _, by_name in counts for name in by_name}):
        xs, ys = list[float](), list[float]()
        for step, by_name in counts:
            total = sum(_number(value) or 0.0 for value in by_name.values())
            if total > 0:
                xs.append(step)
                ys.append((_number(by_name.get(name)) or 0.0) / total)
        yield name, (xs, ys), []


def _points(rows: Sequence[Row], metric: str) -> Points:
    xs, ys = list[float](), list[float]()
    for row in rows:
        value = _number(row.get(metric))
        if value is not None:
            xs.append(float(row["step"]))
            ys.append(value)
    return xs, ys


def _number(value: Any) -> float | None:
    """A finite number, or None for everything else that a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if isfinite(value) else None
    except OverflowError:
        return None


def _draw(title: str, curves: Sequence[Drawn]) -> bytes:
    """A plot as SVG."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ConfigError("the report needs matplotlib: pip install matplotlib") from None
    canvas = Canvas(figsize=(5.2, 3.0), layout="constrained")
    axes = canvas.add_subplot()
    for number, (label, (xs, ys), band) in enumerate(curves):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        mark = "o" if len(xs) <= 40 else ""
        axes.plot(xs, ys, color=colour, linestyle=dash, marker=mark, markersize=3, label=label)
        if band:
            low = [y - 1.96 * e for y, e in zip(ys, band, strict=True)]
            high = [y + 1.96 * e for y, e in zip(ys, band, strict=True)]
            axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if "share" in title or title == "Success":
        axes.set_ylim(-0.03, 1.03)
    if len(curves) > 1:
        axes.legend(fontsize="small")
    out = io.BytesIO()
    canvas.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _episodes(run: Path) -> Iterator[Mapping[str, Any]]:
    """The first group of the first and of the last step that can be read, as lines."""
    folder = run / "trajectories"
    if not folder.is_dir():
        return
    try:
        from agentrl.store import ParquetStore
    except ImportError:
        return
    store = ParquetStore(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        versions = store.versions()
    for step in sorted({*versions[:1], *versions[-1:]}):
        try:
            decode = find_decode(run, store.metadata(step))
            for group in islice(store.read(version=step), 1):
                member = group.trajectories[0].member if group.trajectories else None
                lines = _shortened(describe(group, decode=decode, member=member))
                yield {"title": f"step {step}, task {group.task_id}", "lines": lines}
        except RecordError as error:
            yield {"title": f"step {step}: {error}", "lines": []}


def _shortened(lines: Iterator[Line]) -> Sequence[Mapping[str, str]]:
    shown = [
        {"ink": str(line.ink), "text": str(line)} for line in islice(lines, MAX_TRAJECTORY_LINES)
    ]
    if next(lines, None) is not None:
        shown.append({"ink": "fact", "text": "… (`agentrl show` has the rest)"})
    return shown


def _text_of(path: Path) -> str:
    read: Callable[[], str] = lambda: path.read_text(encoding="utf-8", errors="replace")  # noqa: E731
    try:
        return read()
    except OSError:
        return ""


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ run }} - agentrl report</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid #ddd; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: 1rem; }
figure { margin: 0; }
img { width: 100%; height: auto; }
figcaption { font-size: .85rem; color: #444; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; white-space: pre-wrap;
      overflow-wrap: anywhere; font-size: .85rem; }
.head { font-weight: bold; }
.observation { color: #00507d; }
.model { color: #00593f; font-weight: bold; }
.fact { color: #555; }
.bad { color: #a32a00; }
summary { cursor: pointer; font-weight: bold; }
</style>
</head>
<body>
<h1>{{ run }}</h1>
<table>
{% for name, value in summary %}
<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table>
<h2>Curves</h2>
<div class="figures">
{% for figure in figures %}
<figure><img src="{{ figure.image }}" alt="{{ figure.says }}">
<figcaption>{{ figure.says }}</figcaption></figure>
{% endfor %}
</div>
<p>Bands are 95 % intervals of the mean.</p>
{% if episodes %}
<h2>Episodes</h2>
<p>Lines marked &gt; were written by the model, lines marked &lt; were shown to it.</p>
{% for episode in episodes %}
<h3>{{ episode.title }}</h3>
<pre>{% for line in episode.lines %}
<span class="{{ line.ink }}">{{ line.text }}</span>
{% endfor %}</pre>
{% endfor %}
{% endif %}
{% if config %}
<h2>Configuration</h2>
<details><summary>config.yaml</summary><pre>{{ config }}</pre></details>
{% endif %}
{% if provenance %}
<details><summary>provenance.json</summary><pre>{{ provenance }}</pre></details>
{% endif %}
</body>
</html>
"""
