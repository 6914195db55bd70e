"""The bugfix family: the fault can be mended, and nothing but mending it is rewarded."""

from dataclasses import replace
from pathlib import Path

from agentrl_environments.bugfix import Bugfix
from agentrl_environments.bugfix_repositories import MAIN, STEPS
from agentrl_sandboxes.bwrap import BwrapProvider

from agentrl.grading import grade_group
from agentrl.plugins import find_environment, problems_of
from agentrl.replay.regrade import regrade
from agentrl.rollout import Stage, run_script
from agentrl.store import ParquetStore
from agentrl.testing.environment import LIMITS, CountedSandboxes, check_environment
from agentrl.testing.fakes import CharRenderer, FixedEngine


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


async def test_a_recorded_repair_is_graded_again_from_its_files_alone(tmp_path: Path) -> None:
    """Through a step file; and a record whose repair was undone is no longer worth anything."""
    problem, *_ = problems_of(Bugfix, "train", {"count": 5})
    sandboxes = BwrapProvider()
    stage = Stage(
        engine=FixedEngine(""),
        renderer=CharRenderer(),
        environment=find_environment("bugfix"),
        sandboxes=sandboxes,
        limits=LIMITS,
    )
    episode = await run_script(stage, problem, Bugfix.oracle)
    assert problem.task.artifacts and set(episode.artifacts) == set(problem.task.artifacts)
    told = {"sandboxes": sandboxes, "timeout_s": 60}
    group = await grade_group(problem, [episode], Bugfix.verifier, **told)
    store = ParquetStore(tmp_path, secrets=())
    store.append([group], version=0)
    (recorded,) = store.read(version=0)
    (again,) = await regrade(recorded, problem, Bugfix.verifier, **told)
    assert (again.before.reward, again.after.reward, again.changed) == (1.0, 1.0, False)
    assert problem.grading is not None
    undone = {path: problem.grading.files[path] for path in episode.artifacts}
    (worse,) = await regrade(
        replace(recorded, artifacts=(undone,)), problem, Bugfix.verifier, **told
    )
    assert (worse.before.reward, worse.after.reward, worse.changed) == (1.0, 0.0, True)
