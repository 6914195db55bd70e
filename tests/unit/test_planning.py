"""What a plan must get right: counts of weights, shared prompts, roofs, and plain errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config import ModelSection, RunConfig
from agentrl.errors import ConfigError
from agentrl.models import load_policy
from agentrl.planning import (
    Allocation,
    Estimate,
    Machine,
    Workload,
    estimate,
    find_machine,
    find_shape,
    longest_workload,
)

H200 = find_machine("h200")
EPISODE = Workload(prompt=1000, actions=500, observations=300, turns=3)


def a_config(**sections: object) -> RunConfig:
    made = {"model": {"path": "Qwen/Qwen2.5-1.5B-Instruct", "dtype": "bfloat16"}} | sections
    return RunConfig.model_validate(made)


def planned(
    config: RunConfig, *, machine: Machine = H200, gpus: int = 8, engine_gpus: int = 0,
    workload: Workload = EPISODE,
) -> Estimate:  # fmt: skip
    allocation = Allocation(gpus=gpus, engine_gpus=engine_gpus)
    return estimate(config, find_shape(config.model), machine, allocation, workload)


def test_the_tiny_model_has_the_weights_that_are_counted() -> None:
    section = ModelSection()
    model, _ = load_policy(section, context_tokens=64, seed=0)
    real = sum(p.numel() for p in model.parameters())
    assert find_shape(section).parameters == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [  # as their model cards say
        ("HuggingFaceTB/SmolLM2-135M", 0.135),
        ("Qwen/Qwen2.5-1.5B", 1.54),
        ("Qwen/Qwen2.5-3B-Instruct", 3.09),
        ("Qwen/Qwen2.5-7B-Instruct", 7.61),
        ("Qwen/Qwen2.5-32B", 32.5),
        ("Qwen/Qwen3-8B", 8.2),
        ("deepseek-ai/deepseek-math-7b-instruct", 6.91),
    ],
)
def test_well_known_models_have_the_weights_of_their_cards(name: str, billions: float) -> None:
    assert find_shape(ModelSection(path=name)).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_model_folder_gives_its_shape(tmp_path: Path) -> None:
    model, _ = load_policy(ModelSection(tiny_layers=2, tiny_hidden=64), context_tokens=64, seed=0)
    model.save_pretrained(tmp_path)
    shape = find_shape(ModelSection(path=str(tmp_path)))
    assert shape == find_shape(ModelSection(tiny_layers=2, tiny_hidden=64))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": "x"}', '{"num_experts": 8}'])
def test_a_folder_that_is_no_decoder_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        find_shape(ModelSection(path=str(tmp_path)))
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


def test_a_shared_prompt_is_learned_once() -> None:
    """P + GR tokens instead of G(P + R), where the compute of the layers is what counts."""
    rollout = {"group_size": 8, "groups": 16}
    shared = planned(a_config(rollout=rollout)).parts["update"].roofs["compute"]
    plain = planned(a_config(rollout=rollout, learner={"share_prefixes": False}))
    ratio = shared / plain.parts["update"].roofs["compute"]
    assert (1000 + 8 * 800) / (8 * 1800) < ratio < 0.7


def test_learning_costs_six_times_the_weights_for_a_token() -> None:
    config = a_config(learner={"share_prefixes": False})
    shape, tokens = find_shape(config.model), 16 * 8 * EPISODE.tokens
    least = 6 * shape.body * tokens / (H200.flops * H200.learner_share * 8)
    seconds = planned(config).parts["update"].roofs["compute"]
    assert least < seconds < 1.5 * least


def test_a_checkpointed_pass_and_a_reference_cost_what_they_add() -> None:
    plain = planned(a_config()).parts["update"].roofs["compute"]
    again = planned(a_config(learner={"gradient_checkpointing": True}))
    both = planned(a_config(learner={"gradient_checkpointing": True}, algorithm={"kl_coef": 0.01}))
    assert again.parts["update"].roofs["compute"] / plain == pytest.approx(8 / 6, rel=0.01)
    assert both.parts["update"].roofs["compute"] / plain == pytest.approx(10 / 6, rel=0.01)
    assert again.learner_bytes < planned(a_config()).learner_bytes


def test_slow_tools_become_the_bound() -> None:
    assert "tools" not in planned(a_config()).bound
    slow = planned(a_config(), workload=replace(EPISODE, tool_s=60))
    assert slow.bound.startswith("sample: tools") and slow.parts["sample"].seconds > 180


def test_lag_hides_the_shorter_part_only_where_the_engine_has_its_own_devices() -> None:
    rollout = {"max_lag": 1}
    apart = planned(a_config(rollout=rollout), engine_gpus=4)
    in_turn = planned(a_config(), engine_gpus=4)
    longer = max(apart.parts["sample"].seconds, apart.parts["update"].seconds)
    assert apart.step_s == pytest.approx(longer + apart.parts["publish"].seconds)
    assert in_turn.step_s > apart.step_s
    assert planned(a_config(rollout=rollout)).step_s == planned(a_config()).step_s


def test_a_model_that_is_too_large_does_not_fit() -> None:
    large = {"path": "Qwen/Qwen2.5-32B", "dtype": "bfloat16"}
    checkpointed = {"gradient_checkpointing": True}
    assert not planned(a_config(model=large), gpus=1).fits
    assert planned(a_config(model=large, learner=checkpointed), gpus=8).fits
    assert planned(a_config(model=large), gpus=1).engine_bytes > 64e9


def test_the_longest_workload_fills_the_context_and_no_more() -> None:
    for context in (2048, 32768):
        config = a_config(engine={"context_tokens": context})
        assert longest_workload(config).tokens <= context + 1e-6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "abacus"], "abacus"),
        (["--gpus", "2", "--engine-gpus", "2"], "--engine-gpus"),
        (["--like", "no-such-run"], "no-such-run"),
        (["--set", "model.path=./nothing"], "nothing"),
    ],
)
def test_wrong_usage_is_a_config_error(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["plan", "configs/quickstart.yaml", *arguments])
    assert isinstance(result.exception, ConfigError) and words in str(result.exception)


def test_the_verb_prints_one_json_line() -> None:
    arguments = ["--gpu", "h200", "--gpus", "2", "--price", "2", "--json"]
    result = CliRunner().invoke(app, ["plan", "configs/quickstart.yaml", *arguments])
    row = json.loads(result.stdout)
    assert row["fits"] and set(row["parts"]) == {"sample", "update", "publish"}
    assert row["step_usd"] == pytest.approx(row["step_s"] * 2 * 2 / 3600)
