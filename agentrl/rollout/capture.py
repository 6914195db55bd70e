"""One episode that an agent program leads: what it asks the policy, as trajectories.

The program sends whole conversations; it never sees an id. What it sends is matched, message by
message, with what it was told before. A conversation that goes on appends to the recorded ids. One
that leaves an earlier one, by a fork or a retry, becomes a segment of its own: it begins with the
recorded ids up to there, as an observation, so that no sampled token is encoded again, and none is
trained twice.
"""

import asyncio
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.errors import (
    ContextFull,
    EnvironmentFault,
    Fault,
    OutOfTurns,
    RequestError,
    SandboxLost,
)
from agentrl.guard import blaming
from agentrl.protocols import Harness, Tool
from agentrl.rollout.frame import Frame
from agentrl.types import (
    ActionTokens,
    Completion,
    Ending,
    Message,
    Messages,
    ObservationTokens,
    ToolCall,
    Trajectory,
    Turn,
    digest_of_ids,
)

CAPTURED = "captured"
"""The metric that marks a trajectory whose prompt and tools were an agent program's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Right behind an action: how much of the talk and of its ids lies before."""

    said: int
    ids: int


@dataclass(slots=True)
class _Segment:
    """One conversation. `said` is how the program knows it; `last` numbers its last action."""

    prompt: Messages
    tools: str
    said: list["_Said"] = field(default_factory=list["_Said"])
    token_ids: list[int] = field(default_factory=list[int])
    turns: list[Turn] = field(default_factory=list[Turn])
    places: list[_Place] = field(default_factory=list[_Place])
    busy: bool = False
    last: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One request, matched: the segment that it goes on with, or a fresh one; what is new in it."""

    segment: _Segment
    observation: tuple[int, ...]
    reply: Messages
    said: list["_Said"]

    @property
    def before(self) -> tuple[int, ...]:
        """All ids before the answer."""
        return (*self.segment.token_ids, *self.observation)


class CapturedEpisode:
    """One episode while its agent program runs; to the program, it is the policy."""

    def __init__(self, frame: Frame, harness: Harness) -> None:
        self.frame = frame
        self.prompt: Messages = ()
        self._harness = harness
        self._segments: list[_Segment] = []
        self._asked = 0
        self._ending: Ending | None = None
        self._refused = ""
        self._over = False
        self._broken: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    @property
    def begun(self) -> bool:
        """Whether there is a first action."""
        return bool(self._segments)

    async def play(self) -> Ending:
        """Run the program to its end. Raises a Fault, or SandboxLost."""
        program = asyncio.ensure_future(self._run())
        try:
            await asyncio.wait({program, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            return self._broken.result() if self._broken.done() else program.result()
        finally:
            self._over = True
            if not program.done():
                program.cancel()
                await asyncio.wait({program}, timeout=1.0)

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Completion:
        """See `protocols.ChatPolicy`."""
        limits, number = self.frame.stage.limits, self._asked
        if self._over:
            raise RequestError("the episode is over")
        if not messages:
            raise RequestError("there are no messages")
        if number >= limits.max_turns:
            self._ending = Ending.OUT_OF_TURNS
            raise OutOfTurns(f"the episode has used up its {limits.max_turns} actions")
        self._asked += 1
        with self._breaking(), blaming(EnvironmentFault, "rendering the request"):
            request = self._matched(tuple(messages), tools)
        before = request.before
        room = limits.context_tokens - len(before)
        if room < 1:
            self._ending = Ending.OUT_OF_TOKENS
            self._refused = (
                f"the conversation has {len(before)} tokens, and engine.context_tokens "
                f"({limits.context_tokens}) has to hold the answer as well"
            )
            raise ContextFull(self._refused)
        self.prompt = self.prompt or tuple(messages)
        allowed = min(room, limits.max_action_tokens, max(1, max_tokens or room))
        request.segment.busy = True
        try:
            action = await self._sample(before, allowed, request.reply, number)
        finally:
            request.segment.busy = False
        message = _numbered(self.frame.stage.renderer.parse(action.token_ids), number)
        served = _served(message, tools, stop)
        self._record(request, action, message, served, number)
        full = Ending.CUT_OFF if allowed < room else Ending.OUT_OF_TOKENS
        self._ending = full if action.finish == "length" else None
        return Completion(
            message=served,
            cut_off=action.finish == "length",
            prompt_tokens=len(before),
            action_tokens=len(action.token_ids),
        )

    def trajectories(self, ending: Ending) -> tuple[Trajectory, ...]:
        """Every conversation as a record; the one with the last action comes first."""
        ordered = sorted(self._segments, key=lambda s: -s.last)
        marks = {CAPTURED: 1.0, "segments": float(len(ordered))}
        # Only the first holds the action that was cut off.
        others = Ending.TRUNCATED if ending is Ending.CUT_OFF else ending
        return tuple(
            Trajectory(
                id=self.frame.id + (f".{number}" if number else ""),
                task_id=self.frame.task.id,
                member=self.frame.member,
                seed=self.frame.seed,
                prompt=segment.prompt,
                turns=tuple(segment.turns),
                ending=others if number else ending,
                metrics=marks if number else {**marks, **self.frame.metrics()},
            )
            for number, segment in enumerate(ordered)
        )

    async def _run(self) -> Ending:
        finished = False
        with (
            suppress(RequestError),
            blaming(EnvironmentFault, "the agent", but=(SandboxLost, RequestError)),
        ):
            finished = await self._harness.run_agent(self.frame.task, self, seed=self.frame.seed)
        self.frame.check_time()
        if not self.begun:
            why = self._refused or "it never asked"
            raise EnvironmentFault(f"the agent ended without an answer of the policy: {why}")
        return self._ending or (Ending.ANSWERED if finished else Ending.TRUNCATED)

    async def _sample(
        self, before: tuple[int, ...], max_tokens: int, reply: Messages, number: int
    ) -> ActionTokens:
        with self._breaking(), self.frame.seconds.measure("sample_s"):
            sampling = self.frame.sampling(max_tokens, number)
            action = await self.frame.actor.act(before, sampling, reply)
        if action is None:
            self._ending = Ending.OUT_OF_TURNS
            raise OutOfTurns("the script has no further line")
        if self._over:
            raise RequestError("the episode is over")
        return action

    @contextmanager
    def _breaking(self) -> Generator[None]:
        """A fault in here ends the episode, whatever the program makes of it."""
        try:
            yield
        except Fault as fault:
            if not self._over and not self._broken.done():
                self._broken.set_exception(fault)
            raise

    def _matched(self, messages: Messages, tools: Sequence[Tool]) -> _Request:
        """Where the longest talk that `messages` begin with was left, and what is new."""
        said = [_said(message) for message in messages]
        shown = json.dumps([dict(tool.schema) for tool in tools], sort_keys=True)
        found = [
            (segment, place)
            for segment in self._segments
            for place in segment.places
            if segment.tools == shown and segment.said[: place.said] == said[: place.said]
        ]
        renderer = self.frame.stage.renderer
        if not found:
            ids, fresh = renderer.open(messages, tools), _Segment(messages, shown)
            return _Request(segment=fresh, observation=ids, reply=messages, said=said)
        parent, place = max(found, key=lambda f: (f[1].said, _is_open(*f), f[0].last))
        reply, context = messages[place.said :], parent.token_ids[: place.ids]
        new = renderer.extend(reply, context[-1])
        if _is_open(parent, place):
            return _Request(segment=parent, observation=new, reply=reply, said=said)
        branch = _Segment(messages, shown)
        return _Request(segment=branch, observation=(*context, *new), reply=reply, said=said)

    def _record(
        self,
        request: _Request,
        action: ActionTokens,
        message: Message,
        served: Message,
        number: int,
    ) -> None:
        segment = request.segment
        if segment.turns:
            segment.turns[-1] = replace(segment.turns[-1], reply=request.reply)
        else:
            self._segments.append(segment)
        segment.turns.append(
            Turn(
                observation=ObservationTokens(token_ids=request.observation),
                action=action,
                message=message,
                seen=digest_of_ids(request.before),
            )
        )
        segment.token_ids += (*request.observation, *action.token_ids)
        segment.said = [*request.said, _said(served)]
        segment.last = number
        segment.places.append(_Place(said=len(segment.said), ids=len(segment.token_ids)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What has to be the same in a message for a talk to be the same.

    Programs write what they were told again: without the thinking, with other blanks around it,
    with arguments as other text of the same JSON. No id depends on it.
    """

    role: str
    content: str
    calls: tuple[tuple[str, str, str], ...]
    answers: str | None


def _is_open(segment: _Segment, place: _Place) -> bool:
    """Whether a talk that has come to this place of the segment may go on there."""
    return place is segment.places[-1] and not segment.busy


def _said(message: Message) -> _Said:
    content = message.content
    return _Said(
        role=message.role,
        content=content.strip() if message.role == "assistant" else content,
        calls=tuple((c.id, c.name, _same_json(c.arguments)) for c in message.tool_calls),
        answers=message.tool_call_id,
    )


def _same_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def _numbered(message: Message, number: int) -> Message:
    """Calls with names that no other message of the episode uses."""
    calls = (replace(c, id=f"call_{number}_{i}") for i, c in enumerate(message.tool_calls))
    return replace(message, tool_calls=tuple(calls))


def _served(message: Message, tools: Sequence[Tool], stop: Sequence[str]) -> Message:
    """The message as a server gives it: a bad call is text, and text ends before a stop."""
    calls = [(call, _as_object(call, tools)) for call in message.tool_calls]
    bad = [call.arguments for call, good in calls if good is None]
    content = "\n".join(part for part in (message.content, *bad) if part)
    ends = [at for at in (content.find(text) for text in stop if text) if at >= 0]
    return replace(
        message,
        content=content[: min(ends)] if ends else content,
        tool_calls=tuple(good for _, good in calls if good is not None),
    )


def _as_object(call: ToolCall, tools: Sequence[Tool]) -> ToolCall | None:
    """The call with an object as its arguments; None if there is no way to make it one.

    Some formats write the bare value of a tool that has one parameter.
    """
    if call.error is not None:
        return None
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return call
    known = [list(_parameters(tool)) for tool in tools if tool.name == call.name]
    if len(known) != 1 or len(known[0]) != 1:
        return None
    return replace(call, arguments=json.dumps({known[0][0]: value}, ensure_ascii=False))


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return tool.schema["function"].get("parameters", {}).get("properties", {})
