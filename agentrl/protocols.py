"""The seams: what a part must offer, and nothing about how.

At most four members each, none optional. A lifecycle is a context manager, so nothing that is
opened can be forgotten open.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from agentrl.lesson import Lesson
from agentrl.types import (
    ActionTokens,
    Completion,
    Episode,
    ExecResult,
    Group,
    Message,
    Messages,
    Problem,
    Sampling,
    SandboxSpec,
    Step,
    Task,
    Verdict,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from agentrl.learning.batch import Batch

Isolation = Literal["none", "process", "container", "vm"]
Split = Literal["train", "test"]


class Tool(Protocol):
    """One tool as the model sees it, callable by its environment."""

    @property
    def name(self) -> str:
        """What the model calls it by."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """The function schema in the OpenAI form: name, description, JSON-schema parameters."""
        ...


class InferenceEngine(Protocol):
    """Samples from the policy: tokens in, tokens and logprobs out."""

    version: int
    """The policy version that it serves: what `WeightSync.publish` last set."""

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> ActionTokens:
        """Sample one action after `prompt_ids` (the whole episode so far).

        `session` names the episode, so that its prefix is found again. Raises EngineFault when
        the engine fails; cancelling the call frees what it held.
        """
        ...

    def released(self) -> AbstractAsyncContextManager[None]:
        """Give up the accelerator while the learner works; no request is running inside."""
        ...


class EngineClass(Protocol):
    """What a registered engine is: opened as a context, it serves a copy of a policy.

    Further keyword parameters are its `engine.options`. The opened engine also takes weights
    (`agentrl.engines.weights.PublishableEngine`), so that a run can publish to it.
    """

    def __call__(
        self, model: "PreTrainedModel", *, max_concurrent: int, context_tokens: int
    ) -> AbstractAsyncContextManager[InferenceEngine]:
        """An engine that owns `model` from now on."""
        ...


class Renderer(Protocol):
    """Turns messages into ids and sampled ids into a message, by appending only."""

    stop_ids: frozenset[int]
    """Sampling any of these ends an action."""

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """The ids of the whole prompt, up to where the policy starts to write."""
        ...

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The sampled ids as an assistant message. Never raises: a bad call is data."""
        ...

    def extend(self, reply: Sequence[Message], last_id: int | None) -> tuple[int, ...]:
        """The ids that follow an action, up to where the policy writes again.

        `last_id` is the action's last sampled id: what the template puts after a stop token is
        added exactly once, and a stop token that was not sampled is added here, as scaffold.
        """
        ...


@runtime_checkable
class Writer(Protocol):
    """The other direction, for scripted policies: the ids that the model would have sampled."""

    def write(self, message: Message) -> tuple[int, ...]:
        """The ids of an assistant message, its stop token included. Parsing gives it back."""
        ...


class Environment(Protocol):
    """One episode at text level, in Gymnasium's terms."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools the policy may call."""
        ...

    async def reset(self, task: Task, *, seed: int) -> tuple[Messages, Mapping[str, Any]]:
        """Start the episode. Returns the opening messages (the whole prompt) and an info."""
        ...

    async def step(self, action: Message) -> Step:
        """Answer one action. A ToolError never leaves it; an exception is an EnvironmentFault."""
        ...

    async def artifacts(self) -> Mapping[str, bytes]:
        """What the verifier may see of the final state, by name, size-capped."""
        ...


class ChatPolicy(Protocol):
    """The policy as an agent program sees it: messages in, a message out."""

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Completion:
        """The policy's next message. Raises RequestError: no room, no turns, or no messages.

        A talk that begins like an earlier one of this episode goes on from its sampled ids. The
        answer is cut before the first of the `stop` texts; what was sampled stays whole.
        """
        ...


@runtime_checkable
class Harness(Protocol):
    """What an Environment also is if an agent program leads its episodes.

    Nobody resets or steps it: the program asks the policy when it wants to.
    """

    async def run_agent(self, task: Task, policy: ChatPolicy, *, seed: int) -> bool:
        """Run the program to its end; whether it came there by itself.

        Errors are as in `Environment.step`. A RequestError that leaves it ends the episode.
        """
        ...


class Sandbox(Protocol):
    """A handle on one running sandbox."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command in the workspace and wait for it, at most `timeout_s` seconds.

        Afterwards none of its processes is left and the session stays usable. Raises SandboxFault
        if the infrastructure is gone, SandboxLost if the agent ended its own sandbox.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """A regular file of the workspace. Raises ToolError: missing, not regular, too large."""
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file of the workspace, with its folders. Raises ToolError: outside, or full."""
        ...

    async def snapshot(self, *, max_bytes: int) -> bytes:
        """The workspace's regular files and folders, for `SandboxSpec.snapshot`: equal if they are.

        Links and other special files are left out. Raises ToolError: a file that can't be read,
        or more than `max_bytes` together.
        """
        ...


class SandboxProvider(Protocol):
    """Opens sandboxes of one kind."""

    isolation: Isolation

    def session(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox; when the context ends nothing of it is left."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Its name, version and what it does not limit, as a run's record keeps it."""
        ...

    async def prune(self, run_id: str) -> int:
        """Remove what a dead run left behind ("" for any run) and say how many."""
        ...


class Verifier(Protocol):
    """Grades a whole group, so that pairwise graders fit."""

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict for each episode, in order. Runs after the agent's sandbox is closed.

        `sandboxes` opens fresh ones, to run what an episode left; None unless `problem.grading`.
        """
        ...


class EnvironmentClass(Protocol):
    """What a registered environment is: makes episodes, problems and the verifier."""

    def __call__(self, *, sandbox: Sandbox | None) -> Environment:
        """One episode's environment around its sandbox (None if the task asks for none)."""
        ...

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split; train and test don't overlap."""
        ...

    @property
    def verifier(self) -> Verifier:
        """Grades the episodes of every problem."""
        ...

    @property
    def scripts(self) -> "Mapping[str, Script]":
        """Scripted policies by name: "oracle" solves, "null" does nothing; others may cheat."""
        ...


Script = Callable[[Problem], Generator[Message, Messages, None]]
"""A policy as a generator: yields assistant messages and is sent what the environment replied."""


class Learner(Protocol):
    """Takes one step per batch. Synchronous, used from one thread at a time."""

    version: int
    """How many updates it has taken."""

    def update(self, batch: "Batch") -> Mapping[str, float]:
        """One policy step; returns its statistics. Raises NonFiniteLoss."""
        ...

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        """The weights to publish, by name."""
        ...

    def logprobs(self, token_ids: Sequence[int], temperature: float) -> Sequence[float]:
        """Entry t-1 is the logprob of token t given the ids before it (nats). For probes."""
        ...


class WeightSync(Protocol):
    """Brings the learner's weights to the engine."""

    async def publish(self, learner: Learner) -> None:
        """Make the engine serve `learner.version`. Raises WeightsNotApplied if it does not."""
        ...


class TrajectoryStore(Protocol):
    """Where groups are kept before the learner sees them, and later what it made of them."""

    def append(self, groups: Sequence[Group], *, version: int) -> None:
        """Write the groups of one step, whole or not at all."""
        ...

    def append_lessons(
        self, lessons: Sequence[Lesson], stats: Mapping[str, float], *, version: int
    ) -> None:
        """Write, after step `version`, what the learner made of its groups, and its statistics."""
        ...

    def read(self, *, version: int | None = None) -> Iterator[Group]:
        """The groups of one step, or all of them in order."""
        ...


class Reporter(Protocol):
    """Who is told how long work goes."""

    def phase(self, name: str, total: int | None) -> None:
        """A new piece of work begins, of `total` units (None: unknown)."""
        ...

    def advance(self, units: int = 1) -> None:
        """Some units of the phase are done."""
        ...

    def metrics(self, row: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl was written; `row["kind"]` is "step" or "eval"."""
        ...

    def note(self, text: str) -> None:
        """One line that a person should read."""
        ...
