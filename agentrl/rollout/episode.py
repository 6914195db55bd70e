"""One episode while it runs: its turns, its record, its clock."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from agentrl.errors import EnvironmentFault, SandboxLost
from agentrl.guard import blaming
from agentrl.protocols import Environment
from agentrl.rollout.actor import Actor
from agentrl.rollout.reply import fit_reply
from agentrl.rollout.sandbox import SandboxOnDemand
from agentrl.rollout.stage import Stage
from agentrl.types import (
    Ending,
    Messages,
    ObservationTokens,
    Sampling,
    Step,
    Task,
    ToolEvent,
    Trajectory,
    Turn,
    digest_of_ids,
)

PLAY_SHARE = 0.9
"""Turns end at this share of the time limit: the rest is kept for taking artifacts."""

_LOST = (SandboxLost,)


@dataclass(slots=True)
class _Seconds:
    """Where the time of an episode went."""

    open_s: float = 0.0
    sample_s: float = 0.0
    tools_s: float = 0.0

    @contextmanager
    def measure(self, name: str) -> Generator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - begun)


@dataclass(slots=True)
class LiveEpisode:
    """One episode while it runs."""

    stage: Stage
    task: Task
    actor: Actor
    member: int = field(kw_only=True)
    seed: int = field(kw_only=True)
    prompt: Messages = ()
    turns: list[Turn] = field(default_factory=list[Turn])
    events: list[ToolEvent] = field(default_factory=list[ToolEvent])
    token_ids: list[int] = field(default_factory=list[int])
    seconds: _Seconds = field(default_factory=_Seconds)
    started: float = field(default_factory=time.monotonic)
    sandbox: SandboxOnDemand | None = field(init=False)

    def __post_init__(self) -> None:
        spec, provider = self.task.sandbox, self.stage.sandboxes
        self.sandbox = SandboxOnDemand(provider, spec) if provider and spec else None

    def deadline(self, share: float = 1.0) -> float:
        """When this share of the time limit is used up, in monotonic seconds."""
        return self.started + share * self.stage.limits.timeout_s

    async def play(self, environment: Environment) -> Ending:
        """Take turns until the episode ends. Raises a Fault, or SandboxLost."""
        observation, reply = await self._open(environment)
        while (ending := await self._act(observation, reply)) is None:
            step = await self._step(environment)
            if step.terminated:
                return Ending.ANSWERED
            if step.truncated:
                return Ending.TRUNCATED
            if len(self.turns) >= self.stage.limits.max_turns:
                return Ending.OUT_OF_TURNS
            shown = self._show(step)
            if shown is None:
                return Ending.OUT_OF_TOKENS
            observation, reply = shown
        return ending

    def trajectory(self, ending: Ending) -> Trajectory:
        """What has happened so far, as a record."""
        seconds = self.seconds
        return Trajectory(
            id=episode_id(self.task, self.seed, self.member),
            task_id=self.task.id,
            member=self.member,
            seed=self.seed,
            prompt=self.prompt,
            turns=tuple(self.turns),
            ending=ending,
            events=tuple(self.events),
            metrics={
                "open_s": seconds.open_s,
                "sample_s": seconds.sample_s,
                "tools_s": seconds.tools_s,
                "total_s": time.monotonic() - self.started,
            },
        )

    async def _open(self, environment: Environment) -> tuple[tuple[int, ...], Messages]:
        with self.seconds.measure("open_s"), blaming(EnvironmentFault, "reset", but=_LOST):
            messages, _ = await environment.reset(self.task, seed=self.seed)
            ids = self.stage.renderer.open(messages, environment.tools)
        limit = self.stage.limits.context_tokens
        if len(ids) >= limit:
            raise EnvironmentFault(
                f"task {self.task.id}: its prompt has {len(ids)} tokens, which leaves no room to "
                f"answer in engine.context_tokens ({limit}); raise it, or leave the problem out"
            )
        self.prompt = tuple(messages)
        return ids, self.prompt

    async def _act(self, observation: tuple[int, ...], reply: Messages) -> Ending | None:
        """One action, added to the record; an ending if there can be none or it was cut off."""
        limits = self.stage.limits
        room = limits.context_tokens - len(self.token_ids) - len(observation)
        if room < 1:
            return Ending.OUT_OF_TOKENS
        sampling = self._sampling(min(room, limits.max_action_tokens))
        with self.seconds.measure("sample_s"):
            before = (*self.token_ids, *observation)
            action = await self.actor.act(before, sampling, reply)
        self._check_time()
        if action is None:
            return Ending.OUT_OF_TURNS
        self.token_ids += (*observation, *action.token_ids)
        self.turns.append(
            Turn(
                observation=ObservationTokens(token_ids=observation),
                action=action,
                message=self.stage.renderer.parse(action.token_ids),
                seen=digest_of_ids(before),
            )
        )
        if action.finish == "stop":
            return None
        return Ending.CUT_OFF if room >= limits.max_action_tokens else Ending.OUT_OF_TOKENS

    def _check_time(self) -> None:
        """Ignore what comes late: code that blocks or swallows its cancellation still returns."""
        if time.monotonic() >= self.deadline(PLAY_SHARE):
            raise TimeoutError

    def _sampling(self, max_tokens: int) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            stop_ids=self.stage.renderer.stop_ids,
            temperature=self.stage.temperature,
            top_p=self.stage.top_p,
            top_k=self.stage.top_k,
            seed=sampling_seed(self.seed, self.member, len(self.turns)),
        )

    async def _step(self, environment: Environment) -> Step:
        """The environment's answer to the last action, added to the record."""
        last = self.turns[-1]
        if self.sandbox is not None and last.message.tool_calls:
            # Before the tool's own clock starts: opening is not the agent's time.
            with self.seconds.measure("open_s"):
                await self.sandbox.opened()
        commands = len(self.sandbox.exit_codes) if self.sandbox else 0
        with self.seconds.measure("tools_s"), blaming(EnvironmentFault, "step", but=_LOST):
            step = await environment.step(last.message)
        self._check_time()
        if self.sandbox is not None:
            exits = self.sandbox.exit_codes[commands:]
            step = replace(step, events=tuple(_with_exits(step.events, exits)))
        self.turns[-1] = replace(last, reply=tuple(step.observation), reward=step.reward)
        self.events += step.events
        return step

    def _show(self, step: Step) -> tuple[tuple[int, ...], Messages] | None:
        """The reply as ids and messages, cut to its limit; None if it can't be made to fit."""
        last = self.turns[-1]
        with blaming(EnvironmentFault, "rendering the reply"):
            fitted = fit_reply(
                self.stage.renderer,
                last.reply,
                last_id=last.action.token_ids[-1],
                max_tokens=self.stage.limits.max_observation_tokens,
            )
        if fitted is None:
            return None
        ids, shown = fitted
        if not ids:
            raise EnvironmentFault("step gave no observation and did not end the episode")
        cut = {
            whole.tool_call_id
            for whole, part in zip(last.reply, shown, strict=True)
            if part is not whole
        }
        if cut:
            self.turns[-1] = replace(last, reply=shown)
            first = len(self.events) - len(step.events)
            self.events[first:] = [
                replace(event, cut=True) if event.call_id in cut else event for event in step.events
            ]
        return ids, shown


def _with_exits(
    events: Sequence[ToolEvent], exit_codes: Sequence[int | None]
) -> Iterator[ToolEvent]:
    """The events with their exit codes, where each call that reached a tool ran one command."""
    ran = [event for event in events if event.status in ("ok", "error", "timeout")]
    codes = iter(exit_codes if len(exit_codes) == len(ran) else ())
    for event in events:
        known = event.exit_code is not None or event not in ran
        yield event if known else replace(event, exit_code=next(codes, None))


def sampling_seed(seed: int, member: int, turn: int) -> int:
    """The seed of one action: the same on every machine, different for each member and turn."""
    digest = blake2b(f"{seed}:{member}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def episode_id(task: Task, seed: int, member: int) -> str:
    """Names an episode, also as the engine's session."""
    return f"{task.id}/{seed:x}/{member}"
