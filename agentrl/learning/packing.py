"""Rows laid end to end, without padding: how a model reads them and what it says of each token.

`token_logprobs` owns the only shift of the project: what the logits at column t - 1 say belongs to
the token at column t.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from agentrl.errors import ConfigError

ATTENTION = "agentrl_packed"


class TokenScores(NamedTuple):
    """What a model says of some tokens: log-probabilities and entropies, both fp32 [N], in nats."""

    logprobs: Tensor
    entropy: Tensor


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed batch.

    query, key and value are [1, H, T, D]. Rows are padded on the right for this operation alone;
    causality keeps padding out of every real position, so no mask is needed.
    """
    lengths = cu_seq_lens_q.diff()
    row_T = torch.repeat_interleave(torch.arange(len(lengths), device=query.device), lengths)
    column_T = torch.arange(query.shape[2], device=query.device) - cu_seq_lens_q[row_T]

    def unpack(packed: Tensor) -> Tensor:
        _, heads, _, width = packed.shape
        rows = packed.new_zeros(len(lengths), max_length_q, heads, width)
        return rows.index_put((row_T, column_T), packed[0].transpose(0, 1)).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        unpack(query),
        unpack(key),
        unpack(value),
        is_causal=True,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)[row_T, column_T][None], None


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model read packed rows. Raises ConfigError for attention that isn't full and causal."""
    config = model.config.get_text_config()
    windowed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windowed or (getattr(config, "sliding_window", None) and not hasattr(config, "layer_types")):
        raise ConfigError(
            f"{type(model).__name__} has {', '.join(sorted(windowed)) or 'sliding windows'}: only "
            "full causal attention can be packed"
        )
    model.set_attn_implementation(ATTENTION)
    return model


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def token_logprobs(
    model: PreTrainedModel,
    input_ids_T: Tensor,
    lengths_B: Tensor,
    wanted_T: Tensor,
    *,
    temperature: float,
    chunk_tokens: int = 4096,
) -> TokenScores:
    """Log-probabilities of the tokens marked in `wanted_T`, each given its own row's past.

    `input_ids_T` holds rows of `lengths_B` ids end to end; a row's first token can't be wanted.
    Scores are fp32, in the order of the marked columns, under softmax(logits / temperature).
    The head runs on the wanted tokens only, `chunk_tokens` at a time.
    """
    input_ids_T, lengths_B, wanted_T = (
        x.to(model.device) for x in (input_ids_T, lengths_B, wanted_T)
    )
    ends = lengths_B.cumsum(0)
    starts = F.pad(ends, (1, 0))
    positions = torch.arange(len(input_ids_T), device=input_ids_T.device)
    positions = positions - torch.repeat_interleave(starts[:-1], lengths_B)
    hidden = model.get_decoder()(
        input_ids=input_ids_T[None],
        position_ids=positions[None],
        use_cache=False,
        cu_seq_lens_q=starts,
        max_length_q=int(lengths_B.max()),
    ).last_hidden_state[0]
    columns = wanted_T.nonzero()[:, 0]
    head = model.get_output_embeddings()
    before, targets = hidden[columns - 1], input_ids_T[columns]
    scored = [
        checkpoint(_score, head, some, ids, temperature, use_reentrant=False)
        for some, ids in zip(before.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    return TokenScores(*(torch.cat(parts) for parts in zip(*scored, strict=True)))


def _score(head: nn.Module, hidden: Tensor, ids: Tensor, temperature: float) -> TokenScores:
    logprobs = F.log_softmax(head(hidden).float() / temperature, dim=-1)
    entropy = -torch.where(logprobs > -torch.inf, logprobs.exp() * logprobs, 0.0).sum(-1)
    return TokenScores(logprobs.gather(-1, ids[:, None])[:, 0], entropy)
