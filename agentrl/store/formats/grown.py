"""Turns from requests that each repeat the whole history."""

from collections.abc import Iterator, Sequence

from agentrl.store.formats.sample import Added, Talk


def grown(
    talk: Talk,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float] | None],
) -> Iterator[Added]:
    """What each request added to the one before.

    Raises ValueError naming the turn whose prompt does not begin with all that came before: such a
    history was rewritten or tokenised again, and one row of ids can't stand for it.
    """
    before: list[int] = []
    turns = zip(talk.turns, prompts, completions, logprobs, strict=True)
    for number, ((message, reply), prompt, completion, scores) in enumerate(turns):
        if list(prompt[: len(before)]) != before:
            raise ValueError(
                f"turn {number}: its prompt does not begin with the ids of the turns before it"
            )
        yield Added(
            observation=prompt[len(before) :],
            action=completion,
            logprobs=scores or None,
            message=message,
            reply=reply,
        )
        before = [*prompt, *completion]
