"""Prompts that don't fit are found before a run, not in the middle of it."""

from collections.abc import Sequence

from agentrl.errors import ConfigError
from agentrl.protocols import Renderer, Tool
from agentrl.types import Problem, user

_SHOWN = 10


def check_lengths(
    problems: Sequence[Problem], renderer: Renderer, tools: Sequence[Tool], *, context_tokens: int
) -> None:
    """Raise ConfigError, with task ids and tokens, for prompts that leave no room to answer."""
    # A token holds one byte at least, so most prompts need not be rendered.
    frame = len(renderer.open((user("x"),), tools))
    found: list[str] = []
    for problem in problems:
        messages = problem.task.prompt
        size = sum(len(m.content.encode(errors="replace")) + frame for m in messages)
        if messages and size >= context_tokens:
            tokens = len(renderer.open(messages, tools))
            if tokens >= context_tokens:
                found.append(f"{problem.task.id} ({tokens})")
    if found:
        raise ConfigError(
            f"{len(found)} of {len(problems)} prompts leave no room to answer in "
            f"engine.context_tokens ({context_tokens}): {', '.join(found[:_SHOWN])}"
            f"{', …' if len(found) > _SHOWN else ''}; raise it, or leave these problems out"
        )
