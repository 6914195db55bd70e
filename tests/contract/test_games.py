"""The games are won by playing, by nothing else, and tell what happens."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import pytest
from agentrl_environments.games import games
from gymnasium.utils.env_checker import check_env

from agentrl.errors import ConfigError
from agentrl.plugins import find_environment, problems_of
from agentrl.rollout import Stage, run_script
from agentrl.testing.environment import LIMITS, check_environment
from agentrl.testing.fakes import CharRenderer, FixedEngine, says
from agentrl.tools import answer
from agentrl.types import Episode, Problem

FEW = {"each": {name: {"count": 4} for name in games.families}}


async def play(problem: Problem, script: Any, environment: Any = games) -> tuple[Episode, float]:
    stage = Stage(
        engine=FixedEngine(""), renderer=CharRenderer(), environment=environment, limits=LIMITS
    )
    episode = await run_script(stage, problem, script)
    (verdict,) = await environment.verifier.grade(problem, [episode], None)
    assert verdict.reward is not None and verdict.passed == (verdict.reward == 1)
    return episode, verdict.reward


async def test_they_keep_the_contract() -> None:
    found = find_environment("games")
    assert found is games
    assert await check_environment(found, options=FEW, sample=12) == ()


@pytest.mark.parametrize("family", list(games.families))
@pytest.mark.parametrize("level", [2, 3])
async def test_the_oracle_wins_at_every_level(family: str, level: int) -> None:
    game: Any = games.families[family]
    for split in ("train", "test"):
        for problem in problems_of(game, split, {"level": level, "count": 2}):
            if len(game.solve(_started(game, problem))) <= LIMITS.max_turns:
                _, reward = await play(problem, game.scripts["oracle"], game)
                assert reward == 1


def _started(game: Any, problem: Problem) -> Any:
    env = game.played.make()
    env.reset(**problem.task.setup)
    return env


def test_splits_share_no_beginning_with_its_solution() -> None:
    for family, game in games.families.items():
        own: Any = game
        kinds = [
            {
                (env.tell(env), *own.solve(_started(own, p)))
                for p in problems_of(own, split, {"count": 30})
                for env in [_started(own, p)]
            }
            for split in ("train", "test")
        ]
        assert kinds[0] and kinds[1] and not kinds[0] & kinds[1], family


async def test_what_is_said() -> None:
    number: Any = games.families["number"]
    (problem,) = (p for p in problems_of(number, "train", {}) if _secret(number, p) == 7)
    lines = [answer(t) for t in ("the answer is 7", "8", "90", "6", " 7. ")]
    episode, reward = await play(problem, says(*lines), number)
    said = [turn.reply[0].content for turn in episode.trajectory.turns]
    assert episode.trajectory.prompt[0].content == "Find the number.\n\n1 to 30, 5 tries"
    assert said == [
        "error: that is no action; write a number from 1 to 90",
        "lower, 4 tries",
        "lower, 3 tries",
        "higher, 2 tries",
        "right, 1 tries",
    ]
    assert reward == 1
    assert (await play(problem, says(*[answer("9")] * 9), number))[1] == 0, "out of tries"


def _secret(game: Any, problem: Problem) -> int:
    return _started(game, problem).unwrapped.secret


async def test_words_are_found_by_letter_only() -> None:
    hangman: Any = games.families["hangman"]
    problem = problems_of(hangman, "train", {})[0]
    word = _started(hangman, problem).unwrapped.word
    _, reward = await play(problem, says(answer(word), *[answer(c) for c in word[:2]]), hangman)
    assert reward == 0
    wrong = [c for c in "abcdefghijklmnopqrstuvwxyz" if c not in word][:7]
    lines = [answer(c.upper()) for c in (wrong[0], *wrong, *word)]
    episode, reward = await play(problem, says(*lines), hangman)
    assert reward == 0 and len(episode.trajectory.turns) == 8, "saying one twice costs nothing"
    assert episode.trajectory.turns[0].reply[0].content == f"_ _ _; wrong: {wrong[0]}"


@pytest.mark.parametrize("options", [{"level": 4}, {"level": 0}, {"count": 0}])
def test_a_bad_option_is_the_users_mistake(options: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError):
        problems_of(games, "train", {"each": {"taxi": options}})


def test_they_pass_gymnasiums_own_check_as_one_environment() -> None:
    env = gymnasium.make("agentrl/Games-v0", options=FEW)
    check_env(env.unwrapped, skip_render_check=True)
    env.close()
