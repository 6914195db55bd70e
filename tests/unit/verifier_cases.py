"""Episodes that end with a given text, and the verdict on them."""

import asyncio
from typing import Any

from agentrl.protocols import Verifier
from agentrl.tools import problem
from agentrl.types import (
    ActionTokens,
    Ending,
    Episode,
    Message,
    ObservationTokens,
    Trajectory,
    Turn,
    Verdict,
)


def said(text: str, member: int = 0) -> Episode:
    turn = Turn(
        observation=ObservationTokens(token_ids=(1,)),
        action=ActionTokens(token_ids=(2,), logprobs=None, versions=(0,), finish="stop"),
        message=Message(role="assistant", content=text),
    )
    return Episode(
        trajectory=Trajectory(
            id=f"t{member}",
            task_id="t",
            member=member,
            seed=0,
            prompt=(Message(role="user", content="q"),),
            turns=(turn,),
            ending=Ending.ANSWERED,
        )
    )


def verdicts(verifier: Verifier, reference: Any, *texts: str, question: str = "q") -> list[Verdict]:
    episodes = [said(text, member) for member, text in enumerate(texts)]
    return list(asyncio.run(verifier.grade(problem(question, reference, id="t"), episodes, None)))
