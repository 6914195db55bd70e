import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, EnvironmentFault, PluginError, VerifierFault
from agentrl.gym import TextEnv, TextSpace, from_gymnasium, gymnasium_id, register_environments
from agentrl.plugins import register
from agentrl.rollout import Limits, Stage, run_group, run_script
from agentrl.testing.fakes import CharRenderer, FakeSandboxes, FixedEngine, says
from agentrl.tools import ToolEnvironment, answer, problem, tool
from agentrl.types import Ending, Message, SandboxSpec
from agentrl.verifiers import NumericMatch

CALL = '<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>'


class Doubling(ToolEnvironment):
    verifier = NumericMatch(only_number=True)

    @tool
    def double(self, x: int) -> int:
        """Double a number."""
        return 2 * x

    @tool
    async def look(self) -> str:
        """Use the sandbox."""
        return (await self.sandbox.exec(["ls"], timeout_s=1)).stdout.decode() + "seen"

    @tool
    def crash(self) -> None:
        """Fail."""
        raise ZeroDivisionError("oops")

    @staticmethod
    def problems(split: str, *, count: int = 20, sandbox: bool = False, gold: str = ""):
        spec = SandboxSpec() if sandbox else None
        return [
            problem(f"Double {i}.", gold or str(2 * i), id=f"{i}", sandbox=spec)
            for i in range(count)
        ]


def threads() -> int:
    """How many of ours are left; one that was told to end gets a moment to do so."""
    deadline = time.monotonic() + 2
    while found := sum(t.name.startswith("agentrl") for t in threading.enumerate()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return found


def test_every_registered_environment_is_made_by_gymnasium_and_passes_its_check() -> None:
    register("environment", "test-doubling", Doubling)
    register_environments()
    register_environments()
    for name in ("agentrl/TestDoubling-v0", "agentrl/Calculator-v0"):
        sandboxes = FakeSandboxes()
        env = gymnasium.make(name, sandboxes=sandboxes)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env.unwrapped, skip_render_check=True)
        env.close()
        assert sandboxes.open_now == 0
    assert gymnasium_id("python-math") == "agentrl/PythonMath-v0"
    assert threads() == 0


def test_an_episode_with_a_tool_is_graded_at_its_end() -> None:
    env = TextEnv(Doubling)
    first, info = env.reset(options={"task_id": "4"})
    assert first == "Double 4." and info["task_id"] == "4"
    assert [t["function"]["name"] for t in info["tools"]] == ["double", "look", "crash"]
    assert env.step(CALL) == ("8", 0.0, False, False, {"step_reward": 0.0, "calls": ["ok"]})
    _, reward, terminated, truncated, info = env.step("8")
    assert (reward, terminated, truncated, info["passed"]) == (1.0, True, False, True)
    assert threads() == 0
    with pytest.raises(ResetNeeded, match="reset"):
        env.step("8")


def test_truncated_or_terminated() -> None:
    env = TextEnv(Doubling, max_turns=2)
    env.reset(options={"task_id": "4"})
    env.step(CALL)
    text, reward, terminated, truncated, info = env.step(CALL)
    assert (text, reward, terminated, truncated) == ("8", 0.0, False, True), "last words are kept"
    assert info["ending"] == "out_of_turns"
    env.reset(options={"task_id": "4"})
    env.step(CALL)
    _, reward, terminated, truncated, _ = env.step("8")
    assert (reward, terminated, truncated) == (1.0, True, False), "on the last turn"


def test_seeds_choose_the_problem() -> None:
    env = TextEnv(Doubling)
    state = random.getstate()
    same = [env.reset(seed=5)[0] for _ in range(2)]
    assert same[0] == same[1]
    follow = [env.reset()[0] for _ in range(8)]
    assert len(set(follow)) > 2, "a reset without a seed goes on"
    env.reset(seed=5)
    assert [env.reset()[0] for _ in range(8)] == follow
    assert len({TextEnv(Doubling).reset(seed=s)[0] for s in range(8)}) > 2
    assert random.getstate() == state
    env.close()


def test_the_sandbox_lives_as_long_as_its_episode() -> None:
    sandboxes = FakeSandboxes()
    env = TextEnv(Doubling, options={"sandbox": True}, sandboxes=sandboxes)
    env.reset(seed=0)
    assert sandboxes.open_now == 1
    env.step('<tool_call>{"name": "look", "arguments": {}}</tool_call>')
    env.reset(seed=1)
    assert sandboxes.open_now == 1, "the one before is closed"
    env.step("1")
    assert sandboxes.open_now == 0 and threads() == 0
    env.reset(seed=1)
    del env
    assert sandboxes.open_now == 0 and threads() == 0


def test_faults_are_raised_never_rewarded() -> None:
    env = TextEnv(Doubling, options={"gold": "no number"})
    env.reset(seed=0)
    with pytest.raises(VerifierFault, match="no verdict"):
        env.step("5")
    with pytest.raises(ResetNeeded):
        env.step("5")
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match="ZeroDivisionError: oops"):
        env.step('<tool_call>{"name": "crash", "arguments": {}}</tool_call>')
    assert threads() == 0


def test_what_a_person_gets_wrong_is_said() -> None:
    for arguments, message in [
        ({"tool_format": "hermis"}, "hermes"),
        ({"options": {"cuont": 1}}, "did you mean count"),
        ({"max_turns": 0}, "max_turns"),
    ]:
        with pytest.raises(ConfigError, match=message):
            TextEnv(Doubling, **arguments)
    with pytest.raises(PluginError, match="did you mean calculator"):
        TextEnv("calculater")
    env = TextEnv(Doubling)
    for options in ({"task_id": "99"}, {"task": "1"}):
        with pytest.raises(ConfigError, match="task_id"):
            env.reset(options=options)
    env.reset(seed=0)
    for bad in (5, "\ud800"):
        with pytest.raises(InvalidAction):
            env.step(bad)  # type: ignore[arg-type]
    env.close()
    env.close()


def test_an_environment_in_a_file_and_the_tags_format(tmp_path: Path) -> None:
    own = tmp_path / "gym_file_env.py"
    own.write_text(
        "from agentrl.tools import ToolEnvironment, problem, tool\n"
        "from agentrl.verifiers import ExactMatch\n"
        "class Mine(ToolEnvironment):\n"
        "    verifier = ExactMatch()\n"
        "    @tool\n"
        "    def shout(self, text: str) -> str:\n"
        "        '''Shout.'''\n"
        "        return text.upper()\n"
        "    @staticmethod\n"
        "    def problems(split): return [problem('q', 'a')]\n"
    )
    env = TextEnv(str(own), tool_format="tags")
    env.reset(seed=0)
    assert env.step("<shout>hey</shout>")[0] == "HEY"
    env.close()


@given(st.text(max_size=50))
def test_the_space_takes_every_text(text: str) -> None:
    assert text in TextSpace()
    assert (text in TextSpace(max_length=3)) == (len(text) <= 3)


def test_the_space_samples_what_it_holds_and_repeats_itself() -> None:
    space, again = TextSpace(seed=3), TextSpace(seed=3)
    samples = [space.sample() for _ in range(200)]
    assert samples == [again.sample() for _ in range(200)]
    assert all(sample in space for sample in samples)
    assert any(" " in s for s in samples) and any(ord(max(s, default="a")) > 127 for s in samples)
    assert space == TextSpace() and space != TextSpace(max_length=5)
    for other in (5, None, b"x", "\ud800", "a\udfffb"):
        assert other not in space
    with pytest.raises(ValueError, match="mask"):
        space.sample(mask=1)


class Corridor(gymnasium.Env[Any, Any]):
    """Walk right from a seeded place to 5; falls off at -1. Counts what happens to it."""

    log: list[str] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(2, start=1)
        self.observation_space = spaces.Discrete(7, start=-1)
        self.owner = threading.get_ident()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.log.append("reset")
        self.at, self.steps = int(self.np_random.integers(1, 4)), 0
        return self.at, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        assert threading.get_ident() == self.owner, "bound to the thread that made it"
        self.steps += 1
        self.at += 1 if action == 2 else -1
        return self.at, 0.5 * (self.at == 5), self.at in (-1, 5), self.steps >= 6, {}

    def close(self) -> None:
        self.log.append("close")


def corridor(**more: Any) -> Any:
    return from_gymnasium(
        Corridor, prompt="Go right.", actions=["left", "right"], pass_at=0.5, **more
    )


def stage(environment: Any, *texts: str) -> Stage:
    return Stage(
        engine=FixedEngine(*texts),
        renderer=CharRenderer(),
        environment=environment,
        limits=Limits(max_turns=12),
    )


async def test_a_foreign_environment_is_played_by_text() -> None:
    environment = corridor()
    Corridor.log.clear()
    (task, *_) = environment.problems("train")
    lines = [answer(t) for t in ("sideways", "Right.", "2", "right", "right", "right", "right")]
    episode = await run_script(stage(environment), task, says(*lines))
    trajectory = episode.trajectory
    assert trajectory.prompt[0].content.startswith("Go right.\n\n"), "the text of reset is there"
    assert "write one of left, right" in trajectory.turns[0].reply[0].content
    assert trajectory.ending is Ending.ANSWERED
    (verdict,) = await environment.verifier.grade(task, [episode], None)
    assert (verdict.reward, verdict.passed) == (0.5, True)
    assert Corridor.log.count("reset") == 1, "nobody resets on the sly"


async def test_members_meet_the_same_state_and_seeds_differ() -> None:
    environment = corridor()
    train, test = environment.problems("train"), environment.problems("test")
    assert not {p.task.id for p in train} & {p.task.id for p in test}
    group = await run_group(stage(environment, "left"), train[0], size=4, seed=3)
    prompts = {t.prompt[0].content for t in group.trajectories}
    assert len(prompts) == 1 and len(group.rewards) == 4 and not group.faults
    starts = set()
    for one in train[:10]:
        episode = await run_script(stage(environment), one, says(answer("left")))
        starts.add(episode.trajectory.prompt[0].content)
    assert len(starts) > 1


async def test_a_time_limit_of_the_environment_is_a_truncation() -> None:
    environment = corridor()
    lines = [answer(t) for t in ("left", "right") * 6]
    episode = await run_script(stage(environment), environment.problems("train")[0], says(*lines))
    assert episode.trajectory.ending is Ending.TRUNCATED
    assert len(episode.trajectory.turns) == 6


async def test_calls_where_there_are_no_tools_are_answered() -> None:
    environment = corridor()(sandbox=None)
    await environment.reset(corridor().problems("train")[0].task, seed=0)
    calls = CharRenderer().parse(CharRenderer().write(Message(role="assistant", content="@x {}")))
    step = await environment.step(calls)
    assert [m.tool_call_id for m in step.observation] == ["call_0"]
    await environment.artifacts()
    with pytest.raises(EnvironmentFault, match="after the end"):
        await environment.step(answer("left"))


def test_what_can_not_be_written_as_text_is_refused() -> None:
    class Continuous(Corridor):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Box(0, 1)  # type: ignore[assignment]

    class Seen(Corridor):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Box(0, 1)  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="written as text"):
        from_gymnasium(Continuous)
    with pytest.raises(ConfigError, match="show="):
        from_gymnasium(Seen)
    with pytest.raises(ConfigError, match="name each"):
        from_gymnasium(Corridor, actions=["left"])
    assert from_gymnasium(Seen, show=lambda x: f"{x}").show(1) == "1"
