"""What an update does in which order: minibatches, micro-batches, learning rate."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import groupby
from math import ceil, cos, pi

from torch import Tensor

PADDING = 0.05
"""Share of an attention table that may be padding."""
WORTH_SHARING = 0.1
"""Share of tokens that must be spared before the prefixes of groups are computed once."""


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

    Rows of like length go together, so that attention pads little; the parts are as few as that
    order allows, and the fullest holds as few tokens as it can.
    """
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda r: -lengths[r])

    def cut(most: int) -> list[list[int]]:
        parts, filled = [list[int]()], 0
        for row in order:
            if parts[-1] and filled + lengths[row] > most:
                parts.append([])
                filled = 0
            parts[-1].append(row)
            filled += lengths[row]
        return parts

    fewest = len(cut(budget))
    low = min(budget, sum(lengths) // fewest)
    return cut(low + bisect_left(range(low, budget), True, key=lambda m: len(cut(m)) <= fewest))


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Rows in parts of like length: a table of one is at most `PADDING` padding."""
    parts, filled = [list[int]()], 0
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        table = (len(parts[-1]) + 1) * lengths[parts[-1][0]] if parts[-1] else lengths[row]
        if table * (1 - PADDING) > filled + lengths[row]:
            parts.append([])
            filled = 0
        parts[-1].append(row)
        filled += lengths[row]
    return parts


def common_prefix(rows: Sequence[Tensor]) -> int:
    """How many ids all rows begin with; always fewer than the shortest has."""
    length = min(len(row) for row in rows) - 1
    first = rows[0][:length]
    same = [int((row[:length] == first).long().cumprod(0).sum()) for row in rows[1:]]
    return min([length, *same])


def by_group(
    lengths: Sequence[int], groups: Sequence[int], prefixes: Mapping[int, int], budget: int
) -> list[list[int]]:
    """Rows cut into parts within the budget, those of a group together as far as they fit.

    `prefixes` says how many tokens the rows of each group have in common: a part computes them once
    for each group in it. Balanced as `by_tokens` is.
    """
    order = sorted(range(len(lengths)), key=lambda r: (groups[r], -lengths[r]))
    runs = [list(run) for _, run in groupby(order, key=lambda r: groups[r])]
    own = {row: lengths[row] - prefixes[groups[row]] for row in order}
    costs = [prefixes[groups[run[0]]] + sum(own[row] for row in run) for run in runs]
    total = sum(costs)
    target = total / max(1, ceil(total / budget))
    parts, filled = [list[int]()], 0
    for run in runs:
        prefix = prefixes[groups[run[0]]]
        fresh = True
        for row in run:
            cost = own[row] + (prefix if fresh else 0)
            if parts[-1] and (filled + cost > budget or (fresh and filled >= target)):
                parts.append([])
                filled, cost = 0, own[row] + prefix
            parts[-1].append(row)
            filled, fresh = filled + cost, False
    return [part for part in parts if part]


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
