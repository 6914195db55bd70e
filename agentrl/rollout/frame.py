"""What holds any episode: where it runs, its sandbox, its clock, its random streams."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from agentrl.rollout.actor import Actor
from agentrl.rollout.sandbox import SandboxOnDemand
from agentrl.rollout.stage import Stage
from agentrl.types import Sampling, Task

PLAY_SHARE = 0.9
"""Turns end at this share of the time limit: the rest is kept for taking artifacts."""


@dataclass(slots=True)
class Seconds:
    """Where the time of an episode went."""

    open_s: float = 0.0
    sample_s: float = 0.0
    tools_s: float = 0.0

    @contextmanager
    def measure(self, name: str) -> Generator[None]:
        """Add what the block takes to `name`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - begun)


@dataclass(slots=True)
class Frame:
    """What holds an episode, whoever leads it: the environment, or an agent program."""

    stage: Stage
    task: Task
    actor: Actor
    member: int = field(kw_only=True)
    seed: int = field(kw_only=True)
    seconds: Seconds = field(default_factory=Seconds)
    started: float = field(default_factory=time.monotonic)
    sandbox: SandboxOnDemand | None = field(init=False)

    def __post_init__(self) -> None:
        spec, provider = self.task.sandbox, self.stage.sandboxes
        self.sandbox = SandboxOnDemand(provider, spec) if provider and spec else None

    @property
    def id(self) -> str:
        """The episode's name."""
        return episode_id(self.task, self.seed, self.member)

    def deadline(self, share: float = 1.0) -> float:
        """When this share of the time limit is used up, in monotonic seconds."""
        return self.started + share * self.stage.limits.timeout_s

    def check_time(self) -> None:
        """Ignore what comes late: code that blocks or swallows its cancellation still returns."""
        if time.monotonic() >= self.deadline(PLAY_SHARE):
            raise TimeoutError

    def sampling(self, max_tokens: int, number: int) -> Sampling:
        """How action `number` of the episode is drawn."""
        return Sampling(
            max_tokens=max_tokens,
            stop_ids=self.stage.renderer.stop_ids,
            temperature=self.stage.temperature,
            top_p=self.stage.top_p,
            top_k=self.stage.top_k,
            seed=sampling_seed(self.seed, self.member, number),
        )

    def metrics(self) -> dict[str, float]:
        """Where the time went, so far."""
        return {
            "open_s": self.seconds.open_s,
            "sample_s": self.seconds.sample_s,
            "tools_s": self.seconds.tools_s,
            "total_s": time.monotonic() - self.started,
        }


def sampling_seed(seed: int, member: int, turn: int) -> int:
    """The seed of one action: the same on every machine, different for each member and turn."""
    digest = blake2b(f"{seed}:{member}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def episode_id(task: Task, seed: int, member: int) -> str:
    """Names an episode, also as the engine's session."""
    return f"{task.id}/{seed:x}/{member}"
