"""The README's environment runs as it stands there."""

import re
from pathlib import Path

from agentrl.plugins import find_environment, problems_of
from agentrl.rollout import Stage, run_script
from agentrl.testing.fakes import CharRenderer, FakeSandboxes, FixedEngine
from agentrl.tools import answer, call
from agentrl.types import Ending

README = Path(__file__).parents[2] / "README.md"


async def test_the_environment_of_the_readme(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    own = tmp_path / "powers.py"
    own.write_text(code)
    powers = find_environment(str(own))
    train = problems_of(powers, "train", {"largest": 9})
    test = problems_of(powers, "test", {"largest": 9})
    assert not {p.task.id for p in train} & {p.task.id for p in test}

    def script(problem):
        yield call("python", code="print(2**5)")
        yield answer("32")

    stage = Stage(
        engine=FixedEngine("x"),
        renderer=CharRenderer(),
        environment=powers,
        sandboxes=FakeSandboxes(),
    )
    episode = await run_script(stage, train[0], script)
    assert episode.trajectory.ending is Ending.ANSWERED
    (verdict,) = await powers.verifier.grade(train[0], [episode], None)
    assert verdict.passed


def test_the_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (README.parent / target).exists(), target
