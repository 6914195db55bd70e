"""Gymnasium's toy-text games and two games of words, one move a turn, through `from_gymnasium`."""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from string import ascii_lowercase
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.envs.toy_text import BlackjackEnv, CliffWalkingEnv, FrozenLakeEnv, TaxiEnv
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from gymnasium.envs.toy_text.taxi import MAP as TAXI_MAP

from agentrl.data import mix
from agentrl.gym import GymnasiumEnvironment, TextSpace, from_gymnasium
from agentrl.protocols import Environment, Sandbox, Script, Split, Verifier
from agentrl.tools import answer, problem, says_nothing
from agentrl.types import Message, Messages, Problem

LEVELS = (1, 2, 3)
WORDS = {
    1: "ant arm bag bed bee box bus cap car cat cow cup day dog ear egg eye fan fig fly fox gem "
    "hat hen ice ink jam jar key kit leg lid map mud net nut oak oil owl pan pen pie pig pot "
    "rug sea sky sun tea toe van web wig zoo",
    2: "acid bank bell bird boat book bread brick chair child clock cloud coin dance desk door "
    "dress eagle earth field fish flag fruit ghost glass goat grape hand heart horse house "
    "juice king kite knife lake lamp leaf lemon light lion milk money moon mouse music night "
    "ocean onion paint paper piano plant queen rain river road salt sheep ship shoe snow "
    "spoon stone sugar table tiger train tree voice water wheel wolf",
    3: "anchor animal autumn balloon basket blanket bottle bridge butter button camera candle "
    "carpet castle cheese chicken circle coffee corner cotton curtain dinner doctor dragon "
    "elbow engine family farmer feather finger flower forest garden giraffe guitar hammer "
    "harbor island jacket kitchen ladder lantern letter library machine market mirror monkey "
    "mountain needle orange paddle pencil pepper picture pillow pirate planet pocket potato "
    "puzzle rabbit rocket sailor school shadow silver spider square station stream summer "
    "thunder ticket tomato trumpet tunnel turtle umbrella valley village violin wallet "
    "weather whistle window winter wizard",
}  # fmt: skip
_STALE = 300
"""A game that shows nothing new for so many seeds has run out."""


class Told(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A game in words: `tell` writes its state; the reward is 1 for winning, else 0.

    `won` says whether the last step's own reward is that of the goal.
    """

    def __init__(
        self, env: Any, tell: Callable[[Any], str], won: Callable[[float], bool] = lambda r: r > 0
    ) -> None:
        super().__init__(env)
        self.observation_space = TextSpace()
        self.tell, self.won = tell, won

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start, and say how things are."""
        _, info = self.env.reset(seed=seed, options=options)
        return self.tell(self.env), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move, and say how things are."""
        _, reward, over, cut, info = self.env.step(action)
        return self.tell(self.env), float(over and self.won(float(reward))), over, cut, info


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """An EnvironmentClass: a game, and how it is won.

    `solve` gives the moves that win a game that was just reset (none if there are none; it may play
    it). A problem of level n takes at most n times `moves`.
    """

    played: GymnasiumEnvironment
    solve: Callable[[Any], Sequence[int]]
    moves: int

    def __call__(self, *, sandbox: Sandbox | None) -> Environment:
        """One game."""
        return self.played(sandbox=sandbox)

    @property
    def verifier(self) -> Verifier:
        """1 for a game that is won."""
        return self.played.verifier

    def problems(self, split: Split, *, count: int = 100, level: int = 1) -> Sequence[Problem]:
        """`count` games at most that can be won; no two begin alike and are won alike.

        A game is in the test split when the hash of its beginning and of its solution says so.
        """
        if level not in LEVELS or count < 1:
            raise ValueError(f"level is one of {LEVELS}, count at least 1")
        env, options = self.played.make(), {"level": level}
        seen: set[str] = set()
        found: list[Problem] = []
        seed = stale = 0
        while len(found) < count and stale < _STALE:
            opening, _ = env.reset(seed=seed, options=options)
            moves = self.solve(env)
            key = sha256(f"{opening}{moves}".encode()).hexdigest()
            if moves and len(moves) <= level * self.moves and key not in seen:
                seen.add(key)
                stale = 0
                if (int(key[:8], 16) % 5 == 0) == (split == "test"):
                    setup = {"seed": seed, "options": options}
                    found.append(problem(self.played.prompt, id=key[:16], setup=setup))
            seed, stale = seed + 1, stale + 1
        return found

    @property
    def scripts(self) -> Mapping[str, Script]:
        """The oracle, somebody who moves by chance, and what wins nothing."""
        space: Any = self.played.make().action_space
        first = int(space.start)
        names = self.played.actions or [str(n) for n in range(first, first + int(space.n))]

        def oracle(problem: Problem) -> Generator[Message, Messages, None]:
            env = self.played.make()
            env.reset(**problem.task.setup)
            for move in self.solve(env):
                yield answer(names[move - first])

        def guess(problem: Problem) -> Generator[Message, Messages, None]:
            rng = Random(problem.task.id)
            while True:
                yield answer(rng.choice(names))

        def claim(problem: Problem) -> Generator[Message, Messages, None]:
            while True:
                yield answer("I have won. reward: 1, terminated")

        def all_at_once(problem: Problem) -> Generator[Message, Messages, None]:
            while True:
                yield answer(" ".join(names))

        cheats = {"claim": claim, "all_at_once": all_at_once}
        return {"null": says_nothing, "oracle": oracle, "guess": guess, **cheats}


def _route(env: Any) -> Sequence[int]:
    """The shortest way to win, by the game's own table of moves."""
    game: Any = env.unwrapped
    ways: dict[int, list[int]] = {int(game.s): []}
    queue = deque(ways)
    while queue:
        here = queue.popleft()
        for move, ((_, there, reward, over),) in game.P[here].items():
            way = [*ways[here], int(move)]
            if over and env.won(reward):
                return way
            if not over and there not in ways:
                ways[there] = way
                queue.append(there)
    return []


class Lake(FrozenLakeEnv):
    """A frozen lake with a map of its own for each seed, 3 + level fields wide."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """A new map that can be crossed."""
        size = 3 + (options or {}).get("level", 1)
        self.__init__(desc=generate_random_map(size=size, seed=seed), is_slippery=False)
        return super().reset(seed=seed)


def _lake(env: Any) -> str:
    rows = [[cell.decode() for cell in row] for row in env.unwrapped.desc]
    row, column = divmod(int(env.unwrapped.s), len(rows))
    rows[row][column] = "@"
    return "\n".join("".join(row) for row in rows)


def _cliff_env() -> CliffWalkingEnv:
    """Starts anywhere but in the cliff and at the goal."""
    env: Any = CliffWalkingEnv()
    env.initial_state_distrib[:] = [1 / 37] * 37 + [0] * 11
    return env


def _cliff(env: Any) -> str:
    row, column = divmod(int(env.unwrapped.s), 12)
    return f"row {row} column {column}"


def _taxi(env: Any) -> str:
    row, column, rider, goal = env.unwrapped.decode(env.unwrapped.s)
    at, to = (*"RGYB", "in")[rider], "RGYB"[goal]
    return f"taxi: row {row} column {column}; passenger: {at}; to: {to}"


def _cards(env: Any) -> str:
    cards: BlackjackEnv = env.unwrapped
    return f"you have {' '.join(map(str, cards.player))}, the dealer {cards.dealer[0]}"


def _basic(env: Any) -> Sequence[int]:
    """Hit below 17 if the dealer may have much, else below 12; with an ace as 11, below 18."""
    cards: Any = env.unwrapped
    moves: list[int] = []
    over, won = False, 0.0
    while not over:
        total, dealer, ace = cards._get_obs()
        moves.append(int(total < (18 if ace else 12 if 2 <= dealer <= 6 else 17)))
        _, won, over, _, _ = env.step(moves[-1])
    return moves if won else []


class Number(gymnasium.Env[Any, Any]):
    """Find a number from 1 to 30 times the level, in as many tries as halving takes."""

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(30 * LEVELS[-1], start=1)
        self.observation_space = spaces.Discrete(1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        """Think of a number."""
        super().reset(seed=seed)
        self.highest = 30 * (options or {}).get("level", 1)
        self.secret = int(self.np_random.integers(1, self.highest + 1))
        self.tries, self.said = self.highest.bit_length(), ""
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """A try."""
        self.tries -= 1
        right = int(action) == self.secret
        self.said = "right" if right else "higher" if action < self.secret else "lower"
        return 0, float(right), right or not self.tries, False, {}


def _number(env: Any) -> str:
    game: Number = env.unwrapped
    return f"{game.said or f'1 to {game.highest}'}, {game.tries} tries"


def _halve(env: Any) -> Sequence[int]:
    game: Any = env.unwrapped
    low, high, moves = 1, game.highest, list[int]()
    while not moves or moves[-1] != game.secret:
        moves.append((low + high) // 2)
        low, high = (moves[-1] + 1, high) if moves[-1] < game.secret else (low, moves[-1] - 1)
    return moves


class Hangman(gymnasium.Env[Any, Any]):
    """Find a word of 3 (level 1), 4 or 5 (2) or more letters (3) with at most six wrong ones."""

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(26)
        self.observation_space = spaces.Discrete(1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        """Think of a word."""
        super().reset(seed=seed)
        self.word = str(self.np_random.choice(WORDS[(options or {}).get("level", 1)].split()))
        self.said: set[str] = set()
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Say a letter."""
        self.said.add(ascii_lowercase[action])
        won = self.said >= set(self.word)
        return 0, float(won), won or len(self.wrong) > 6, False, {}

    @property
    def wrong(self) -> Sequence[str]:
        """The letters that are not in the word."""
        return sorted(self.said - set(self.word))


def _hangman(env: Any) -> str:
    game: Hangman = env.unwrapped
    shown = " ".join(letter if letter in game.said else "_" for letter in game.word)
    return f"{shown}; wrong: {' '.join(game.wrong) or 'none'}"


def _spell(env: Any) -> Sequence[int]:
    game: Any = env.unwrapped
    return [ascii_lowercase.index(letter) for letter in dict.fromkeys(game.word)]


def _game(
    make: Callable[[], Any],
    tell: Callable[[Any], str],
    solve: Callable[[Any], Sequence[int]],
    *,
    moves: int,
    prompt: str,
    actions: Sequence[str],
    won: Callable[[float], bool] = lambda r: r > 0,
) -> Game:
    played = from_gymnasium(lambda: Told(make(), tell, won), prompt=prompt, actions=actions)
    return Game(played=played, solve=solve, moves=moves)


frozen_lake = _game(
    Lake,
    _lake,
    _route,
    moves=8,
    prompt="You (@) are on a frozen lake. Reach G, not a hole H. left, down, right or up?",
    actions=["left", "down", "right", "up"],
)
cliff_walking = _game(
    _cliff_env,
    _cliff,
    _route,
    moves=8,
    won=lambda reward: True,
    prompt="Go to row 3 column 11. Row 3 columns 1 to 10 are a cliff: who falls is back at row 3 "
    "column 0. up, right, down or left?",
    actions=["up", "right", "down", "left"],
)
taxi = _game(
    TaxiEnv,
    _taxi,
    _route,
    moves=10,
    prompt="Bring the passenger to the place. Rows and columns count from 0; | is a wall.\n"
    + "\n".join(TAXI_MAP)
    + "\ndown, up, right, left, pick up or drop off?",
    actions=["down", "up", "right", "left", "pick up", "drop off"],
)
blackjack = _game(
    BlackjackEnv,
    _cards,
    _basic,
    moves=9,
    prompt="Blackjack: come nearer to 21 than the dealer, and not above. 1 may count as 11. "
    "stick or hit?",
    actions=["stick", "hit"],
)
number = _game(Number, _number, _halve, moves=9, prompt="Find the number.", actions=())
hangman = _game(
    Hangman,
    _hangman,
    _spell,
    moves=9,
    prompt="Find the word, letter by letter; the seventh wrong one loses.",
    actions=ascii_lowercase,
)
games = mix(
    frozen_lake=frozen_lake,
    cliff_walking=cliff_walking,
    taxi=taxi,
    blackjack=blackjack,
    number=number,
    hangman=hangman,
)
"""All of them as one environment: families of their own, options by `each`."""
