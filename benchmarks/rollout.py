"""Tokens per second of whole episodes beside the engine alone, with tools that take time.

    python benchmarks/rollout.py [--engine vllm] [--layers 30 --hidden 576] [--repeats 3]

Episodes go through `run_episode`: rendering, parsing, environment, records. "Engine alone" then
makes the very same requests (prompt, length, seed, session), those of an episode one after the
other, with nothing between them. `--latency` is how long the environment takes for each reply. The
model is random, and an action ends by chance, after 64 tokens on average.
"""

import asyncio
import copy
import os
import time
from collections import defaultdict
from contextlib import AbstractAsyncContextManager
from statistics import median
from typing import Annotated, Any

import torch
import typer
from engine import VOCAB, llama
from rich.console import Console
from rich.progress import track
from rich.table import Table

from agentrl.plugins import find_engine
from agentrl.protocols import InferenceEngine
from agentrl.rollout import Limits, Stage, run_episode
from agentrl.testing.fakes import CharRenderer, FakeEnvironment, a_problem
from agentrl.types import ActionTokens, Message, Sampling, Step

TURNS = 3
OBSERVATION = 24
MEAN_LENGTH, MAX_LENGTH = 64, 256
CONCURRENT = (1, 8, 32, 64)


class Recorded:
    """An engine that keeps what each session asked of it, in order."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine, self.version = engine, engine.version
        self.requests: dict[str, list[tuple[tuple[int, ...], Sampling]]] = defaultdict(list)

    async def sample(self, prompt_ids: Any, sampling: Sampling, *, session: str) -> ActionTokens:
        self.requests[session].append((tuple(prompt_ids), sampling))
        return await self._engine.sample(prompt_ids, sampling, session=session)

    def released(self) -> AbstractAsyncContextManager[None]:
        return self._engine.released()


class Stopping(CharRenderer):
    """A random policy writes one of these every 64 tokens."""

    stop_ids = frozenset(range(10, 10 + VOCAB // MEAN_LENGTH))


def replies(action: Message, turn: int) -> Step:
    """Something to read after every action but the last."""
    said = Message(role="tool", content="x" * OBSERVATION)
    return Step(observation=(said,), terminated=turn + 1 == TURNS)


async def episodes(
    engine: InferenceEngine, count: int, latency_s: float, prompt: int
) -> tuple[int, Recorded]:
    """Run `count` episodes side by side; the tokens they sampled, and what was asked for."""
    recorded = Recorded(engine)
    stage = Stage(
        engine=recorded,
        renderer=Stopping(),
        environment=FakeEnvironment(answer=replies, delay_s=latency_s),
        limits=Limits(
            max_turns=TURNS,
            max_action_tokens=MAX_LENGTH,
            context_tokens=context_of(prompt),
            timeout_s=600,
        ),
    )
    tasks = [a_problem(chr(65 + n) * prompt, id=str(n)).task for n in range(count)]
    done = await asyncio.gather(*(run_episode(stage, task, member=0, seed=1) for task in tasks))
    return sum(one.trajectory.action_tokens for one in done), recorded


def context_of(prompt: int) -> int:
    return prompt + TURNS * (MAX_LENGTH + OBSERVATION + 16)


async def requests(engine: InferenceEngine, recorded: Recorded) -> int:
    """The same requests, without episodes around them; the tokens that were sampled."""

    async def session(name: str) -> int:
        sampled = 0
        for prompt, sampling in recorded.requests[name]:
            action = await engine.sample(prompt, sampling, session=name)
            sampled += len(action.token_ids)
        return sampled

    return sum(await asyncio.gather(*map(session, recorded.requests)))


async def measure(
    engine: InferenceEngine, latencies: list[float], prompt: int, repeats: int
) -> dict[int, list[tuple[float, float]]]:
    """By concurrency and latency: tokens/s of episodes and of the engine alone."""
    table: dict[int, list[tuple[float, float]]] = {}
    for count in track(CONCURRENT, "measuring", console=Console(stderr=True)):
        table[count] = []
        for latency_s in latencies:
            ours, alone = list[float](), list[float]()
            for _ in range(repeats + 1):
                async with engine.released():  # drops every prefix
                    pass
                begun = time.perf_counter()
                tokens, recorded = await episodes(engine, count, latency_s, prompt)
                ours.append(tokens / (time.perf_counter() - begun))
                async with engine.released():
                    pass
                begun = time.perf_counter()
                tokens = await requests(engine, recorded)
                alone.append(tokens / (time.perf_counter() - begun))
            table[count].append((median(ours[1:]), median(alone[1:])))  # the first warms up
    return table


def main(
    engine: Annotated[str, typer.Option(help="engine, by name")] = "vllm",
    layers: Annotated[int, typer.Option(help="layers of the model")] = 4,
    hidden: Annotated[int, typer.Option(help="width of the model")] = 128,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 64,
    latency: Annotated[str, typer.Option(help="seconds of a reply, by commas")] = "0,0.5",
    repeats: Annotated[int, typer.Option(help="runs of which the median counts")] = 3,
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads of torch")] = 2,
) -> None:
    """Measure and print one table."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # what vLLM goes by
    torch.set_num_threads(threads)
    plain = llama(layers, hidden, device)
    latencies = [float(part) for part in latency.split(",")]
    sizes = {"max_concurrent": max(CONCURRENT), "context_tokens": context_of(prompt)}

    async def run() -> dict[int, list[tuple[float, float]]]:
        async with find_engine(engine)(copy.deepcopy(plain), **sizes) as opened:
            return await measure(opened, latencies, prompt, repeats)

    rows = asyncio.run(run())
    millions = sum(p.numel() for p in plain.parameters()) / 1e6
    table = Table(
        title=f"tokens/s, {engine}, {millions:.1f}M parameters, {TURNS} turns of about "
        f"{MEAN_LENGTH} tokens, {device}, {threads} thread(s), median of {repeats}"
    )
    table.add_column("concurrent", justify="right")
    for latency_s in latencies:
        table.add_column(f"engine alone ({latency_s:g} s)", justify="right")
        table.add_column(f"episodes, replies take {latency_s:g} s", justify="right")
    for count, pairs in rows.items():
        cells: list[str] = []
        for ours, alone in pairs:
            cells += [f"{alone:,.0f}", f"{ours:,.0f} ({ours / alone:.2f})"]
        table.add_row(str(count), *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
