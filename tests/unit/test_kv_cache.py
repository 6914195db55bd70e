"""The pool: writes land at (slot, column), reads see only what was asked for."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engines.kv_cache import SlotCache, Window, grouped_attention, rows_of

SLOTS, CONTEXT, HEADS, WIDTH = 4, 10, 2, 3


def fill(cache: SlotCache, slots: list[int], columns: list[list[int]], span: int) -> torch.Tensor:
    """Write random keys (values are their negatives); returns the keys, (B, T, heads, width)."""
    slots_B = torch.tensor(slots)
    together = all(b - a == 1 for a, b in pairwise(slots))
    rows = rows_of(slots[0], slots_B, together=together)
    cache.aim(Window(slots_B=slots_B, columns_BT=torch.tensor(columns), rows=rows, span=span))
    keys = torch.randn(len(slots), HEADS, len(columns[0]), WIDTH)
    read_keys, read_values = cache.update(keys, -keys, 0)
    assert read_keys.shape == (len(slots), HEADS, span, WIDTH)
    assert torch.equal(read_keys, -read_values)
    return keys.transpose(1, 2)


def pool(cache: SlotCache) -> torch.Tensor:
    keys = cache.layers[0].keys
    assert keys is not None
    return keys.transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_pool_equals_a_table_written_cell_by_cell(data: st.DataObject) -> None:
    cache = SlotCache(layers=1, slots=SLOTS, context_tokens=CONTEXT)
    table = torch.zeros(SLOTS, CONTEXT + 1, HEADS, WIDTH)
    for _ in range(data.draw(st.integers(1, 4))):
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True))
        new = data.draw(st.integers(1, 3))
        starts = [data.draw(st.integers(0, CONTEXT - new)) for _ in slots]
        columns = [list(range(s, s + new)) for s in starts]
        written = fill(cache, slots, columns, span=CONTEXT)
        for row, slot in enumerate(slots):
            table[slot, columns[row]] = written[row]
    assert torch.equal(pool(cache), table)


def test_neighbouring_slots_are_read_without_a_copy() -> None:
    cache = SlotCache(layers=1, slots=SLOTS, context_tokens=CONTEXT)
    fill(cache, [1, 2], [[0], [4]], span=5)
    keys, _ = cache.update(torch.zeros(2, HEADS, 1, WIDTH), torch.zeros(2, HEADS, 1, WIDTH), 0)
    assert keys.untyped_storage().data_ptr() == pool(cache).untyped_storage().data_ptr()


def test_padding_goes_to_the_scratch_column_and_a_clear_leaves_no_trace() -> None:
    cache = SlotCache(layers=1, slots=SLOTS, context_tokens=CONTEXT)
    fill(cache, [0, 2], [[0, 1], [5, cache.scratch_column]], span=6)
    assert pool(cache)[2, 6:CONTEXT].abs().sum() == 0
    pool(cache)[2, 5] = torch.nan
    cache.clear()
    assert torch.equal(pool(cache), torch.zeros_like(pool(cache)))


def test_a_copied_prefix_is_equal_and_no_longer() -> None:
    cache = SlotCache(layers=1, slots=SLOTS, context_tokens=CONTEXT)
    fill(cache, [0], [list(range(8))], span=8)
    cache.copy_prefix(0, 3, 5)
    assert torch.equal(pool(cache)[3, :5], pool(cache)[0, :5])
    assert pool(cache)[3, 5:].abs().sum() == 0


def test_freed_memory_comes_back_empty() -> None:
    cache = SlotCache(layers=1, slots=SLOTS, context_tokens=CONTEXT)
    fill(cache, [0], [[3]], span=4)
    cache.free()
    assert cache.layers[0].keys is None
    written = fill(cache, [1], [[2]], span=4)
    assert torch.equal(pool(cache)[1, 2], written[0, 0])
    assert pool(cache)[0].abs().sum() == 0


@pytest.mark.parametrize(("heads", "groups", "new"), [(4, 4, 1), (4, 2, 1), (6, 2, 5), (8, 1, 3)])
def test_grouped_attention_equals_repeated_heads(heads: int, groups: int, new: int) -> None:
    span = 7
    query = torch.randn(3, heads, new, WIDTH)
    key, value = torch.randn(2, 3, groups, span, WIDTH)
    visible = (
        torch.arange(span) <= torch.arange(new)[:, None] + torch.tensor([0, 1, 2])[:, None, None]
    )
    mask = torch.zeros(3, 1, new, span).masked_fill(~visible[:, None], -torch.inf)
    got, _ = grouped_attention(torch.nn.Module(), query, key, value, mask, scaling=0.5)
    repeated = (
        key.repeat_interleave(heads // groups, 1),
        value.repeat_interleave(heads // groups, 1),
    )
    weights = (query @ repeated[0].transpose(-1, -2) * 0.5 + mask).softmax(-1)
    torch.testing.assert_close(got, (weights @ repeated[1]).transpose(1, 2))
