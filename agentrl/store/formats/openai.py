"""OpenAI chat messages: no ids, no logprobs. Import writes ids with a renderer."""

from agentrl.protocols import Renderer
from agentrl.store.formats.sample import (
    Row,
    Sample,
    assemble,
    facts_of,
    message_of,
    openai_message,
    spelled,
    talk_of,
)


def to_row(sample: Sample) -> Row:
    """`messages`, with reward and facts under `metadata`."""
    facts = facts_of(sample)
    del facts["versions"]  # of ids that are not here
    return {
        "messages": [openai_message(m) for m in sample.trajectory.messages],
        "metadata": {"reward": sample.verdict.reward, "agentrl": facts},
    }


def of_row(row: Row, renderer: Renderer | None) -> Sample:
    """A sample whose ids `renderer` wrote. Raises ValueError, KeyError or TypeError."""
    talk = talk_of([message_of(m) for m in row["messages"]])
    metadata: Row = row.get("metadata") or {}
    facts: Row = metadata.get("agentrl") or {}
    return assemble(talk.prompt, spelled(talk, renderer), metadata.get("reward"), facts)
