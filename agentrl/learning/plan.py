"""What an update does in which order: minibatches, micro-batches, learning rate."""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, cos, pi


def in_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Rows dealt into at most `parts` of near-equal token counts; every row once."""
    bins: list[list[int]] = [[] for _ in range(min(parts, len(lengths)))]
    heap = [(0, i) for i in range(len(bins))]
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        filled, i = heappop(heap)
        bins[i].append(row)
        heappush(heap, (filled + lengths[row], i))
    return [sorted(rows) for rows in bins]


def by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows cut into parts within the token budget (a longer row is a part of its own).

    Rows of like length go together, since attention pads a part to its longest row; the parts
    hold near-equal token counts.
    """
    if not lengths:
        return []
    target = sum(lengths) / ceil(sum(lengths) / budget)
    parts: list[list[int]] = [[]]
    filled = 0
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        if parts[-1] and (filled >= target or filled + lengths[row] > budget):
            parts.append([])
            filled = 0
        parts[-1].append(row)
        filled += lengths[row]
    return parts


def lr_factor(step: int, *, schedule: str, warmup: int, total: int | None) -> float:
    """The share of the peak learning rate at optimiser step `step` (from 0) of `total`.

    Linear warm-up over `warmup` steps, then "constant", or "cosine" or "linear" down to 0 after
    the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant" or total is None:
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1 - done if schedule == "linear" else (1 + cos(pi * done)) / 2
