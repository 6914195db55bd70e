"""An agentrl environment as a true `gymnasium.Env` over texts."""

import json
import re
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.spaces import Space

from agentrl.errors import ConfigError
from agentrl.gym.episode import Reply, Script, play
from agentrl.gym.space import TextSpace
from agentrl.gym.thread import EpisodeThread
from agentrl.parsing import FORMATS, tool_format
from agentrl.plugins import find_environment, open_sandboxes, problems_of, registered
from agentrl.protocols import EnvironmentClass, SandboxProvider, Split


class TextEnv(gymnasium.Env[str, str]):
    """One agentrl environment, synchronous, its sandbox included.

    An action is the text a policy would write: tool calls in `tool_format`, or the answer. An
    observation is the text that the environment adds; `reset` picks a problem of `split` by its
    seed (or `options={"task_id": …}`). The reward is the verifier's, at the last step; what the
    environment itself gave for a step is `info["step_reward"]` and is not used. After `max_turns`
    actions the episode is truncated, and graded all the same. Each episode has a thread of its
    own; after its last step neither thread nor sandbox is left.

    `sandboxes` is a provider or the name of a backend. Raises ConfigError and PluginError for
    what can't be found, VerifierFault when there is no valid verdict (never a reward of 0),
    ResetNeeded for a step after the end.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (Gymnasium's interface)

    def __init__(
        self,
        environment: str | EnvironmentClass,
        *,
        split: Split = "train",
        options: Mapping[str, Any] | None = None,
        sandboxes: SandboxProvider | str = "auto",
        tool_format: str = "hermes",
        max_turns: int = 8,
    ) -> None:
        found = find_environment(environment) if isinstance(environment, str) else environment
        if max_turns < 1:
            raise ConfigError("max_turns must be at least 1")
        self._environment, self._sandboxes, self._max_turns = found, sandboxes, max_turns
        self._problems = problems_of(found, split, options or {})
        self._tools = found(sandbox=None).tools
        self._format = _format(tool_format, [tool.name for tool in self._tools])
        self._episode: EpisodeThread[Reply, str] | None = None
        self.observation_space: Space[str] = TextSpace()
        self.action_space: Space[str] = TextSpace()

    def __del__(self) -> None:
        if getattr(self, "_episode", None) is not None:
            self.close()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Open an episode. Raises ConfigError for an option or a task id that there is not."""
        super().reset(seed=seed)
        self.close()
        index = int(self.np_random.integers(len(self._problems)))
        episode_seed = int(self.np_random.integers(1 << 31))
        problem = self._problems[index if not options else self._chosen(options)]
        script = Script(
            environment=self._environment,
            sandboxes=self._provider() if problem.needs_sandboxes else None,
            problem=problem,
            seed=episode_seed,
            max_turns=self._max_turns,
            parse=self._format.parse,
        )
        self._episode = EpisodeThread(play(script))
        reply = self._receive(self._episode)
        tools = json.loads(json.dumps([tool.schema for tool in self._tools]))
        return reply.text, {"task_id": problem.task.id, "tools": tools}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer an action. Raises ResetNeeded after the end, InvalidAction for no text."""
        if self._episode is None:
            raise ResetNeeded("the episode is over (or was never opened): call reset() first")
        if action not in self.action_space:
            raise InvalidAction(f"an action is a text, not {type(action).__name__}")
        self._episode.send(action)
        reply = self._receive(self._episode)
        if reply.over:
            self.close()
        return reply.text, reply.reward, reply.terminated, reply.truncated, dict(reply.info)

    def close(self) -> None:
        """End the open episode, if there is one, with its sandbox and thread."""
        if self._episode is not None:
            self._episode.close()
            self._episode = None

    def _receive(self, episode: "EpisodeThread[Reply, str]") -> Reply:
        try:
            return episode.receive()
        except BaseException:
            self.close()
            raise

    def _chosen(self, options: Mapping[str, Any]) -> int:
        ids = [problem.task.id for problem in self._problems]
        if set(options) != {"task_id"} or options["task_id"] not in ids:
            raise ConfigError(f"reset options {dict(options)}: give the task_id of a problem")
        return ids.index(options["task_id"])

    def _provider(self) -> SandboxProvider:
        if isinstance(self._sandboxes, str):
            self._sandboxes = open_sandboxes(self._sandboxes)
        return self._sandboxes


def register_environments() -> None:
    """Tell Gymnasium of every registered environment: `agentrl/PythonMath-v0` and so on."""
    for name in registered("agentrl.environments"):
        if gymnasium_id(name) not in gymnasium.registry:
            gymnasium.register(
                id=gymnasium_id(name),
                entry_point="agentrl.gym:TextEnv",
                kwargs={"environment": name},
            )


def gymnasium_id(name: str) -> str:
    """The Gymnasium id of a registered environment."""
    words = re.split(r"[^A-Za-z0-9]+", name)
    return f"agentrl/{''.join(word[:1].upper() + word[1:] for word in words)}-v0"


def _format(name: str, tool_names: list[str]) -> Any:
    try:
        return tool_format(name, tool_names)
    except KeyError:
        known = ", ".join(sorted((*FORMATS, "tags")))
        raise ConfigError(f"tool_format {name!r} is not known; known: {known}") from None
