"""A Gymnasium environment with text or numbered actions, as an agentrl environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeAlias

import gymnasium
from gymnasium import spaces

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.gym.space import TextSpace
from agentrl.protocols import Sandbox, SandboxProvider, Script, Split, Tool
from agentrl.tools import problem, says_nothing
from agentrl.tools.thread import ToolThread
from agentrl.types import Episode, Message, Messages, Problem, Step, Task, Verdict, user

AnyEnv: TypeAlias = gymnasium.Env[Any, Any]

_TEST_SEEDS = 1 << 30
"""Where the seeds of the test split begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnVerifier:
    """The reward is the sum of the environment's own step rewards; a pass from `pass_at` on."""

    pass_at: float

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode."""
        returns = [sum(turn.reward for turn in e.trajectory.turns) for e in episodes]
        return [Verdict(reward=r, passed=r >= self.pass_at) for r in returns]


@dataclass(frozen=True, slots=True, kw_only=True)
class GymnasiumEnvironment:
    """An EnvironmentClass around a Gymnasium environment; see `from_gymnasium`."""

    make: Callable[[], AnyEnv]
    prompt: str
    actions: Sequence[str]
    show: Callable[[Any], str]
    verifier: ReturnVerifier
    scripts: Mapping[str, Script] = field(default_factory=lambda: {"null": says_nothing})

    def __call__(self, *, sandbox: Sandbox | None) -> "GymnasiumEpisode":
        """One episode; it needs no sandbox."""
        return GymnasiumEpisode(self)

    def problems(self, split: Split, *, count: int = 1000) -> Sequence[Problem]:
        """One problem for each seed of the environment; the splits have different seeds."""
        first = _TEST_SEEDS if split == "test" else 0
        return [
            problem(self.prompt, id=f"seed-{seed}", setup={"seed": seed})
            for seed in range(first, first + count)
        ]


def from_gymnasium(
    make: Callable[[], AnyEnv],
    *,
    prompt: str = "",
    actions: Sequence[str] = (),
    show: Callable[[Any], str] | None = None,
    pass_at: float = 1.0,
) -> GymnasiumEnvironment:
    """The environments that `make` makes, for a policy that writes its actions as text.

    Discrete actions are said by number, or by their names in `actions`, in order; text actions as
    they are. What is no action is answered with what would be one, and moves nothing. `prompt`
    goes before the first observation; `show` writes an observation as text (needed unless it is a
    text or a number). A return of `pass_at` or more is a pass.

    Raises ConfigError when actions or observations can't be texts, or names and numbers differ.
    """
    probe = make()
    try:
        _check(probe, actions, show)
    finally:
        probe.close()
    return GymnasiumEnvironment(
        make=make,
        prompt=prompt,
        actions=tuple(actions),
        show=show or str,
        verifier=ReturnVerifier(pass_at=pass_at),
    )


class GymnasiumEpisode:
    """One episode; the environment lives in a thread of its own and is closed at its end."""

    def __init__(self, made_by: GymnasiumEnvironment) -> None:
        self._made_by = made_by
        self._env: AnyEnv | None = None
        self._thread: ToolThread | None = None

    def __del__(self) -> None:
        if getattr(self, "_thread", None) is not None:
            self._let_go()

    @property
    def tools(self) -> Sequence[Tool]:
        """None: the text is the action."""
        return ()

    async def reset(self, task: Task, *, seed: int) -> tuple[Messages, Mapping[str, Any]]:
        """Make and reset it with the seed and options of the task: all members meet the same."""
        self._let_go()
        self._thread = ToolThread()
        made_by, env_seed = self._made_by, int(task.setup.get("seed", seed))
        options = task.setup.get("options")

        def begin() -> tuple[AnyEnv, Any]:
            env = made_by.make()
            return env, env.reset(seed=env_seed, options=options)[0]

        self._env, observation = await self._thread.run(begin)
        parts = [m.content for m in task.prompt] + [made_by.show(observation)]
        return (user("\n\n".join(part for part in parts if part)),), {}

    async def step(self, action: Message) -> Step:
        """Take the action, or say what would be one. Raises EnvironmentFault after the end."""
        env, thread = self._env, self._thread
        if env is None or thread is None:
            raise EnvironmentFault("step before reset or after the end of the episode")
        if action.tool_calls:
            text = "error: there are no tools here; write the action as text"
            calls = action.tool_calls
            return Step(
                observation=tuple(
                    Message(role="tool", content=text, tool_call_id=c.id) for c in calls
                )
            )
        chosen = self._action(env, action.content)
        if chosen is None:
            return Step(observation=(user(f"error: that is no action; {self._known(env)}"),))
        seen, reward, terminated, truncated, _ = await thread.run(lambda: env.step(chosen))
        if not isfinite(float(reward)):
            raise EnvironmentFault(f"the environment gave the reward {reward}")
        if terminated or truncated:
            self._let_go()
        return Step(
            observation=(user(self._made_by.show(seen)),),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated) and not terminated,
        )

    async def artifacts(self) -> Mapping[str, bytes]:
        """None; the episode is over."""
        self._let_go()
        return {}

    def _action(self, env: AnyEnv, text: str) -> Any:
        """The action that the text names; None if it names none."""
        if not isinstance(env.action_space, spaces.Discrete):
            return text if env.action_space.contains(text) else None
        said = text.strip().rstrip(".").casefold()
        start = int(env.action_space.start)
        for number in range(start, start + int(env.action_space.n)):
            names = self._made_by.actions
            if said == str(number) or (names and said == names[number - start].casefold()):
                return number
        return None

    def _known(self, env: AnyEnv) -> str:
        if not isinstance(env.action_space, spaces.Discrete):
            return f"it must be in {env.action_space}"
        if self._made_by.actions:
            return f"write one of {', '.join(self._made_by.actions)}"
        start = int(env.action_space.start)
        return f"write a number from {start} to {start + int(env.action_space.n) - 1}"

    def _let_go(self) -> None:
        """Close the environment in its own thread, and let that end; nobody waits for it."""
        thread, env = self._thread, self._env
        self._thread = self._env = None
        if thread is not None:
            thread.close(last=env.close if env is not None else None)


def _check(env: AnyEnv, actions: Sequence[str], show: Callable[[Any], str] | None) -> None:
    texts = (spaces.Text, TextSpace)
    if isinstance(env.action_space, spaces.Discrete):
        if actions and len(actions) != int(env.action_space.n):
            raise ConfigError(f"{len(actions)} names for {env.action_space.n} actions: name each")
        if len({name.casefold() for name in actions}) != len(actions):
            raise ConfigError("two actions have the same name")
    elif not isinstance(env.action_space, texts):
        raise ConfigError(f"actions of {env.action_space} can't be written as text: wrap it first")
    shown = isinstance(env.observation_space, (*texts, spaces.Discrete))
    if not shown and show is None:
        raise ConfigError(f"give show=…, which writes {env.observation_space} as text")
