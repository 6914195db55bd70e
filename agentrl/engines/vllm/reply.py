"""vLLM's answer to a request, or none; checked: ids, logprobs and versions must add up."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from agentrl.errors import EngineFault
from agentrl.types import ActionTokens, Finish

_FINISHES: Mapping[str | None, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


class ReplicaLost(Exception):
    """The server did not answer, or answers as one that was started anew."""


class ReplicaFailed(ReplicaLost):
    """The server answered that it failed (5xx): dead, or alive and unable to do this."""


class Span(NamedTuple):
    """Sampled tokens `start` … `end` - 1 come from this version of the weights."""

    version: str
    start: int
    end: int


def action_of(
    ids: Sequence[int],
    scored: Sequence[tuple[int, float]],
    spans: Sequence[Span],
    finish_reason: str | None,
) -> ActionTokens:
    """The sampled action; `scored` holds each position's id again, with its logprob (nats).

    Raises EngineFault when anything is missing, too much, or not finite.
    """
    finish = _FINISHES.get(finish_reason)
    if finish is None or not ids:
        raise EngineFault(f"vLLM ended a request with {len(ids)} ids and finish {finish_reason}")
    if [token for token, _ in scored] != list(ids):
        raise EngineFault(
            f"vLLM gave {len(ids)} ids and {len(scored)} logprobs that are not theirs"
        )
    versions = [int(s.version) for s in spans for _ in range(s.start, s.end)]
    if len(versions) != len(ids):
        raise EngineFault(f"vLLM gave {len(ids)} ids and the versions of {len(versions)}")
    if not all(isfinite(logprob) for _, logprob in scored):
        raise EngineFault(
            "the model gave logits that are not finite: look at the last update's gradient norm, "
            "or use a wider dtype"
        )
    return ActionTokens(
        token_ids=tuple(ids),
        logprobs=tuple(logprob for _, logprob in scored),
        versions=tuple(versions),
        finish=finish,
    )


def scores_of(ids: Sequence[int], entries: Sequence[Mapping[int, float]]) -> list[float]:
    """The logprobs of a prompt's own ids after the first. Raises EngineFault if any is missing."""
    if len(entries) != len(ids) or any(
        i not in e for i, e in zip(ids[1:], entries[1:], strict=True)
    ):
        raise EngineFault(f"vLLM scored {len(entries)} of {len(ids)} prompt ids, or others")
    return [entry[token] for token, entry in zip(ids[1:], entries[1:], strict=True)]
