"""Tokens per second of the built-in engine beside transformers' own batched `generate`.

    python benchmarks/engine.py [--layers 4] [--hidden 128] [--repeats 3] [--device cpu]

Both serve the same random Llama, the same prompts and the same number of new tokens, in turns
within one process. `generate` gets what suits it best: one batch of equal prompts, each of the
same length, so that nothing is padded and no row waits for another. A third column runs episodes
of several turns, where the engine keeps prefixes and rows join and leave at any step.
"""

import asyncio
import time
from collections.abc import Sequence
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentrl.engines.transformers import TransformersEngine
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
def generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int) -> float:
    """Seconds for one batch of `generate`, sampling, no stop token."""
    ids = torch.tensor(prompts, device=model.device)
    began = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
        max_new_tokens=new, min_new_tokens=new, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    assert out.shape[1] == ids.shape[1] + new
    return time.perf_counter() - began


async def actions(
    engine: TransformersEngine, prompts: Sequence[Sequence[int]], new: int, run: str
) -> float:
    """Seconds until each prompt has one action."""
    began = time.perf_counter()
    done = await asyncio.gather(
        *(
            engine.sample(
                p, Sampling(max_tokens=new, stop_ids=frozenset(), seed=n), session=run + str(n)
            )
            for n, p in enumerate(prompts)
        )
    )
    assert all(len(a.token_ids) == new for a in done)
    return time.perf_counter() - began


async def episodes(
    engine: TransformersEngine, prompts: Sequence[Sequence[int]], new: int, run: str
) -> float:
    """Seconds until each prompt has `TURNS` actions of uneven length, observations in between."""

    async def episode(number: int, history: list[int]) -> int:
        sampled = 0
        for turn in range(TURNS):
            sampling = Sampling(
                max_tokens=max(1, new * (2 + (number + turn) % 3) // (3 * TURNS)),
                stop_ids=frozenset(),
                seed=number * TURNS + turn,
            )
            action = await engine.sample(history, sampling, session=run + str(number))
            history = [*history, *action.token_ids, *range(1, OBSERVATION + 1)]
            sampled += len(action.token_ids)
        return sampled

    began = time.perf_counter()
    total = sum(await asyncio.gather(*(episode(n, list(p)) for n, p in enumerate(prompts))))
    # Reported per `new * len(prompts)` tokens, like the other columns.
    return (time.perf_counter() - began) * new * len(prompts) / total


async def measure(
    served: PreTrainedModel, plain: PreTrainedModel, shape: tuple[int, int], repeats: int
) -> list[tuple[int, float, float, float]]:
    """Per concurrency the median tokens/s of generate, engine and engine in episodes."""
    length, new = shape
    rows: list[tuple[int, float, float, float]] = []
    async with TransformersEngine(
        served, max_concurrent=max(CONCURRENT), context_tokens=length + 2 * new + 4 * OBSERVATION
    ) as engine:
        await actions(engine, prompts_of(4, length), 8, "warm")
        generate(plain, prompts_of(4, length), 8)
        for count in track(CONCURRENT, "measuring", console=Console(stderr=True)):
            prompts, times = prompts_of(count, length), ([], [], [])
            for repeat in range(repeats):
                times[0].append(generate(plain, prompts, new))
                async with engine.released():  # forget the prefixes: every repeat starts cold
                    pass
                times[1].append(await actions(engine, prompts, new, f"a{repeat}-"))
                async with engine.released():
                    pass
                times[2].append(await episodes(engine, prompts, new, f"e{repeat}-"))
            rows.append((count, *(count * new / median(t) for t in times)))
    return rows


def main(
    layers: Annotated[int, typer.Option(help="layers of the model")] = 4,
    hidden: Annotated[int, typer.Option(help="width of the model")] = 128,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 64,
    new: Annotated[int, typer.Option(help="tokens sampled per prompt")] = 128,
    repeats: Annotated[int, typer.Option(help="runs of which the median counts")] = 3,
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads of torch")] = 1,
) -> None:
    """Measure and print one table."""
    torch.set_num_threads(threads)
    served, plain = llama(layers, hidden, device), llama(layers, hidden, device)
    rows = asyncio.run(measure(served, plain, (prompt, new), repeats))
    size = sum(p.numel() for p in plain.parameters()) / 1e6
    table = Table(
        title=f"tokens/s, {size:.1f}M parameters, {prompt}+{new} tokens, {device}, "
        f"{threads} thread(s), median of {repeats}"
    )
    for name in ("concurrent", "generate", "engine", "ratio", f"engine, {TURNS} turns"):
        table.add_column(name, justify="right")
    for count, stock, ours, turns in rows:
        table.add_row(
            str(count), f"{stock:,.0f}", f"{ours:,.0f}", f"{ours / stock:.2f}", f"{turns:,.0f}"
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
