"""One step's groups as tensors: rows end to end, without padding, built once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from math import nan
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.algorithms import AlgorithmConfig
from agentrl.errors import RecordError
from agentrl.learning.advantage import has_signal, turn_advantages
from agentrl.learning.plan import common_prefix
from agentrl.types import Ending, Group, Trajectory

FORMAT = "agentrl.batch.1"
_BY_ROW = ("lengths", "groups", "episodes")
_DTYPES = {
    "input_ids": torch.int64,
    "lengths": torch.int64,
    "groups": torch.int64,
    "action_mask": torch.bool,
    "behavior_logprobs": torch.float32,
    "advantages": torch.float32,
    "versions": torch.int64,
    "turns": torch.int64,
    "ref_logprobs": torch.float32,
    "episodes": torch.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Trajectories as rows laid end to end; column t speaks about token t.

    `input_ids` int64 [T], `lengths` int64 [B] (their sum is T), `groups` int64 [B] (the group of
    each row), `action_mask` bool [T] (tokens that are trained), `behavior_logprobs` fp32 [T] (nats;
    NaN where there is none), `advantages` fp32 [T], `versions` and `turns` int64 [T] (-1 at
    observations), `ref_logprobs` fp32 [T] if they are known already, `episodes` int64 [B] the
    episode of each row, where one has several segments (None: each row is an episode). Whatever
    stands where the mask is False is never read.

    Raises ValueError when shapes or dtypes don't agree, a row is empty, or begins with an action.
    """

    input_ids: Tensor
    lengths: Tensor
    groups: Tensor
    action_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    versions: Tensor
    turns: Tensor
    ref_logprobs: Tensor | None = None
    episodes: Tensor | None = None

    def __post_init__(self) -> None:
        rows, tokens = self.lengths.numel(), int(self.lengths.sum())
        for name, tensor in self._tensors():
            size = rows if name in _BY_ROW else tokens
            if tuple(tensor.shape) != (size,) or tensor.dtype is not _DTYPES[name]:
                raise ValueError(
                    f"batch field {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"but must be {_DTYPES[name]} ({size},)"
                )
        if rows and int(self.lengths.min()) < 1:
            raise ValueError("a row of a batch needs at least one token")
        if self.action_mask[self.starts].any():
            raise ValueError("a row can't begin with an action: it would have no context")

    @property
    def starts(self) -> Tensor:
        """The column of each row's first token, int64 [B]."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def rows(self) -> Tensor:
        """The row of each token, int64 [T]."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    @property
    def episode_of_rows(self) -> Tensor:
        """The episode of each row, int64 [B]: segments of one share its verdict and its weight."""
        return torch.arange(len(self.lengths)) if self.episodes is None else self.episodes

    def prefixes(self) -> dict[int, int]:
        """How many ids the rows of each group begin with in common."""
        rows = self.input_ids.split(self.lengths.tolist())
        groups = self.groups.tolist()
        return {
            group: common_prefix([row for row, of in zip(rows, groups, strict=True) if of == group])
            for group in set(groups)
        }

    def columns(self, rows: Sequence[int]) -> Tensor:
        """The columns of the given rows, in the given order, int64."""
        starts, lengths = self.starts.tolist(), self.lengths.tolist()
        spans = [torch.arange(starts[r], starts[r] + lengths[r]) for r in rows]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def select(self, rows: Sequence[int]) -> "Batch":
        """The given rows, in the given order."""
        columns, picked = self.columns(rows), torch.tensor(list(rows), dtype=torch.int64)
        return Batch(
            **{name: t[picked if name in _BY_ROW else columns] for name, t in self._tensors()}
        )

    def save(self, path: Path) -> None:
        """Write as safetensors; `Batch.load` gives it back."""
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors()}
        save_file(tensors, path, metadata={"format": FORMAT})

    @classmethod
    def load(cls, path: Path) -> "Batch":
        """Read what `save` wrote. Raises RecordError for any other file."""
        try:
            with safe_open(path, framework="pt") as file:
                found = (file.metadata() or {}).get("format")
                if found != FORMAT:
                    raise RecordError(f"{path} is no batch of this version ({FORMAT}): {found}")
                return cls(**{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            if isinstance(error, RecordError):
                raise
            raise RecordError(f"{path} is no batch: {' '.join(str(error).split())}") from None

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                yield field.name, tensor


def collate(groups: Sequence[Group], algorithm: AlgorithmConfig) -> Batch:
    """All graded trajectories of the groups as one batch, with their advantages.

    Members with an invalid verdict are left out of baseline and rows, and under the `drop` policy
    so are groups without signal. Raises RecordError naming trajectory and turn when logprobs are
    missing that the algorithm needs, or when step rewards are.
    """
    if algorithm.zero_variance == "drop":
        groups = [group for group in groups if has_signal(group, algorithm)]
    rows = [
        _row(
            trajectory,
            (number, trajectory.member),
            advantages,
            trained=not (algorithm.mask_truncated and trajectory.ending is not Ending.ANSWERED),
            scored=needs_behavior(algorithm),
        )
        for number, (group, members) in enumerate(
            zip(groups, turn_advantages(groups, algorithm), strict=True)
        )
        for trajectory, advantages in zip(group.trajectories, members, strict=True)
        if advantages  # None: invalid; empty: ended before the first action
    ]
    return _concatenate(rows)


def supervised_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """Trajectories to be imitated: every action has advantage 1, logprobs may be missing."""
    return _concatenate(
        [
            _row(
                trajectory,
                (number, 0),
                (1.0,) * len(trajectory.turns),
                trained=True,
                scored=False,
            )
            for number, trajectory in enumerate(trajectories)
            if trajectory.turns
        ]
    )


def needs_behavior(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss reads the engine's logprobs."""
    return algorithm.proximal == "behavior" or algorithm.mismatch != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    input_ids: Sequence[int]
    place: tuple[int, int]
    action_mask: Sequence[bool]
    behavior_logprobs: Sequence[float]
    advantages: Sequence[float]
    versions: Sequence[int]
    turns: Sequence[int]


def _row(
    trajectory: Trajectory,
    place: tuple[int, int],
    advantages: Sequence[float],
    *,
    trained: bool,
    scored: bool,
) -> _Row:
    """`place` is the group, and the member in it."""
    turns = list(_turn_of_each_token(trajectory))
    return _Row(
        input_ids=trajectory.token_ids,
        place=place,
        action_mask=[trained and turn >= 0 for turn in turns],
        behavior_logprobs=list(_logprobs(trajectory, needed=trained and scored)),
        advantages=[advantages[turn] if turn >= 0 else 0.0 for turn in turns],
        versions=[-1 if version is None else version for version in trajectory.versions],
        turns=turns,
    )


def _turn_of_each_token(trajectory: Trajectory) -> Iterator[int]:
    for number, turn in enumerate(trajectory.turns):
        yield from [-1] * len(turn.observation.token_ids)
        yield from [number] * len(turn.action.token_ids)


def _logprobs(trajectory: Trajectory, *, needed: bool) -> Iterator[float]:
    """Missing ones are NaN, so that a use by mistake can't pass unseen."""
    for number, turn in enumerate(trajectory.turns):
        known = turn.action.logprobs
        if known is None and needed:
            raise RecordError(
                f"trajectory {trajectory.id}: turn {number} has no logprobs; record them, or set "
                "algorithm.proximal recompute and algorithm.mismatch none"
            )
        yield from [nan] * len(turn.observation.token_ids)
        yield from known or [nan] * len(turn.action.token_ids)


def _concatenate(rows: Sequence[_Row]) -> Batch:
    def joined(name: str) -> Tensor:
        values = chain.from_iterable(getattr(row, name) for row in rows)
        return torch.tensor(list(values), dtype=_DTYPES[name])

    places = {place: number for number, place in enumerate(dict.fromkeys(r.place for r in rows))}
    return Batch(
        input_ids=joined("input_ids"),
        lengths=torch.tensor([len(row.input_ids) for row in rows], dtype=torch.int64),
        groups=torch.tensor([row.place[0] for row in rows], dtype=torch.int64),
        episodes=torch.tensor([places[row.place] for row in rows], dtype=torch.int64),
        action_mask=joined("action_mask"),
        behavior_logprobs=joined("behavior_logprobs"),
        advantages=joined("advantages"),
        versions=joined("versions"),
        turns=joined("turns"),
    )
