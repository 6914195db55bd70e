"""One row of ids with a mask, as TRL (`rollout_func`) and verl (`AgentLoopOutput`) take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from agentrl.protocols import Renderer
from agentrl.store.formats.sample import (
    Added,
    Row,
    Sample,
    assemble,
    facts_of,
    message_of,
    openai_message,
    talk_of,
)
from agentrl.types import assistant


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatFormat:
    """The names that a library gives to the same columns.

    What stands behind the first observation is the response; `mask` is 1 where the policy sampled.
    Observations have logprob 0.0 there, which nobody may read.
    """

    ids: str
    mask: str
    logprobs: str
    reward: str

    def to_row(self, sample: Sample) -> Row:
        """A row of plain lists, with the messages beside them."""
        trajectory = sample.trajectory
        begin = len(trajectory.turns[0].observation.token_ids) if trajectory.turns else 0
        scored = all(turn.action.logprobs is not None for turn in trajectory.turns)
        logprobs = [p or 0.0 for p in trajectory.behavior_logprobs[begin:]] if scored else None
        return {
            "prompt": [openai_message(m) for m in trajectory.prompt],
            "completion": [
                openai_message(m) for m in trajectory.messages[len(trajectory.prompt) :]
            ],
            "prompt_ids": list(trajectory.token_ids[:begin]),
            self.ids: list(trajectory.token_ids[begin:]),
            self.mask: [int(sampled) for sampled in trajectory.action_mask[begin:]],
            self.logprobs: logprobs,
            self.reward: sample.verdict.reward,
            "num_turns": len(trajectory.turns),
            "extra_fields": {"agentrl": facts_of(sample)},
        }

    def of_row(self, row: Row, renderer: Renderer | None) -> Sample:
        """A sample from such a row. Without messages its turns have empty ones.

        Raises ValueError, KeyError or TypeError. What follows the last action is left out.
        """
        ids, mask, logprobs = row[self.ids], row[self.mask], row.get(self.logprobs)
        if len(mask) != len(ids) or (logprobs is not None and len(logprobs) != len(ids)):
            raise ValueError(f"{self.ids}, {self.mask} and {self.logprobs} differ in length")
        facts: Row = (row.get("extra_fields") or {}).get("agentrl") or {}
        sizes = [len(versions) for versions in facts.get("versions") or ()]
        spans = _spans(mask, sizes)
        said = [message_of(m) for m in (*(row.get("prompt") or ()), *(row.get("completion") or ()))]
        talk = talk_of([*said, *([] if said else [assistant("")] * len(spans))])
        if len(talk.turns) != len(spans):
            raise ValueError(f"{len(spans)} actions in the mask, {len(talk.turns)} in the messages")
        added: list[Added] = []
        end = 0
        for number, (begin, stop) in enumerate(spans):
            message, reply = talk.turns[number]
            before = row["prompt_ids"] if number == 0 else ()
            added.append(
                Added(
                    observation=[*before, *ids[end:begin]],
                    action=ids[begin:stop],
                    logprobs=None if logprobs is None else logprobs[begin:stop],
                    message=message,
                    reply=reply,
                )
            )
            end = stop
        return assemble(talk.prompt, added, row.get(self.reward), facts)


def _spans(mask: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each action: a run of ones (one action may not follow another directly)."""
    spans: list[tuple[int, int]] = []
    place = 0
    for sampled, run in groupby(mask, key=bool):
        length = len(list(run))
        if sampled:
            spans.append((place, place + length))
        place += length
    if sizes and [stop - begin for begin, stop in spans] != list(sizes):
        raise ValueError("the mask does not fit the recorded actions")
    return spans


TRL = FlatFormat(ids="completion_ids", mask="env_mask", logprobs="logprobs", reward="reward")
VERL = FlatFormat(
    ids="response_ids", mask="response_mask", logprobs="response_logprobs", reward="reward_score"
)
