"""One preallocated pool of keys and values in which rows of any length decode together.

Slot s, position p of every layer holds the key and value of token p of the sequence in slot s.
One column beyond the context takes the writes of padding, so no forward pass needs a branch.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SPAN_STEP = 64
"""The attended columns are rounded up to a multiple of this, so that few shapes occur."""


@dataclass(frozen=True, slots=True)
class Window:
    """Where one forward pass writes and what it reads.

    `slots_B` (int64) are the slots of the rows, `columns_BT` (int64) where each new token is
    written. `rows` selects the same slots for reading: a slice when they lie together, because a
    view costs nothing, else `slots_B`. Columns from `span` on are not read.
    """

    slots_B: Tensor
    columns_BT: Tensor
    rows: slice | Tensor
    span: int


class SlotLayer(CacheLayerMixin):
    """The pool of one attention layer: keys and values of shape (slots, heads, columns, width)."""

    def __init__(self, slots: int, columns: int) -> None:
        super().__init__()
        self.slots, self.columns = slots, columns
        self.window: Window | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeros: a masked column still meets a product, and 0 times NaN is NaN."""
        shape = (self.slots, key_states.shape[1], self.columns)
        self.keys = key_states.new_zeros((*shape, key_states.shape[-1]))
        self.values = value_states.new_zeros((*shape, value_states.shape[-1]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Scatter new states of shape (B, heads, T, width); return all that the rows may read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window, keys, values = self.window, self.keys, self.values
        assert window is not None and keys is not None and values is not None
        slots_B1 = window.slots_B[:, None]
        keys[slots_B1, :, window.columns_BT] = key_states.transpose(1, 2)
        values[slots_B1, :, window.columns_BT] = value_states.transpose(1, 2)
        return keys[:, :, : window.span][window.rows], values[:, :, : window.span][window.rows]

    def get_seq_length(self) -> int:
        """Unused: positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """Columns that a sequence may fill."""
        return self.columns - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Unused: the mask is always given."""
        return self.columns, 0


class SlotCache(Cache):
    """The pools of all layers, moved by one window. Keys and values appear at the first use."""

    def __init__(self, *, layers: int, slots: int, context_tokens: int) -> None:
        self._layers = [SlotLayer(slots, context_tokens + 1) for _ in range(layers)]
        super().__init__(layers=list(self._layers))
        self.scratch_column = context_tokens
        self._touched = 0

    def aim(self, window: Window) -> None:
        """Set where the next forward pass writes and what it reads."""
        self._touched = max(self._touched, window.span)
        for layer in self._layers:
            layer.window = window

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` columns of slot `source`."""
        for layer in self._layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys[target, :, :length] = layer.keys[source, :, :length]
                layer.values[target, :, :length] = layer.values[source, :, :length]

    def clear(self) -> None:
        """Zero all that was written: a NaN of earlier weights must not outlive them."""
        for layer in self._layers:
            for pool in (layer.keys, layer.values):
                if pool is not None:
                    pool[:, :, : self._touched] = 0
                    pool[:, :, self.scratch_column] = 0
        self._touched = 0

    def free(self) -> None:
        """Give the memory back; the next use allocates again."""
        for layer in self._layers:
            layer.keys = layer.values = None
            layer.is_initialized = False


def rows_of(first: int, slots_B: Tensor, *, together: bool) -> slice | Tensor:
    """How to read some slots: as a view when they follow each other from `first` on."""
    return slice(first, first + len(slots_B)) if together else slots_B


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over the pool without copying it once per query head.

    Query heads that share a key head become further rows of one query: (B, heads, T, width) to
    (B, key heads, group * T, width). The decoder's mask is additive, (B, 1, T, span); any other
    mask comes from a model that shares its configuration with the engine's, and gets the stock
    attention. Returns (B, T, heads, width), as transformers wants it.
    """
    if attention_mask is None or not attention_mask.is_floating_point():
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, new, width = query.shape
    group = heads // key.shape[1]
    grouped = query.reshape(rows, key.shape[1], group * new, width)
    mask = attention_mask if group == 1 or new == 1 else attention_mask.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=options.get("scaling")
    )
    return out.reshape(rows, heads, new, value.shape[-1]).transpose(1, 2).contiguous(), None


ATTENTION = "agentrl_grouped"
AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
