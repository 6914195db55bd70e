"""What the observation mask is for: the same run with it and without it, as a picture.

    python benchmarks/observation_mask.py --picture docs/images/observation-mask.svg

Both runs start from one warm start and differ in nothing but the tokens in the loss: the model's
own, or everything after the prompt, as if the model had written what the tools said. The
behaviour logprobs are the learner's own in both, since nobody sampled the observations.
"""

import argparse
import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from agentrl import build
from agentrl.cli.display import reporter_for
from agentrl.config import RunConfig, load_config
from agentrl.learning.batch import Batch
from agentrl.metrics import read_metrics
from agentrl.protocols import Learner
from agentrl.train import train

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
CURVES = {"success": "success on held-out problems", "entropy": "entropy of trained tokens (nats)"}


class Unmasked:
    """A learner that takes observations for actions: the fault that the mask prevents."""

    def __init__(self, inner: Learner) -> None:
        self._inner = inner

    @property
    def version(self) -> int:
        """How many updates it has taken."""
        return self._inner.version

    def update(self, batch: Batch) -> Mapping[str, float]:
        """One step on everything that follows the prompt, with the trajectory's advantage."""
        return self._inner.update(unmask(batch))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights to publish, by name."""
        return self._inner.weights()

    def logprobs(self, token_ids: Sequence[int], temperature: float) -> Sequence[float]:
        """See `protocols.Learner`."""
        return self._inner.logprobs(token_ids, temperature)


def unmask(batch: Batch) -> Batch:
    """Every token after a row's first action token becomes an action token of the same turn."""
    mask, advantages, turns = (
        tensor.clone() for tensor in (batch.action_mask, batch.advantages, batch.turns)
    )
    end = 0
    for length in batch.lengths.tolist():
        row, end = slice(end, end + length), end + length
        own = batch.action_mask[row].nonzero().flatten()
        if not len(own):
            continue
        first = row.start + int(own[0])
        mask[first:end] = True
        advantages[first:end] = batch.advantages[first]
        turns[first:end] = torch.cummax(batch.turns[first:end], 0).values
    return replace(batch, action_mask=mask, advantages=advantages, turns=turns)


async def run_without_mask(config: RunConfig) -> None:
    """The run of `config`, its learner's mask taken off."""
    with reporter_for(quiet=False, as_json=False) as reporter:
        async with build.open_run(config, reporter=reporter) as run:
            run.learner = Unmasked(run.learner)
            await train(run)


def draw(runs: Mapping[str, Path], out: Path) -> None:
    """Success and entropy, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        for (name, folder), dash in zip(runs.items(), ("-", "--"), strict=True):
            rows = [row for row in read_metrics(folder / "metrics.jsonl") if metric in row]
            axes.plot([r["step"] for r in rows], [r[metric] for r in rows], dash, label=name)
        axes.set(xlabel="GRPO step", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="svg", metadata={"Date": None})


def main() -> None:
    """Read the arguments, run both, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/mask"))
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="section.field=value")
    arguments = parser.parse_args()
    runs = {"observations masked": arguments.dir / "on", "mask off": arguments.dir / "off"}
    own = ("algorithm.proximal=recompute", "algorithm.mismatch=none")
    on, off = (
        load_config(CONFIG, [f"run.dir={folder}", *own, *arguments.set]) for folder in runs.values()
    )
    with reporter_for(quiet=False, as_json=False) as reporter:
        start = build.warm_start(on, reporter=reporter)
        shutil.copytree(start, off.run.dir / "warm_start")
        build.train(on, reporter=reporter, resume=False)
    asyncio.run(run_without_mask(off))
    for name, folder in runs.items():
        last = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "eval"][-1]
        print(f"{name}: {last['success']:.3f} after {last['step']} steps")
    draw(runs, arguments.picture)


if __name__ == "__main__":
    main()
