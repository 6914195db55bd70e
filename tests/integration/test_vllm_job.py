"""The main job in small, sampled by real vLLM and published to it."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from small_run import QUICKSTART, SMALL

from agentrl import build
from agentrl.cli.display import QuietReporter
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.metrics import read_metrics
from agentrl.store import ParquetStore

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]

VLLM = (*SMALL, "warm_start.steps=0", "engine.name=vllm", "engine.max_concurrent=8")


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_through_vllm(tmp_path: Path, max_lag: int) -> None:
    """Each step's tokens were sampled by the version before it, as engine and learner agree."""
    config = load_config(QUICKSTART, [*VLLM, f"run.dir={tmp_path}", f"rollout.max_lag={max_lag}"])
    build.train(config, reporter=QuietReporter())
    rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert [r["step"] for r in rows] == [0, 1]
    for row in rows:
        assert row["faults"] == 0 and sum(row["endings"].values()) == 8
        if max_lag == 0:
            assert row["mismatch_max"] < 1e-3, "engine and learner agree in fp32"
            assert row["lag"] == 0
    store = ParquetStore(tmp_path / "trajectories")
    for step in range(2):
        versions = {
            version
            for group in store.read(version=step)
            for trajectory in group.trajectories
            for turn in trajectory.turns
            for version in turn.action.versions
        }
        assert versions <= set(range(step - max_lag, step + 1)), (step, versions)


def test_what_vllm_cannot_serve_is_one_line(tmp_path: Path) -> None:
    too_small = ("engine.options={kv_cache_mb: 1}", "engine.context_tokens=16384")
    config = load_config(QUICKSTART, [*VLLM, f"run.dir={tmp_path}", *too_small])
    with pytest.raises(
        ConfigError, match=r"can't serve this LlamaForCausalLM: .*KV cache"
    ) as caught:
        build.train(config, reporter=QuietReporter())
    assert "\n" not in str(caught.value)
