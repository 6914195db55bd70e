"""The bugfix family: the fault can be mended, and nothing but mending it is rewarded."""

from agentrl_environments.bugfix import Bugfix
from agentrl_environments.bugfix_repositories import MAIN, STEPS
from agentrl_sandboxes.bwrap import BwrapProvider

from agentrl.plugins import find_environment, problems_of
from agentrl.testing.environment import CountedSandboxes, check_environment


async def test_it_keeps_the_contract() -> None:
    sandboxes = CountedSandboxes(BwrapProvider())
    found = await check_environment(
        find_environment("bugfix"), sandboxes=sandboxes, sample=1, options={"count": 40}
    )
    assert found == ()
    assert sandboxes.opened > 20 and sandboxes.open_now == 0


def test_repositories_repeat_and_hold_neither_solution_nor_hidden_tests() -> None:
    first, again = (problems_of(Bugfix, "train", {"count": 60}) for _ in range(2))
    assert [p.task.id for p in first] == [p.task.id for p in again]
    for problem in first:
        assert problem.grading is not None
        files = {path: data.decode() for path, data in problem.grading.files.items()}
        assert set(problem.task.artifacts) == {"toolbox/__init__.py", MAIN, STEPS}
        assert problem.reference.solution[STEPS] not in files.values()
        everything = "".join(files.values())
        unseen = [c for c in problem.reference.cases if repr(c.arguments[0]) not in everything]
        assert len(unseen) >= 8
