"""A pretrained model with its own tokenizer and chat template, fetched, converted and trained."""

from pathlib import Path

import pytest
from small_run import masks_are_the_sampled_tokens

from agentrl import build
from agentrl.cli.display import QuietReporter
from agentrl.cli.fetch import fetch_model
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.metrics import read_metrics
from agentrl.store import ParquetStore

ROOT = Path(__file__).parents[2]
SMALL = (
    "run.steps=1", "run.eval_every=0", "warm_start.steps=2", "warm_start.traces=4",
    "warm_start.batch=4", "rollout.groups=2", "rollout.group_size=2", "rollout.max_turns=2",
    "sampling.max_action_tokens=24",
)  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Kept in `models/`, where `agentrl fetch` puts it."""
    try:
        return fetch_model("smollm2-135m", ROOT / "models", QuietReporter())
    except ConfigError as error:
        if "can't download" in str(error):
            pytest.skip(str(error))
        raise


def test_a_real_model_takes_a_step(smollm2: Path, tmp_path: Path) -> None:
    where = (f"model.path={smollm2}", f"run.dir={tmp_path}")
    config = load_config(ROOT / "configs" / "smollm2-135m.yaml", [*SMALL, *where])
    build.train(config, reporter=QuietReporter())
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["faults"] == 0 and sum(row["endings"].values()) == 4
    assert row["mismatch_max"] < 1e-3, "engine and learner agree in fp32"
    masks_are_the_sampled_tokens(ParquetStore(tmp_path / "trajectories").read())


def test_a_model_that_is_there_is_not_fetched_again(smollm2: Path) -> None:
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert fetch_model("smollm2-135m", ROOT / "models", QuietReporter()) == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before


def test_a_model_that_nobody_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m"):
        fetch_model("smollm3", tmp_path, QuietReporter())
