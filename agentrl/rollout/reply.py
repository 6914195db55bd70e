"""Fits what the environment says into its share of tokens."""

from dataclasses import replace

from agentrl.protocols import Renderer
from agentrl.types import Message, Messages


def fit_reply(
    renderer: Renderer, reply: Messages, *, last_id: int, max_tokens: int
) -> tuple[tuple[int, ...], Messages] | None:
    """The ids of a reply and the messages they show: cut, with a note, to `max_tokens` ids.

    The longest contents lose their middle first. A message that is left whole is the same
    object. None if it does not fit however much is cut.
    """
    ids = renderer.extend(reply, last_id)
    if len(ids) <= max_tokens:
        return ids, reply
    fitted: tuple[tuple[int, ...], Messages] | None = None
    # A token seldom holds more than 16 characters: no need to render what is far too long.
    low, high = 0, min(max((len(m.content) for m in reply), default=0), 16 * max_tokens)
    while low <= high:
        keep = (low + high) // 2
        shorter = tuple(_cut_middle(message, keep) for message in reply)
        ids = renderer.extend(shorter, last_id)
        if len(ids) <= max_tokens:
            fitted, low = (ids, shorter), keep + 1
        else:
            high = keep - 1
    return fitted


def _cut_middle(message: Message, keep: int) -> Message:
    text = message.content
    note = f"\n[{len(text) - keep} characters left out]\n"
    if len(text) <= keep + len(note):
        return message
    tail = keep // 2
    return replace(message, content=text[: keep - tail] + note + text[len(text) - tail :])
