"""One episode that the environment leads, while it runs: its turns and its record."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from agentrl.errors import EnvironmentFault, SandboxLost
from agentrl.guard import blaming
from agentrl.protocols import Environment
from agentrl.rollout.frame import Frame
from agentrl.rollout.reply import fit_reply
from agentrl.types import (
    Ending,
    Messages,
    ObservationTokens,
    Step,
    ToolEvent,
    Trajectory,
    Turn,
    digest_of_ids,
)

_LOST = (SandboxLost,)


@dataclass(slots=True)
class LiveEpisode:
    """One episode while it runs: the environment answers the policy's actions."""

    frame: Frame
    environment: Environment
    prompt: Messages = ()
    turns: list[Turn] = field(default_factory=list[Turn])
    events: list[ToolEvent] = field(default_factory=list[ToolEvent])
    token_ids: list[int] = field(default_factory=list[int])

    async def play(self) -> Ending:
        """Take turns until the episode ends. Raises a Fault, or SandboxLost."""
        observation, reply = await self._open()
        while (ending := await self._act(observation, reply)) is None:
            step = await self._step()
            if step.terminated:
                return Ending.ANSWERED
            if step.truncated:
                return Ending.TRUNCATED
            if len(self.turns) >= self.frame.stage.limits.max_turns:
                return Ending.OUT_OF_TURNS
            shown = self._show(step)
            if shown is None:
                return Ending.OUT_OF_TOKENS
            observation, reply = shown
        return ending

    @property
    def begun(self) -> bool:
        """Whether there is a first action."""
        return bool(self.turns)

    def trajectories(self, ending: Ending) -> tuple[Trajectory, ...]:
        """What has happened so far, as a record."""
        return (
            Trajectory(
                id=self.frame.id,
                task_id=self.frame.task.id,
                member=self.frame.member,
                seed=self.frame.seed,
                prompt=self.prompt,
                turns=tuple(self.turns),
                ending=ending,
                events=tuple(self.events),
                metrics=self.frame.metrics(),
            ),
        )

    async def _open(self) -> tuple[tuple[int, ...], Messages]:
        with self.frame.seconds.measure("open_s"), blaming(EnvironmentFault, "reset", but=_LOST):
            messages, _ = await self.environment.reset(self.frame.task, seed=self.frame.seed)
            ids = self.frame.stage.renderer.open(messages, self.environment.tools)
        limit = self.frame.stage.limits.context_tokens
        if len(ids) >= limit:
            raise EnvironmentFault(
                f"task {self.frame.task.id}: its prompt has {len(ids)} tokens, which leaves no "
                f"room to answer in engine.context_tokens ({limit}); raise it, or leave the "
                "problem out"
            )
        self.prompt = tuple(messages)
        return ids, self.prompt

    async def _act(self, observation: tuple[int, ...], reply: Messages) -> Ending | None:
        """One action, added to the record; an ending if there can be none or it was cut off."""
        limits = self.frame.stage.limits
        room = limits.context_tokens - len(self.token_ids) - len(observation)
        if room < 1:
            return Ending.OUT_OF_TOKENS
        sampling = self.frame.sampling(min(room, limits.max_action_tokens), len(self.turns))
        with self.frame.seconds.measure("sample_s"):
            before = (*self.token_ids, *observation)
            action = await self.frame.actor.act(before, sampling, reply)
        self.frame.check_time()
        if action is None:
            return Ending.OUT_OF_TURNS
        self.token_ids += (*observation, *action.token_ids)
        self.turns.append(
            Turn(
                observation=ObservationTokens(token_ids=observation),
                action=action,
                message=self.frame.stage.renderer.parse(action.token_ids),
                seen=digest_of_ids(before),
            )
        )
        if action.finish == "stop":
            return None
        return Ending.CUT_OFF if room >= limits.max_action_tokens else Ending.OUT_OF_TOKENS

    async def _step(self) -> Step:
        """The environment's answer to the last action, added to the record."""
        last = self.turns[-1]
        if self.frame.sandbox is not None and last.message.tool_calls:
            # Before the tool's own clock starts: opening is not the agent's time.
            with self.frame.seconds.measure("open_s"):
                await self.frame.sandbox.opened()
        commands = len(self.frame.sandbox.exit_codes) if self.frame.sandbox else 0
        with self.frame.seconds.measure("tools_s"), blaming(EnvironmentFault, "step", but=_LOST):
            step = await self.environment.step(last.message)
        self.frame.check_time()
        if self.frame.sandbox is not None:
            exits = self.frame.sandbox.exit_codes[commands:]
            step = replace(step, events=tuple(_with_exits(step.events, exits)))
        self.turns[-1] = replace(last, reply=tuple(step.observation), reward=step.reward)
        self.events += step.events
        return step

    def _show(self, step: Step) -> tuple[tuple[int, ...], Messages] | None:
        """The reply as ids and messages, cut to its limit; None if it can't be made to fit."""
        last = self.turns[-1]
        with blaming(EnvironmentFault, "rendering the reply"):
            fitted = fit_reply(
                self.frame.stage.renderer,
                last.reply,
                last_id=last.action.token_ids[-1],
                max_tokens=self.frame.stage.limits.max_observation_tokens,
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
