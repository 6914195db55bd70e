"""Trains a reward model on recorded groups: Bradley-Terry on pairs, with a replay of earlier ones.

The refresh of iterative GRPO (2402.03300 algorithm 1): after some policy steps the reward model is
trained further on the groups that the policy sampled since, a tenth of its pairs being historical.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from agentrl.atomic import whole_folder
from agentrl.errors import ConfigError, RecordError
from agentrl.learning.plan import by_tokens
from agentrl.learning.preference import pairs_of
from agentrl.learning.supervised import descend
from agentrl.protocols import Reporter
from agentrl.types import Group, Verdict
from agentrl.verifiers.reward_model import AnswerReader

TRAINED_ON = "trained_on.json"
"""Beside the model: which record it has seen, and up to which step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTraining:
    """How a reward model is trained.

    The answers of a group make pairs by their rewards, or by `component` of their verdicts; at most
    `pairs_per_group` are drawn. `replay_share` of all pairs come from steps that were trained on
    before. Pairs longer than `max_tokens` a side are left out.
    """

    component: str = ""
    pairs_per_group: int = 8
    replay_share: float = 0.1
    epochs: int = 1
    batch: int = 32
    lr: float = 2e-5
    max_tokens: int = 2048
    micro_batch_tokens: int = 16_384
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.replay_share < 1:
            raise ConfigError("replay_share must be at least 0 and below 1")
        if min(self.pairs_per_group, self.epochs, self.batch) < 1 or self.lr <= 0:
            raise ConfigError("pairs_per_group, epochs and batch must be at least 1, lr above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt as ids, the better one first."""

    better: tuple[int, ...]
    worse: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFit:
    """What was trained on, and how it went.

    `loss` (nats a pair) and `accuracy` (share of pairs in the right order) are those of the last
    batch, and `first_accuracy` of the first, each before its update.
    """

    steps: tuple[int, int]
    fresh: int
    replayed: int
    loss: float
    first_accuracy: float
    accuracy: float


def bradley_terry(better: Tensor, worse: Tensor) -> Tensor:
    """-log sigmoid(better - worse) of each pair, [P] (2203.02155 equation 1)."""
    return -F.logsigmoid(better - worse)


def pairs_of_group(
    group: Group, reader: AnswerReader, settings: RewardTraining, draw: Random
) -> list[Pair]:
    """Pairs of members with different rewards, drawn without replacement.

    Equal answers are one answer with their mean reward: they can't be told apart.
    """
    rewards: dict[tuple[int, ...], list[float]] = {}
    for places, verdict in zip(group.members, group.member_verdicts, strict=True):
        trajectory = group.trajectories[places[0]]
        label = _label(verdict, settings.component)
        prompt = group.task.prompt if group.task else trajectory.prompt
        ids = None if label is None else reader.read(prompt, trajectory.answer)
        if ids is not None and label is not None:
            rewards.setdefault(ids, []).append(label)
    answers, means = list(rewards), [sum(r) / len(r) for r in rewards.values()]
    pairs = pairs_of([0] * len(means), means)
    drawn = draw.sample(pairs, min(settings.pairs_per_group, len(pairs)))
    return [Pair(better=answers[a], worse=answers[b]) for a, b in drawn]


def replayed(fresh: int, share: float) -> int:
    """How many historical pairs are `share` of all, beside `fresh` new ones."""
    return round(fresh * share / (1 - share))


def fit_pairs(
    model: Any,
    reader: AnswerReader,
    pairs: Sequence[Pair],
    settings: RewardTraining,
    report: Callable[[float], None],
) -> list[float]:
    """Train `model` in place; the share of each batch's pairs that were in the right order.

    `report` gets each batch's loss. Raises NonFiniteLoss before the weights change.
    """
    model.config.pad_token_id = reader.tokenizer.pad_token_id
    lengths = [len(pair.better) + len(pair.worse) for pair in pairs]
    batch, accuracies = min(settings.batch, len(pairs)), list[float]()

    def backward(rows: Sequence[int]) -> float:
        total, right = 0.0, 0
        for part in by_tokens([lengths[r] for r in rows], settings.micro_batch_tokens):
            chosen = [pairs[rows[place]] for place in part]
            sides = [p.better for p in chosen] + [p.worse for p in chosen]
            better, worse = reader.scores(model, sides).chunk(2)
            losses = bradley_terry(better, worse)
            (losses.sum() / len(rows)).backward()
            total, right = total + float(losses.detach().sum()), right + int((better > worse).sum())
        accuracies.append(right / len(rows))
        return total / len(rows)

    descend(
        model,
        backward,
        size=len(pairs),
        steps=settings.epochs * -(-len(pairs) // batch),
        batch=batch,
        lr=settings.lr,
        seed=settings.seed,
        report=report,
        what="the reward model",
    )
    return accuracies


def train_reward_model(
    record: Path, start: str, out: Path, settings: RewardTraining, *, reporter: Reporter
) -> RewardFit:
    """Train the classifier (or language model, which gets a head) `start` on the run `record`.

    New are the steps that `start` was not trained on yet, by the note that this leaves beside
    the model in `out`; history are those before. Raises ConfigError, RecordError, NonFiniteLoss.
    """
    from agentrl.store import ParquetStore

    store = ParquetStore(record / "trajectories")
    steps = store.versions()
    since = _trained_until(Path(start), record)
    new = [step for step in steps if step >= since]
    if not new:
        raise RecordError(f"{record} has no steps from {since} on to learn from")
    model, reader = _open(start, settings)
    draw = Random(f"pairs:{settings.seed}:{since}")

    def read(versions: Sequence[int]) -> Iterator[list[Pair]]:
        for group in (group for version in versions for group in store.read(version=version)):
            yield pairs_of_group(group, reader, settings, draw)

    fresh = [pair for pairs in read(new) for pair in pairs]
    if not fresh:
        raise RecordError(f"{record}: no group since step {since} has answers of different worth")
    old = [step for step in steps if step < since]
    wanted, history = replayed(len(fresh), settings.replay_share), list[Pair]()
    for pairs in read(draw.sample(old, len(old))):  # no more of a long history than is needed
        if len(history) >= wanted:
            break
        history += pairs
    history = history[:wanted]
    losses: list[float] = []

    def report(loss: float) -> None:
        losses.append(loss)
        reporter.advance()

    reporter.phase("reward model", None)
    accuracies = fit_pairs(model, reader, [*fresh, *history], settings, report)
    with whole_folder(out) as partial:
        model.save_pretrained(partial)
        reader.tokenizer.save_pretrained(partial)
        note = {"record": str(record.resolve()), "until": new[-1] + 1}
        (partial / TRAINED_ON).write_text(json.dumps(note), encoding="utf-8")
    return RewardFit(
        steps=(new[0], new[-1]),
        fresh=len(fresh),
        replayed=len(history),
        loss=losses[-1],
        first_accuracy=accuracies[0],
        accuracy=accuracies[-1],
    )


def _open(start: str, settings: RewardTraining) -> tuple[Any, AnswerReader]:
    set_seed(settings.seed)  # of a new head, and of dropout
    try:
        tokenizer = AutoTokenizer.from_pretrained(start)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            start, num_labels=1, dtype=torch.float32
        )
        reader = AnswerReader(tokenizer, max_tokens=settings.max_tokens)
    except Exception as error:  # foreign files make the libraries raise anything at all
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"no model to start from in {start}: {reason}") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), reader


def _label(verdict: Verdict, component: str) -> float | None:
    if verdict.reward is None or not component:
        return verdict.reward
    if component not in verdict.components:
        known = ", ".join(verdict.components) or "none"
        raise ConfigError(f"the verdicts have no component {component!r} (they have: {known})")
    return verdict.components[component]


def _trained_until(start: Path, record: Path) -> int:
    """The first step of `record` that the model in `start` has not seen."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads((start / TRAINED_ON).read_text(encoding="utf-8"))
        if note["record"] == str(record.resolve()):
            return int(note["until"])
    return 0
