"""Tokens per second of our engines beside transformers' own batched `generate`.

    python benchmarks/engine.py [--engines transformers,vllm] [--layers 4] [--hidden 128]
                                [--path models/smollm2-135m] [--repeats 3] [--device cpu]

All serve the same random Llama (or the model at a path), the same prompts and the same number of
new tokens, in turns within one process. "One action" is what suits `generate` best: one batch,
prompts and actions of equal length, so that nothing is padded and no row waits. "Episodes" are
what agents do: several turns with observations in between and actions of uneven length; `generate`
then runs one batch per turn over the whole left-padded histories, until its longest row is done.
Every repeat starts with an empty cache, the engine's prefill counts, and only tokens that somebody
asked for count.
"""

import asyncio
import copy
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentrl.plugins import find_engine
from agentrl.protocols import InferenceEngine
from agentrl.types import Sampling

VOCAB = 512
TURNS = 3
OBSERVATION = 24
CONCURRENT = (1, 8, 32, 64)


def prompts_of(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(count).integers(1, VOCAB, (count, length)).tolist()


def llama(layers: int, hidden: int, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 32),
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval().to(device)


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int) -> Tensor:
    """One batch of `generate`: sampling, left padding, no stop token. Returns the new ids."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).to(ids.device)
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0,
        max_new_tokens=new, min_new_tokens=new, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return out[:, width:]


def wanted(episode: int, turn: int, new: int) -> int:
    """How long this action is: a third, two thirds or all of an equal share of `new`."""
    return max(1, new * (1 + (episode + turn) % 3) // (3 * TURNS))


def episodes_by_generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int) -> int:
    """All episodes in lockstep; returns the tokens that were asked for."""
    histories, total = [list(p) for p in prompts], 0
    for turn in range(TURNS):
        lengths = [wanted(n, turn, new) for n in range(len(prompts))]
        out = generate(model, histories, max(lengths)).tolist()
        for history, row, length in zip(histories, out, lengths, strict=True):
            history += row[:length] + list(range(1, OBSERVATION + 1))
            total += length
    return total


async def episodes(engine: InferenceEngine, prompts: Sequence[Sequence[int]], new: int) -> int:
    """All episodes at once; returns the tokens that were asked for."""

    async def episode(number: int) -> int:
        history, total = list(prompts[number]), 0
        for turn in range(TURNS):
            length = wanted(number, turn, new)
            action = await sample(engine, history, length, number)
            history += [*action, *range(1, OBSERVATION + 1)]
            total += length
        return total

    return sum(await asyncio.gather(*map(episode, range(len(prompts)))))


async def sample(
    engine: InferenceEngine, history: Sequence[int], new: int, number: int
) -> tuple[int, ...]:
    sampling = Sampling(max_tokens=new, stop_ids=frozenset(), seed=number + len(history))
    action = await engine.sample(history, sampling, session=str(number))
    assert len(action.token_ids) == new
    return action.token_ids


async def measure(
    names: Sequence[str], plain: PreTrainedModel, shape: tuple[int, int], repeats: int
) -> tuple[dict[int, list[float]], dict[str, float]]:
    """By concurrency, tokens/s with one action then with episodes: of generate and each engine.

    The second result is each engine's seconds to take and serve the whole weights, by name.
    """
    length, new = shape
    sizes = {
        "max_concurrent": max(CONCURRENT),
        "context_tokens": length + 2 * new + TURNS * OBSERVATION,
    }
    table, publish = dict[int, list[float]](), dict[str, float]()
    async with AsyncExitStack() as stack:
        engines: list[Any] = [
            await stack.enter_async_context(find_engine(name)(copy.deepcopy(plain), **sizes))
            for name in names
        ]
        for count in track(CONCURRENT, "measuring", console=Console(stderr=True)):
            prompts = prompts_of(count, length)
            speeds = [list[float]() for _ in range(2 + 2 * len(engines))]
            for _ in range(repeats + 1):
                clock = Laps(speeds)
                generate(plain, prompts, new)
                clock.lap(count * new)
                for engine in engines:
                    await forget(engine, clock)
                    await asyncio.gather(
                        *(sample(engine, p, new, n) for n, p in enumerate(prompts))
                    )
                    clock.lap(count * new)
                clock.lap(episodes_by_generate(plain, prompts, new))
                for engine in engines:
                    await forget(engine, clock)
                    clock.lap(await episodes(engine, prompts, new))
            table[count] = [median(column[1:]) for column in speeds]  # the first run warms up
        for name, engine in zip(names, engines, strict=True):
            began = time.perf_counter()
            await engine.load(plain.named_parameters(), version=1)
            publish[name] = time.perf_counter() - began
    return table, publish


async def forget(engine: InferenceEngine, clock: "Laps") -> None:
    """Have an engine drop every prefix, outside of the measured time."""
    async with engine.released():
        pass
    clock.restart()


class Laps:
    """Turns laps of so many tokens into tokens/s, each into the next column."""

    def __init__(self, columns: Sequence[list[float]]) -> None:
        self._columns = iter(columns)
        self.restart()

    def restart(self) -> None:
        self._began = time.perf_counter()

    def lap(self, tokens: int) -> None:
        next(self._columns).append(tokens / (time.perf_counter() - self._began))
        self.restart()


def main(
    engines: Annotated[str, typer.Option(help="engines, by name")] = "transformers",
    path: Annotated[str, typer.Option(help="model folder instead of a random Llama")] = "",
    layers: Annotated[int, typer.Option(help="layers of the model")] = 4,
    hidden: Annotated[int, typer.Option(help="width of the model")] = 128,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 64,
    new: Annotated[int, typer.Option(help="tokens sampled per prompt")] = 128,
    repeats: Annotated[int, typer.Option(help="runs of which the median counts")] = 3,
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads of torch")] = 1,
) -> None:
    """Measure and print one table."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # what vLLM goes by
    torch.set_num_threads(threads)
    plain = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(device)
        if path
        else llama(layers, hidden, device)
    )
    names = engines.split(",")
    rows, publish = asyncio.run(measure(names, plain, (prompt, new), repeats))
    size = sum(p.numel() for p in plain.parameters()) / 1e6
    table = Table(
        title=f"tokens/s, {size:.1f}M parameters, {prompt}+{new} tokens, {device}, "
        f"{threads} thread(s), median of {repeats}"
    )
    table.add_column("concurrent", justify="right")
    for kind in ("", "episodes: "):
        for name in ("generate", *names):
            table.add_column(f"{kind}{name}", justify="right")
    for count, speeds in rows.items():
        half = len(speeds) // 2
        cells = [*_beside(speeds[:half]), *_beside(speeds[half:])]
        table.add_row(str(count), *cells)
    Console(width=140).print(table)
    print(*(f"{name}: weights published in {s:.2f} s" for name, s in publish.items()), sep="\n")


def _beside(speeds: Sequence[float]) -> list[str]:
    """The first speed, then each other with its ratio to it."""
    first, *others = speeds
    return [f"{first:,.0f}", *(f"{speed:,.0f} ({speed / first:.2f})" for speed in others)]


if __name__ == "__main__":
    typer.run(main)
