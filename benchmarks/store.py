"""Bytes a token and speed of the trajectory store, beside JSONL and plain Parquet, in one run.

    python benchmarks/store.py --trajectories 1000 --tokens 8000

The other forms hold what a trainer needs; the first repeats the whole prompt in each turn (how
request logs look), the second has each message once, with ids, mask and logprobs beside it, the
third is the second as Parquet with pyarrow's own settings.
Ids follow a Zipf law over `--vocabulary`, logprobs an exponential one: text-like, but made up.
"""

import argparse
import json
import math
import resource
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.store import ParquetStore
from agentrl.types import (
    ActionTokens,
    Ending,
    Group,
    Message,
    ObservationTokens,
    ToolCall,
    Trajectory,
    Turn,
    Verdict,
    assistant,
    user,
)

GROUP = 8
TURNS = 8
ACTION_SHARE = 0.4


class Maker:
    """Trajectories of a set length over made-up words, one for each id."""

    def __init__(self, tokens: int, vocabulary: int, seed: int) -> None:
        self._random = Random(seed)
        self._tokens = tokens
        self._ids = range(vocabulary)
        self._words = [self._word() for _ in self._ids]
        weights = [1 / (rank + 2) for rank in self._ids]
        self._cumulative = list(accumulate(weights))

    def group(self, number: int) -> Group:
        task = f"task-{number}"
        prompt = self._draw(self._tokens // (2 * TURNS))
        members = tuple(self._trajectory(task, m, prompt) for m in range(GROUP))
        verdicts = tuple(Verdict(reward=float(m % 2), passed=m % 2 == 1) for m in range(GROUP))
        return Group(task_id=task, trajectories=members, verdicts=verdicts)

    def _trajectory(self, task: str, member: int, prompt: tuple[int, ...]) -> Trajectory:
        turns: list[Turn] = []
        observation = prompt
        rest = self._tokens - len(prompt)
        for number in range(TURNS):
            action = self._draw(max(1, int(rest / TURNS * ACTION_SHARE)))
            reply = self._draw(max(1, int(rest / TURNS * (1 - ACTION_SHARE))))
            arguments = json.dumps({"code": self._text(action)})
            call = ToolCall(id=f"call_{number}", name="python", arguments=arguments)
            turns.append(
                Turn(
                    observation=ObservationTokens(token_ids=observation),
                    action=ActionTokens(
                        token_ids=action,
                        logprobs=tuple(self._logprob() for _ in action),
                        versions=(3,) * len(action),
                        finish="stop",
                    ),
                    message=assistant("", tool_calls=[call]),
                    reply=(Message(role="tool", content=self._text(reply), tool_call_id=call.id),),
                )
            )
            observation = reply
        return Trajectory(
            id=f"{task}/{member}",
            task_id=task,
            member=member,
            seed=self._random.getrandbits(48),
            prompt=(user(self._text(prompt)),),
            turns=tuple(turns),
            ending=Ending.ANSWERED,
            metrics={"sample_s": self._random.random(), "total_s": self._random.random()},
        )

    def _draw(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(self._ids, cum_weights=self._cumulative, k=count))

    def _text(self, ids: Sequence[int]) -> str:
        return "".join(self._words[i] for i in ids)

    def _logprob(self) -> float:
        return struct.unpack("f", struct.pack("f", -self._random.expovariate(2.0)))[0]

    def _word(self) -> str:
        letters = self._random.choices("etaoinshrdlucmfwypvbgkqjxz", k=self._random.randint(1, 5))
        return " " + "".join(letters)


def full_prompts(groups: Sequence[Group]) -> Iterator[str]:
    """One line a turn, with all that the engine saw before it."""
    for trajectory in (t for g in groups for t in g.trajectories):
        seen: list[int] = []
        messages = [asdict(m) for m in trajectory.prompt]
        for turn in trajectory.turns:
            seen += turn.observation.token_ids
            yield json.dumps(
                {
                    "id": trajectory.id,
                    "prompt_ids": seen,
                    "messages": messages,
                    "ids": turn.action.token_ids,
                    "logprobs": turn.action.logprobs,
                }
            )
            seen += turn.action.token_ids
            messages += [asdict(turn.message), *(asdict(m) for m in turn.reply)]


def whole_episodes(groups: Sequence[Group]) -> Iterator[str]:
    """One line a trajectory, with a mask and a logprob for each id."""
    return map(json.dumps, episode_rows(groups))


def episode_rows(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    for trajectory in (t for g in groups for t in g.trajectories):
        yield {
            "id": trajectory.id,
            "messages": [asdict(m) for m in trajectory.messages],
            "ids": trajectory.token_ids,
            "mask": [int(m) for m in trajectory.action_mask],
            "logprobs": trajectory.behavior_logprobs,
        }


def write_plain(path: Path, groups: Sequence[Group]) -> None:
    pq.write_table(pa.Table.from_pylist(list(episode_rows(groups))), path)


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def read_lines(path: Path) -> int:
    with path.open(encoding="utf-8") as file:
        return sum(len(json.loads(line)) for line in file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=320)
    parser.add_argument("--tokens", type=int, default=2000, help="ids in a trajectory")
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--step", type=int, default=64, help="trajectories in a step")
    args = parser.parse_args()

    maker = Maker(args.tokens, args.vocabulary, seed=0)
    per_step = args.step // GROUP
    steps = math.ceil(args.trajectories / args.step)
    totals: dict[str, list[float]] = {}
    tokens = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = ParquetStore(folder / "parquet")
        store.append([maker.group(0)], version=0)  # loads what pyarrow loads at first use
        for step in range(steps):
            groups = [maker.group(step * per_step + i) for i in range(per_step)]
            tokens += sum(len(t.token_ids) for g in groups for t in g.trajectories)
            path = folder / "parquet" / f"step-{step:08d}.parquet"
            took = seconds(lambda g=groups, s=step: store.append(g, version=s))
            read = seconds(lambda s=step: sum(1 for _ in store.read(version=s)))
            add(totals, "Parquet (this store)", path.stat().st_size, took, read)
            for kind, lines in (
                ("JSONL, full prompts", full_prompts),
                ("JSONL, whole episodes", whole_episodes),
            ):
                path = folder / "lines.jsonl"
                took = seconds(lambda p=path, g=groups, x=lines: write_lines(p, x(g)))
                read = seconds(lambda p=path: read_lines(p))
                add(totals, kind, path.stat().st_size, took, read)
            path = folder / "plain.parquet"
            took = seconds(lambda p=path, g=groups: write_plain(p, g))
            read = seconds(lambda p=path: len(pq.read_table(p).to_pylist()))
            add(totals, "Parquet, plain", path.stat().st_size, took, read)
    print(f"{steps * args.step} trajectories of about {tokens // (steps * args.step)} tokens")
    print(f"{'format':24}{'bytes/token':>12}{'write tok/s':>14}{'read tok/s':>14}")
    for kind, (size, took, read) in totals.items():
        print(f"{kind:24}{size / tokens:12.2f}{tokens / took:14,.0f}{tokens / read:14,.0f}")
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process: {peak_mb:.0f} MB")


def add(totals: dict[str, list[float]], kind: str, size: int, took: float, read: float) -> None:
    before = totals.get(kind, [0.0, 0.0, 0.0])
    totals[kind] = [a + b for a, b in zip(before, (size, took, read), strict=True)]


if __name__ == "__main__":
    main()
