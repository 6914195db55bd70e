"""What all episodes of a run share."""

from dataclasses import dataclass

from agentrl.protocols import EnvironmentClass, InferenceEngine, Renderer, SandboxProvider


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an episode may use. Raises ValueError unless every limit is above 0.

    `context_tokens` bounds prompt, observations and actions together, `max_action_tokens` one
    action, `max_observation_tokens` one reply of the environment (longer ones are cut, and say
    so). `timeout_s` is wall clock over all phases, `grade_timeout_s` that of grading a group.
    """

    max_turns: int = 8
    max_action_tokens: int = 256
    context_tokens: int = 2048
    max_observation_tokens: int = 512
    timeout_s: float = 120.0
    grade_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"limit {name} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What all episodes of a run share: who acts, in what, how the talk is written, the limits."""

    engine: InferenceEngine
    renderer: Renderer
    environment: EnvironmentClass
    sandboxes: SandboxProvider | None = None
    limits: Limits = Limits()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
