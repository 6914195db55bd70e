"""The data that flows between the parts: frozen, checked when built, free of heavy imports.

Token ids are tuples of int, log-probabilities are in nats. Every per-token field of a record
has the length of its ids; masks, versions and concatenations are computed from the parts and
never stored beside them.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import groupby
from math import isfinite
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Literal

from agentrl.messages import Completion as Completion
from agentrl.messages import Message as Message
from agentrl.messages import Messages as Messages
from agentrl.messages import Role as Role
from agentrl.messages import ToolCall as ToolCall
from agentrl.messages import assistant as assistant
from agentrl.messages import system as system
from agentrl.messages import user as user

Finish = Literal["stop", "length", "abort"]

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class Ending(StrEnum):
    """Why an episode ended. Everything but `ANSWERED` is a truncation, and graded all the same."""

    ANSWERED = "answered"
    """The environment says that the episode is complete."""
    TRUNCATED = "truncated"
    """The environment cut the episode."""
    OUT_OF_TURNS = "out_of_turns"
    OUT_OF_TOKENS = "out_of_tokens"
    """The next turn does not fit the context or the episode's token budget."""
    CUT_OFF = "cut_off"
    """An action hit its own length limit."""
    TIMED_OUT = "timed_out"
    """The wall-clock limit of the episode ran out."""
    SANDBOX_LOST = "sandbox_lost"
    """The agent destroyed its own sandbox (out of memory, killed container)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationTokens:
    """Tokens that the policy did not sample: prompt, tool output, template scaffold, forced tokens.

    There is no logprob field: nobody can train on them by mistake.
    """

    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("an observation needs at least one token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTokens:
    """Tokens that the policy sampled in one turn, the stop token included if it was sampled.

    `logprobs` are under the sampling distribution (after temperature) of exactly these ids;
    None means that they are missing (never 0.0). `versions` is the policy version that sampled
    each token. `finish` is the engine's word, never guessed from the last id.

    Raises ValueError when the lengths differ, there is no id, or a logprob is not finite or > 0.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    versions: tuple[int, ...]
    finish: Finish

    def __post_init__(self) -> None:
        ids, logprobs = len(self.token_ids), self.logprobs
        if ids == 0:
            raise ValueError("an action needs at least one sampled token")
        if len(self.versions) != ids or (logprobs is not None and len(logprobs) != ids):
            scored = "no" if logprobs is None else len(logprobs)
            raise ValueError(
                f"an action has {ids} ids, {scored} logprobs and {len(self.versions)} versions; "
                "the three must agree"
            )
        # Rounding may push the logprob of a near-certain token slightly above 0.
        if logprobs is not None and not all(isfinite(p) and p < 1e-3 for p in logprobs):
            raise ValueError("every logprob must be finite and at most 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEvent:
    """What happened to one tool call.

    `seconds` is wall time, `output_bytes` the size before any cut, `cut` says whether the
    observation holds less than that. `at_s` counts from the start of the episode.
    """

    turn: int
    call_id: str
    name: str
    status: Literal["ok", "error", "malformed", "unknown", "timeout"]
    at_s: float
    seconds: float
    output_bytes: int
    cut: bool = False
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One observation and the action that answered it: only what this turn *added*.

    `message` is the parsed action, `reply` what the environment said to it, `reward` the
    environment's step reward (recorded; the learner only ever sees verdicts). `seen` is the digest
    of all ids that were before the action's writer (`digest_of_ids`); "" if nobody took it.
    """

    observation: ObservationTokens
    action: ActionTokens
    message: Message
    reply: Messages = ()
    reward: float = 0.0
    seen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode: strictly observation, action, observation, action, … action.

    `member` is the index inside the group, `seed` the group's: the environment was reset with it,
    and with member and turn it gives every sampling seed. `prompt` holds the messages that the
    first observation renders. `events` and `metrics` are for people.
    """

    id: str
    task_id: str
    member: int
    seed: int
    prompt: Messages
    turns: tuple[Turn, ...]
    ending: Ending
    events: tuple[ToolEvent, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=lambda: _EMPTY)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids in order: what the engine saw and sampled, byte for byte."""
        return tuple(i for part in self._parts() for i in part.token_ids)

    @property
    def action_mask(self) -> tuple[bool, ...]:
        """True where the policy sampled the token."""
        return tuple(
            isinstance(part, ActionTokens) for part in self._parts() for _ in part.token_ids
        )

    @property
    def behavior_logprobs(self) -> tuple[float | None, ...]:
        """The sampled tokens' logprobs (nats); None at observations.

        Raises ValueError naming the turn if an action has none.
        """
        out: list[float | None] = []
        for number, turn in enumerate(self.turns):
            out += [None] * len(turn.observation.token_ids)
            if turn.action.logprobs is None:
                raise ValueError(f"trajectory {self.id}: turn {number} has no logprobs")
            out += turn.action.logprobs
        return tuple(out)

    @property
    def versions(self) -> tuple[int | None, ...]:
        """The policy version behind each sampled token; None at observations."""
        out: list[int | None] = []
        for turn in self.turns:
            out += [None] * len(turn.observation.token_ids)
            out += turn.action.versions
        return tuple(out)

    @property
    def action_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(len(turn.action.token_ids) for turn in self.turns)

    @property
    def messages(self) -> Messages:
        """The whole conversation as messages, the last reply included."""
        out = list(self.prompt)
        for turn in self.turns:
            out += (turn.message, *turn.reply)
        return tuple(out)

    @property
    def answer(self) -> str:
        """The text of the last action: what an outcome verifier reads. "" if there is none."""
        return self.turns[-1].message.content if self.turns else ""

    def _parts(self) -> Iterator[ObservationTokens | ActionTokens]:
        for turn in self.turns:
            yield turn.observation
            yield turn.action


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox holds and what its processes may use.

    `files` maps paths (relative to the workspace) to contents laid down before the first call.
    `snapshot` is what the workspace holds before them: bytes that `Sandbox.snapshot` gave.
    `egress` lists host names that may be reached; empty means no network at all.

    Raises ValueError for a path that is absolute or leaves the workspace, and for a limit <= 0.
    """

    image: str = "python"
    files: Mapping[str, bytes] = field(default_factory=lambda: _EMPTY)
    snapshot: bytes = field(default=b"", repr=False)
    memory_mb: int = 512
    cpus: float = 1.0
    processes: int = 64
    workspace_mb: int = 64
    max_file_mb: int = 64
    max_output_bytes: int = 65_536
    egress: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for path in self.files:
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
                raise ValueError(f"sandbox file {path!r} must be a path inside the workspace")
        limits = ("memory_mb", "cpus", "processes", "workspace_mb", "max_file_mb")
        for name in (*limits, "max_output_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"sandbox limit {name} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one command did.

    `stdout` and `stderr` are cut at the spec's `max_output_bytes`; `stdout_bytes` and
    `stderr_bytes` are the true lengths. `exit_code` is None when the command was killed by the
    time limit; a signal n shows as 128 + n. Running out of memory, of processes or of time is
    the agent's doing, hence a result and not an error.
    """

    stdout: bytes
    stderr: bytes
    exit_code: int | None
    seconds: float
    stdout_bytes: int
    stderr_bytes: int
    timed_out: bool = False
    out_of_memory: bool = False

    @property
    def cut(self) -> bool:
        """Whether some output was left out."""
        return self.stdout_bytes > len(self.stdout) or self.stderr_bytes > len(self.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The public half of a problem: all that the agent and its environment may know.

    `setup` holds JSON values that the environment needs to open the episode, `artifacts` the
    workspace paths that the verifier will want to see. `family` names a kind of problem, for shares
    and for metrics; "" is none.
    """

    id: str
    prompt: Messages
    sandbox: SandboxSpec | None = None
    artifacts: tuple[str, ...] = ()
    setup: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    family: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a task needs an id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A task with its private half. `reference` reaches the verifier only; its repr is hidden.

    `grading` is the sandbox that the verifier runs code in; None if it runs none. Training draws
    it as often as its `weight` says, and mostly passes it over while its last pass rate lies
    outside `pass_band`.
    """

    task: Task
    reference: Any = field(default=None, repr=False)
    grading: SandboxSpec | None = None
    weight: float = 1.0
    pass_band: tuple[float, float] = (0.0, 1.0)

    @property
    def needs_sandboxes(self) -> bool:
        """Whether an episode of it, or its grading, opens a sandbox."""
        return self.task.sandbox is not None or self.grading is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a verifier may look at: the trajectory and the artifacts taken when it ended.

    `artifacts` maps each of the task's artifact paths that existed to its (size-capped) bytes.
    `segments` are further conversations of the same episode, where an outside agent held several:
    forks, retries, side talks. `trajectory` is the one that had the last action.
    """

    trajectory: Trajectory
    segments: tuple[Trajectory, ...] = ()
    artifacts: Mapping[str, bytes] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The only number that the learner ever sees: a finite reward, or invalid with a reason.

    `passed` is what success rates count. `components` are named parts of the reward,
    `step_rewards` one number per turn for process supervision, `note` a line for people.

    Raises ValueError unless exactly one of `reward` (finite) and `invalid` is given.
    """

    reward: float | None = None
    invalid: str | None = None
    passed: bool = False
    components: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    step_rewards: tuple[float, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.invalid is None):
            raise ValueError("a verdict is a reward or a reason why there is none, not both")
        numbers = (self.reward or 0.0, *self.components.values(), *self.step_rewards)
        if not all(isfinite(x) for x in numbers):
            raise ValueError("every number of a verdict must be finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one task instance, with their verdicts, in the same order.

    Trajectories with the same `member` are segments of one episode: they lie side by side, share
    its verdict, and count once in every mean. May be uneven: members lost to infrastructure are
    only named in `faults`. `task` and each trajectory's `artifacts` are what a replay starts from;
    None and () if nobody kept them.
    """

    task_id: str
    trajectories: tuple[Trajectory, ...]
    verdicts: tuple[Verdict, ...]
    faults: tuple[str, ...] = ()
    task: Task | None = None
    artifacts: tuple[Mapping[str, bytes], ...] = ()

    def __post_init__(self) -> None:
        if self.artifacts and len(self.artifacts) != len(self.trajectories):
            raise ValueError(f"group {self.task_id}: artifacts are not one for each trajectory")
        if len(self.trajectories) != len(self.verdicts):
            raise ValueError(
                f"group {self.task_id}: {len(self.trajectories)} trajectories, "
                f"{len(self.verdicts)} verdicts"
            )
        if any(t.task_id != self.task_id for t in self.trajectories):
            raise ValueError(f"group {self.task_id} holds a trajectory of another task")
        if len(self.members) != len({t.member for t in self.trajectories}):
            raise ValueError(f"group {self.task_id}: a member's segments don't lie side by side")
        for places in self.members:
            if len({(self.verdicts[p].reward, self.verdicts[p].invalid) for p in places}) > 1:
                member = self.trajectories[places[0]].member
                raise ValueError(f"group {self.task_id}: member {member} has several verdicts")

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The places of each member's trajectories: of the one, or of the episode's segments."""
        numbered = groupby(range(len(self.trajectories)), key=lambda p: self.trajectories[p].member)
        return tuple(tuple(places) for _, places in numbered)

    @property
    def member_verdicts(self) -> tuple[Verdict, ...]:
        """One verdict for each member."""
        return tuple(self.verdicts[places[0]] for places in self.members)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the members that have one."""
        return tuple(v.reward for v in self.member_verdicts if v.reward is not None)

    @property
    def has_signal(self) -> bool:
        """Whether two members earned different rewards."""
        return len(set(self.rewards)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The environment's answer to one action, in Gymnasium's terms."""

    observation: Messages = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    events: tuple[ToolEvent, ...] = ()
    info: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the engine draws tokens.

    `temperature` 0 is greedy. `stop_ids` is a set: sampling any of them ends the action.
    `seed` makes the draw of this request repeatable whatever else is in flight.
    """

    max_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if self.temperature < 0 or not isfinite(self.temperature):
            raise ValueError("temperature must be finite and at least 0")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError("top_p must be in (0, 1] and top_k at least 0 (0: off)")


def digest_of_ids(token_ids: Iterable[int]) -> str:
    """16 hex digits that stand for a sequence of ids (64 bits of BLAKE2b over int64)."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=8).hexdigest()
