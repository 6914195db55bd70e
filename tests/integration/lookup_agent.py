"""The program of `lookup_program.py` as an environment, run as a coroutine."""

from collections.abc import Iterator, Sequence
from random import Random

import lookup_program
from openai import AsyncOpenAI

from agentrl.agents import GivenTool, OutsideAgent, serve
from agentrl.protocols import ChatPolicy, Split, Tool
from agentrl.tools import answer, call, problem
from agentrl.types import Problem, Task
from agentrl.verifiers import NumericMatch


class Lookup(OutsideAgent):
    verifier = NumericMatch(only_number=True)

    @property
    def tools(self) -> Sequence[Tool]:
        return (GivenTool(name="search", schema=lookup_program.SEARCH),)

    async def run_agent(self, task: Task, policy: ChatPolicy, *, seed: int) -> bool:
        async with (
            serve(policy) as endpoint,
            AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key) as client,
        ):
            await lookup_program.solve(client, task.prompt[-1].content)
        return True

    @staticmethod
    def problems(split: Split, *, count: int = 500) -> Iterator[Problem]:
        for name in Random("lookup").sample(range(1000, 10_000), count):
            if (Random(name).random() < 0.2) == (split == "test"):
                yield problem(f"n{name}", lookup_program.search(f"n{name}"))

    @staticmethod
    def oracle(problem):
        (seen,) = yield call("search", name=problem.task.prompt[-1].content)
        yield answer(seen.content)

    @staticmethod
    def guess(problem):
        yield answer(str(Random(problem.task.id).randrange(256)))

    scripts = {"oracle": oracle, "guess": guess}  # noqa: RUF012
