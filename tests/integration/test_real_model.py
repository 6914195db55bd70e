"""A pretrained model with its own tokenizer and chat template, fetched, converted and trained."""

from pathlib import Path

import pytest
from agentrl_environments.python_math import PythonMath
from small_run import masks_are_the_sampled_tokens

from agentrl import build
from agentrl.cli.display import QuietReporter
from agentrl.cli.fetch import fetch_model
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.metrics import read_metrics
from agentrl.models import load_tokenizer
from agentrl.rendering import check_template, make_renderer
from agentrl.store import ParquetStore
from agentrl.types import Message, user

ROOT = Path(__file__).parents[2]
SMALL = (
    "run.steps=1", "run.eval_every=0", "warm_start.steps=2", "warm_start.traces=4",
    "warm_start.batch=4", "rollout.groups=2", "rollout.group_size=2", "rollout.max_turns=2",
    "sampling.max_action_tokens=24", "algorithm.zero_variance=keep",
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
    assert 0 < row["mismatch_max"] < 1e-3, "engine and learner agree in fp32"
    assert row["ratio_max"] == 1 and row["clip_share"] == 0
    masks_are_the_sampled_tokens(ParquetStore(tmp_path / "trajectories").read())


def test_its_own_template_carries_tools_and_calls(smollm2: Path) -> None:
    tokenizer = load_tokenizer(str(smollm2))
    renderer = make_renderer(tokenizer, tool_names=["python"])
    assert [finding.what for finding in check_template(renderer) if finding.level == "fatal"] == []
    opened = tokenizer.decode(renderer.open([user("2+2?")], PythonMath(sandbox=None).tools))
    assert opened.startswith("<|im_start|>system\n") and '"name": "python"' in opened
    assert opened.endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    (end,) = tokenizer("<|im_end|>")["input_ids"]
    assert end in renderer.stop_ids
    written = '<tool_call>\n{"name": "python", "arguments": {"code": "print(4)"}}\n</tool_call>'
    (found,) = renderer.parse([*tokenizer(written)["input_ids"], end]).tool_calls
    assert (found.name, found.error) == ("python", None)
    reply = Message(role="tool", content="4", tool_call_id=found.id)
    assert tokenizer.decode(renderer.extend([reply], end)) == (
        "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    )
