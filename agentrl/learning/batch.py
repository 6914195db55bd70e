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
from agentrl.learning.advantage import group_advantages
from agentrl.types import Ending, Group, Trajectory, Verdict

FORMAT = "agentrl.batch.1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Trajectories as rows laid end to end; column t speaks about token t.

    `input_ids` int64 [T], `lengths` int64 [B] (their sum is T), `groups` int64 [B] (the group of
    each row), `action_mask` bool [T] (tokens that are trained), `behavior_logprobs` fp32 [T] (nats;
    NaN where there is none), `advantages` fp32 [T], `versions` int64 [T] (-1 at observations).
    Whatever stands where the mask is False is never read.

    Raises ValueError when the shapes don't agree or a row's first token is an action.
    """

    input_ids: Tensor
    lengths: Tensor
    groups: Tensor
    action_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    versions: Tensor

    def __post_init__(self) -> None:
        tokens, rows = int(self.lengths.sum()), len(self.lengths)
        for field in fields(self):
            size = rows if field.name in ("lengths", "groups") else tokens
            if tuple(getattr(self, field.name).shape) != (size,):
                raise ValueError(f"batch field {field.name} must have shape ({size},)")
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

    def columns(self, rows: Sequence[int]) -> Tensor:
        """The columns of the given rows, in the given order, int64."""
        starts, lengths = self.starts.tolist(), self.lengths.tolist()
        spans = (range(starts[r], starts[r] + lengths[r]) for r in rows)
        return torch.tensor(list(chain.from_iterable(spans)), dtype=torch.int64)

    def select(self, rows: Sequence[int]) -> "Batch":
        """The given rows, in the given order."""
        columns, picked = self.columns(rows), torch.tensor(list(rows), dtype=torch.int64)
        return Batch(
            **{
                f.name: getattr(self, f.name)[
                    picked if f.name in ("lengths", "groups") else columns
                ]
                for f in fields(self)
            }
        )

    def save(self, path: Path) -> None:
        """Write as safetensors; `Batch.load` gives it back."""
        tensors = {f.name: getattr(self, f.name).contiguous() for f in fields(self)}
        save_file(tensors, path, metadata={"format": FORMAT})

    @classmethod
    def load(cls, path: Path) -> "Batch":
        """Read what `save` wrote. Raises RecordError for any other file."""
        try:
            with safe_open(path, framework="pt") as file:
                found = (file.metadata() or {}).get("format")
                if found != FORMAT:
                    raise RecordError(f"{path} is no batch of this version ({FORMAT}): {found}")
                return cls(**{f.name: file.get_tensor(f.name) for f in fields(cls)})
        except (OSError, SafetensorError, ValueError) as error:
            if isinstance(error, RecordError):
                raise
            raise RecordError(f"{path} is no batch: {' '.join(str(error).split())}") from None


def collate(groups: Sequence[Group], algorithm: AlgorithmConfig) -> Batch:
    """All graded trajectories of the groups as one batch, with their advantages.

    Members with an invalid verdict are left out of baseline and rows. Raises ValueError naming
    the trajectory and turn when logprobs are missing that the algorithm needs.
    """
    graded = [_graded(group) for group in groups]
    rewards = [[v.reward or 0.0 for _, v in members] for members in graded]
    advantages = group_advantages(rewards, algorithm)
    rows = [
        _row(trajectory, number, float(advantage), algorithm)
        for number, (members, values) in enumerate(zip(graded, advantages, strict=True))
        for (trajectory, _), advantage in zip(members, values, strict=True)
        if trajectory.turns
    ]
    return _concatenate(rows)


def supervised_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """Trajectories to be imitated: every action token has advantage 1, logprobs may be missing."""
    imitate = AlgorithmConfig(mismatch="none")
    return _concatenate([_row(t, i, 1.0, imitate) for i, t in enumerate(trajectories) if t.turns])


@dataclass(frozen=True, slots=True)
class _Row:
    ids: Sequence[int]
    group: int
    mask: Sequence[bool]
    logprobs: Sequence[float]
    advantage: float
    versions: Sequence[int]


def _graded(group: Group) -> list[tuple[Trajectory, Verdict]]:
    pairs = zip(group.trajectories, group.verdicts, strict=True)
    return [(t, v) for t, v in pairs if v.reward is not None]


def _row(trajectory: Trajectory, group: int, advantage: float, algorithm: AlgorithmConfig) -> _Row:
    trained = not (algorithm.mask_truncated and trajectory.ending is not Ending.ANSWERED)
    needed = algorithm.proximal == "behavior" or algorithm.mismatch != "none"
    return _Row(
        ids=trajectory.token_ids,
        group=group,
        mask=[m and trained for m in trajectory.action_mask],
        logprobs=list(_logprobs(trajectory, needed=needed)),
        advantage=advantage,
        versions=[-1 if v is None else v for v in trajectory.versions],
    )


def _logprobs(trajectory: Trajectory, *, needed: bool) -> Iterator[float]:
    """Missing ones are NaN, so that a use by mistake can't pass unseen."""
    if needed:
        yield from (nan if p is None else p for p in trajectory.behavior_logprobs)
        return
    for turn in trajectory.turns:
        yield from [nan] * len(turn.observation.token_ids)
        yield from turn.action.logprobs or [nan] * len(turn.action.token_ids)


def _concatenate(rows: Sequence[_Row]) -> Batch:
    def joined(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(chain.from_iterable(getattr(r, name) for r in rows)), dtype=dtype)

    lengths = torch.tensor([len(r.ids) for r in rows], dtype=torch.int64)
    each = torch.tensor([r.advantage for r in rows], dtype=torch.float32)
    return Batch(
        input_ids=joined("ids", torch.int64),
        lengths=lengths,
        groups=torch.tensor([r.group for r in rows], dtype=torch.int64),
        action_mask=joined("mask", torch.bool),
        behavior_logprobs=joined("logprobs", torch.float32),
        advantages=torch.repeat_interleave(each, lengths),
        versions=joined("versions", torch.int64),
    )
