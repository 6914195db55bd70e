"""How rows lie in one forward pass: end to end, and what they share only once.

Rows of a group begin with the same prompt. Its columns are computed once, and every row attends to
them; the gradient of a shared column is the sum over the rows that read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.learning.plan import WORTH_SHARING, alike, common_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows that attend together, and a prefix that all of them continue (empty: none).

    `columns` int64 [n] are the kept columns of its tokens, `rows` and `places` int64 [n] where each
    stands in a table of `size` (rows, length), padded on the right; `prefix` int64 [P] are kept
    columns.
    """

    columns: Tensor
    rows: Tensor
    places: Tensor
    size: tuple[int, int]
    prefix: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Causal attention, [n, H, D]; query, key and value are [1, H, N, D].

        Causality keeps padding out of every real position, so a block without a prefix needs no
        mask.
        """
        mask, shared = None, len(self.prefix)
        keys, values = self._table(key), self._table(value)
        if shared:
            keys, values = (
                torch.cat([all_of[:, :, self.prefix].expand(self.size[0], -1, -1, -1), own], dim=2)
                for all_of, own in ((key, keys), (value, values))
            )
            length = self.size[1]
            mask = query.new_ones(length, shared + length, dtype=torch.bool).tril(shared)
        out = F.scaled_dot_product_attention(
            self._table(query),
            keys,
            values,
            attn_mask=mask,
            is_causal=not shared,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)[self.rows, self.places]

    def _table(self, packed: Tensor) -> Tensor:
        """[1, H, N, D] as [rows, H, length, D]."""
        _, heads, _, width = packed.shape
        table = packed.new_zeros(*self.size, heads, width)
        own = packed[0].transpose(0, 1)
        if len(self.columns) < len(own):
            own = own[self.columns]
        return table.index_put((self.rows, self.places), own).transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which of T columns are computed, and how they attend.

    `kept` int64 [N] are the computed columns, `place` int64 [T] which of them stands for each
    column, `positions` int64 [N] their place in the row.
    """

    kept: Tensor
    place: Tensor
    positions: Tensor
    blocks: tuple[Block, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention of all kept columns, [1, N, H, D]."""
        outs = [block.attend(query, key, value, scale) for block in self.blocks]
        if len(outs) == 1:
            return outs[0][None]
        order = torch.cat([block.columns for block in self.blocks]).argsort()
        return torch.cat(outs)[order][None]


def layout_of(ids: Tensor, lengths: Sequence[int], groups: Sequence[int] | None) -> Layout:
    """The layout of rows of `lengths` ids that lie end to end in `ids` [T].

    Neighbours of the same group share what they begin with, if that spares enough; without `groups`
    nothing is shared, which is the reference for it.
    """
    device, total = ids.device, sum(lengths)
    ids, clusters = ids.cpu(), _clusters(lengths, groups)
    common = [common_prefix([ids[a:b] for a, b in spans]) for spans in clusters]
    spared = sum(p * (len(spans) - 1) for p, spans in zip(common, clusters, strict=True))
    if groups is not None and spared < WORTH_SHARING * total:
        return layout_of(ids.to(device), lengths, None)
    kept, place = torch.ones(total, dtype=torch.bool), torch.arange(total)
    alone, together = list[tuple[int, int]](), list[tuple[list[tuple[int, int]], tuple[int, int]]]()
    for spans, shared in zip(clusters, common, strict=True):
        first = spans[0][0]
        if len(spans) == 1 or not shared:
            alone += spans
            continue
        alone.append((first, first + shared))
        for start, _ in spans[1:]:
            kept[start : start + shared] = False
            place[start : start + shared] = torch.arange(first, first + shared)
        own = [(a + shared, b) for a, b in spans]
        for part in alike([end - start for start, end in own]):
            together.append(([own[r] for r in sorted(part)], (first, first + shared)))
    number = kept.cumsum(0) - 1
    position = torch.cat([torch.arange(length) for length in lengths])
    parts = alike([end - start for start, end in alone])
    blocks = [_block([alone[r] for r in sorted(part)], (0, 0), number, device) for part in parts]
    blocks += [_block(spans, prefix, number, device) for spans, prefix in together]
    return Layout(
        kept=kept.nonzero()[:, 0].to(device),
        place=number[place].to(device),
        positions=position[kept].to(device),
        blocks=tuple(blocks),
    )


def _clusters(lengths: Sequence[int], groups: Sequence[int] | None) -> list[list[tuple[int, int]]]:
    """Where rows begin and end, by runs of the same group."""
    ends = torch.tensor(list(lengths)).cumsum(0).tolist()
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    names = range(len(spans)) if groups is None else groups
    runs = groupby(zip(names, spans, strict=True), key=lambda pair: pair[0])
    return [[span for _, span in run] for _, run in runs]


def _block(
    spans: Sequence[tuple[int, int]],
    prefix: tuple[int, int],
    number: Tensor,
    device: torch.device,
) -> Block:
    lengths = torch.tensor([end - start for start, end in spans])
    places = [torch.arange(end - start) for start, end in spans]
    return Block(
        columns=torch.cat([number[start:end] for start, end in spans]).to(device),
        rows=torch.repeat_interleave(torch.arange(len(spans)), lengths).to(device),
        places=torch.cat(places).to(device),
        size=(len(spans), int(lengths.max())),
        prefix=number[slice(*prefix)].to(device),
    )
