"""Unmodified programs of the SDKs, against fake engines and the real tiny policy."""

import sys
from pathlib import Path

import pytest
from small_run import SMALL, masks_are_the_sampled_tokens

from agentrl import build
from agentrl.agents import OutsideAgent
from agentrl.cli.display import QuietReporter
from agentrl.config import RunConfig, load_config
from agentrl.metrics import read_metrics
from agentrl.rollout import Limits, Stage, run_group
from agentrl.store import ParquetStore
from agentrl.testing.fakes import CharRenderer, FixedEngine, a_problem, right_answer
from agentrl.testing.fakes import FakeVerifier as RatedBy
from agentrl.types import Ending

pytest.importorskip("openai")
pytestmark = pytest.mark.timeout(120)
HERE = Path(__file__).parent
QUICKSTART = HERE.parents[1] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("flag", [(), ("--stream",)], ids=["whole", "streamed"])
async def test_an_sdk_program_is_recorded_as_one_talk(flag: tuple[str, ...]) -> None:
    import lookup_program

    class Agent(OutsideAgent):
        command = (sys.executable, str(HERE / "lookup_program.py"), *flag)
        verifier = RatedBy(rate=right_answer)

    right = lookup_program.search("ada")
    stage = Stage(
        engine=FixedEngine('let me see\n@search {"name": "ada"}', right),
        renderer=CharRenderer(),
        environment=Agent,
        limits=Limits(timeout_s=60),
    )
    group = await run_group(stage, a_problem("ada", reference=right), size=1, seed=0)
    (trajectory,) = group.trajectories
    assert group.rewards == (1.0,)
    assert trajectory.ending is Ending.ANSWERED
    assert trajectory.turns[0].reply[0].content == right
    assert group.artifacts[0]["stdout"].decode().strip() == right
    first, second = trajectory.turns
    assert second.observation.token_ids == CharRenderer().extend(first.reply, 0)


def config(folder: Path, *more: str) -> RunConfig:
    lookup = [f"environment.name={HERE / 'lookup_agent.py'}:Lookup", "environment.options.count=50"]
    settings = [s for s in SMALL if not s.startswith("environment")]
    wide = ["environment.options={}", *lookup, f"run.dir={folder}", "rollout.timeout_s=60", *more]
    return load_config(QUICKSTART, [*settings, *wide])


def test_a_run_trains_through_the_program(tmp_path: Path) -> None:
    build.train(config(tmp_path), reporter=QuietReporter())
    steps = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert [r["step"] for r in steps] == [0, 1]
    for row in steps:
        assert row["faults"] == 0, row["fault_example"]
        assert row["episodes"] == 8
        assert row["ratio_mean"] == 1.0
        assert row["mismatch_max"] < 1e-3, "engine and learner agree about the recorded ids"
    groups = list(ParquetStore(tmp_path / "trajectories").read())
    masks_are_the_sampled_tokens(groups)
    assert {t.turns[0].message.tool_calls[0].name for g in groups for t in g.trajectories
            if t.turns[0].message.tool_calls} <= {"search"}  # fmt: skip
