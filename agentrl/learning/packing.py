"""Rows laid end to end, without padding: how a model reads them and what it says of each token.

`token_logprobs` owns the only shift of the project: what the logits at column t - 1 say belongs to
the token at column t.
"""

from collections.abc import Generator
from contextlib import contextmanager
from math import isnan
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.learning.layout import Layout, layout_of
from agentrl.learning.loss import entropy_of

ATTENTION = "agentrl_packed"
_HEAD_TOKENS = 1024
_SCALED_LOGITS = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale")
_PROBE_LENGTHS = (5, 3)
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


class TokenScores(NamedTuple):
    """What a model says of some tokens: log-probabilities and entropies, both fp32 [N], in nats.

    `hidden` [N, D] is the state that each token was predicted from.
    """

    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    layout: Layout,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed batch, without dropout.

    query, key and value are [1, H, N, D], `layout` says which columns are whose.
    """
    return layout.attend(query, key, value, scaling), None


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model read packed rows, in place, and prove it on a few tokens.

    Dropout is switched off: with it the importance ratio would be noise. Raises ConfigError for
    a model whose packed logprobs would differ from its own: windowed or linear attention, scaled
    logits, anything else that makes the proof fail.
    """
    if model.config._attn_implementation == ATTENTION:  # pyright: ignore[reportPrivateUsage]
        return model
    _refuse_what_cannot_be_packed(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    was_training = model.training
    gap = _packing_gap(model.eval())
    model.train(was_training)
    if isnan(gap):
        raise ConfigError(
            f"{type(model).__name__}: logprobs are not finite; its weights are damaged"
        )
    if gap > _TOLERANCE[model.dtype]:
        raise ConfigError(
            f"{type(model).__name__} can't be trained on packed rows: its logprobs differ by "
            f"{gap:.3g} nats from those of a plain forward; use another model"
        )
    return model


@contextmanager
def packed(model: PreTrainedModel) -> Generator[PreTrainedModel]:
    """A model that reads packed rows inside the block, and plain input again afterwards."""
    before = model.config._attn_implementation or "sdpa"  # pyright: ignore[reportPrivateUsage]
    try:
        yield pack(model)
    finally:
        model.set_attn_implementation(before)


def token_logprobs(
    model: PreTrainedModel,
    input_ids_T: Tensor,
    lengths_B: Tensor,
    wanted_T: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool = False,
    groups_B: Tensor | None = None,
) -> TokenScores:
    """Log-probabilities of the tokens marked in `wanted_T`, each given its own row's past.

    `input_ids_T` holds rows of `lengths_B` ids end to end; a row's first token can't be wanted.
    Scores are fp32, in the order of the marked columns, under softmax(logits / temperature).
    With `groups_B`, what neighbouring rows of a group begin with is computed once.
    The head runs on the wanted tokens only, some at a time, and again in the backward pass.
    """
    input_ids_T, wanted_T = input_ids_T.to(model.device), wanted_T.to(model.device)
    groups = None if groups_B is None else groups_B.tolist()
    layout = layout_of(input_ids_T, lengths_B.tolist(), groups)
    hidden = model.get_decoder()(
        input_ids=input_ids_T[layout.kept][None],
        position_ids=layout.positions[None],
        use_cache=False,
        layout=layout,
    ).last_hidden_state[0]
    columns = wanted_T.nonzero()[:, 0]
    head: nn.Module = model.get_output_embeddings()  # pyright: ignore[reportAssignmentType]
    before, targets = hidden[layout.place[columns - 1]], input_ids_T[columns]
    scored = [
        _score_again(head, some, ids, temperature, entropy_gradient)
        for some, ids in zip(before.split(_HEAD_TOKENS), targets.split(_HEAD_TOKENS), strict=True)
    ]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*scored, strict=True))
    return TokenScores(logprobs, entropy, before)


def _score_again(
    head: nn.Module, hidden: Tensor, ids: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Logits are the largest tensor of all, so only their recipe is kept for the backward pass."""
    return checkpoint(_score, head, hidden, ids, temperature, entropy_gradient, use_reentrant=False)  # pyright: ignore[reportReturnType]


def _score(
    head: nn.Module, hidden: Tensor, ids: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logprobs = F.log_softmax(_logits(head, hidden) / temperature, dim=-1)
    entropy = entropy_of(logprobs if entropy_gradient else logprobs.detach())
    return logprobs.gather(-1, ids[:, None])[:, 0], entropy


def _logits(head: nn.Module, hidden: Tensor) -> Tensor:
    """In the head's own dtype whatever the body computes in; a learner keeps it in float32."""
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.to(next(head.parameters()).dtype)).float()


@torch.no_grad()
def _packing_gap(model: PreTrainedModel) -> float:
    """Switch to packed attention; the largest change that makes to the logprobs of two rows."""
    rows = torch.arange(sum(_PROBE_LENGTHS), device=model.device).split(list(_PROBE_LENGTHS))
    plain = torch.cat([_plain_logprobs(model, row) for row in rows])
    model.set_attn_implementation(ATTENTION)
    wanted = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    ids, lengths = torch.cat(rows), torch.tensor(_PROBE_LENGTHS)
    try:
        packed = token_logprobs(model, ids, lengths, wanted, temperature=1.0).logprobs
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"{type(model).__name__} can't read packed rows "
            f"({' '.join(str(error).split())[:120]}); "
            "use another model"
        ) from None
    return float((packed - plain).abs().max())


def _plain_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The model's own word on a row's tokens after the first."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return F.log_softmax(logits, dim=-1).gather(-1, ids[1:, None])[:, 0]


def _refuse_what_cannot_be_packed(model: PreTrainedModel) -> None:
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = bool(getattr(config, "sliding_window", None)) and not kinds
    if kinds - {"full_attention"} or windowed:
        what = ", ".join(sorted(kinds - {"full_attention"})) or "sliding_window"
        raise ConfigError(f"{name} has {what}: only full causal attention can be packed")
    for option in _SCALED_LOGITS:
        if getattr(config, option, None) not in (None, 1.0):
            raise ConfigError(f"{name} sets {option}, which packed rows would leave out")
    if model.dtype not in _TOLERANCE:
        raise ConfigError(f"{name} has weights of {model.dtype}; use float32 or bfloat16")
