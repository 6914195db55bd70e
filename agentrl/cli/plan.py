"""`agentrl plan`: what a run will take, before it is started."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agentrl.cli.options import Json, Set, Source, config_of, echo_json, existing_run

if TYPE_CHECKING:
    from agentrl.planning import Estimate

Tokens = Annotated[float | None, typer.Option(min=0, help="mean tokens of an episode")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(plan)


def plan(
    source: Source,
    set_: Set = None,
    gpus: int = typer.Option(1, min=1, help="accelerators in all"),
    gpu: str = typer.Option("cpu", help="cpu (this machine, tried), l40s, a100, h100, h200, b200"),
    engine_gpus: int = typer.Option(0, min=0, help="of them for the engine alone (0: shared)"),
    like: Path | None = typer.Option(
        None, metavar="RUN", help="episodes as long as in this run; beside what it took"
    ),
    prompt: Tokens = None,
    actions: Tokens = None,
    observations: Tokens = None,
    turns: float | None = typer.Option(None, min=1, help="mean actions of an episode"),
    tool_s: float | None = typer.Option(None, min=0, help="mean wait for tools in a turn"),
    price: float | None = typer.Option(None, min=0, help="dollars an hour and accelerator"),
    json_: Json = False,
) -> None:
    """Predict step time, memory, sandboxes and price of a run, and what bounds it.

    Without --like or lengths, every episode is as long as the configuration allows: an upper bound.
    """
    from agentrl.planning import (
        Allocation,
        estimate,
        find_machine,
        find_shape,
        longest_workload,
        workload_of_run,
    )

    config = config_of(source, set_)
    allocation = Allocation(gpus=gpus, engine_gpus=engine_gpus)
    workload, measured = workload_of_run(existing_run(like)) if like else (None, {})
    given = {
        "prompt": prompt,
        "actions": actions,
        "observations": observations,
        "turns": turns,
        "tool_s": tool_s,
    }
    workload = replace(
        workload or longest_workload(config), **{k: v for k, v in given.items() if v is not None}
    )
    shape = find_shape(config.model)
    found = estimate(config, shape, find_machine(gpu, price=price), allocation, workload)
    if json_:
        echo_json(
            _row(found, measured)
            | {
                "parameters": shape.parameters,
                "episode_tokens": workload.tokens,
                "run_usd": found.step_price * config.run.steps,
            }
        )
        return
    console = Console()
    console.print(
        f"{shape.parameters / 1e6:,.0f}M weights, episodes of {workload.tokens:,.0f} tokens "
        f"({workload.prompt:,.0f} prompt, {workload.actions:,.0f} sampled, "
        f"{workload.observations:,.0f} observed), {gpus} x {gpu}"
    )
    _print(console, found, measured)
    if found.step_price:
        total = found.step_price * config.run.steps
        console.print(
            f"price: ${found.step_price:.3g} a step, ${total:,.0f} for {config.run.steps}"
        )


def _row(found: "Estimate", measured: Mapping[str, float]) -> dict[str, Any]:
    return {
        "parts": {
            name: {"seconds": part.seconds, "bound": part.bound, "measured": measured.get(name)}
            for name, part in found.parts.items()
        },
        "step_s": found.step_s,
        "tokens_per_s": found.tokens_s,
        "bound": found.bound,
        "learner_gb": found.learner_bytes / 1e9,
        "engine_gb": found.engine_bytes / 1e9,
        "device_gb": found.device_bytes / 1e9,
        "fits": found.fits,
        "tensor_parallel": found.tensor_parallel,
        "live_sequences": found.live_sequences,
        "sandboxes": found.sandboxes,
        "tool_cores": found.tool_cores,
        "step_usd": found.step_price,
    }


def _print(console: Console, found: "Estimate", measured: Mapping[str, float]) -> None:
    table = Table("part", "predicted s", *(["measured s"] if measured else []), "bound by")
    for name, part in found.parts.items():
        seen = [f"{measured[name]:.3g}"] if measured else []
        table.add_row(name, f"{part.seconds:.3g}", *seen, part.bound)
    console.print(table)
    used = f"learner {found.learner_bytes / 1e9:.3g}, engine {found.engine_bytes / 1e9:.3g}"
    fits = "fits" if found.fits else "does NOT fit"
    for line in (
        f"step {found.step_s:.3g} s, {found.tokens_s:,.0f} sampled tokens/s; {found.bound}",
        f"memory of a device: {used} of {found.device_bytes / 1e9:.3g} GB: {fits}",
        f"engine: {found.tensor_parallel} device(s) a replica, {found.live_sequences} sequences",
        f"sandboxes: {found.sandboxes} at once, tools keep up to {found.tool_cores:.3g} busy",
    ):
        console.print(line)
