import pytest
from pydantic import ValidationError

from agentrl.algorithms import PRESETS, AlgorithmConfig


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_holds_what_it_says(name: str) -> None:
    config = AlgorithmConfig(preset=name)
    for field, value in PRESETS[name].items():
        assert getattr(config, field) == value


def test_given_fields_win_over_the_preset() -> None:
    config = AlgorithmConfig(preset="grpo", kl_coef=0.0, ddof=1)
    assert (config.kl_coef, config.ddof, config.scale) == (0.0, 1, "group")


def test_nothing_given_is_the_default_preset() -> None:
    config = AlgorithmConfig()
    assert config == AlgorithmConfig(preset="default")
    assert (config.baseline, config.scale, config.aggregation) == ("group", "none", "token_mean")
    assert (config.clip_low, config.clip_high, config.kl_coef) == (0.2, 0.28, 0.0)
    assert (config.mismatch, config.mismatch_bounds[1]) == ("truncate", 2.0)
    assert config.proximal == "recompute"


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_configuration_reads_back_the_same(name: str) -> None:
    config = AlgorithmConfig(preset=name, eps=0.5)
    assert AlgorithmConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"preset": "gropo"}, "did you mean grpo"),
        ({"preset": "zzz"}, "known: default"),
        ({"preset": ["grpo"]}, "unknown preset"),
        ({"clip_hihg": 0.3}, "clip_hihg"),
        ({"mismatch_bounds": (2.0, 1.0)}, "mismatch_bounds"),
        ({"mismatch_bounds": (-1.0, 1.0)}, "mismatch_bounds"),
        ({"length_tokens": (10, 11)}, "length_tokens"),
        ({"length_tokens": (0, 0)}, "length_tokens"),
        ({"baseline": "steps", "scale": "batch"}, "baseline steps"),
        ({"baseline": "steps", "length_tokens": (100, 10)}, "baseline steps"),
        ({"baseline": "steps", "reward": "passed"}, "set reward total"),
        ({"reward": "parts", "scale": "batch", "zero_variance": "keep"}, "reward parts"),
        ({"reward": "parts", "turn_credit": "states"}, "reward parts"),
        ({"reward": "parts", "length_tokens": (100, 10)}, "overlong"),
        ({"turn_credit": "rewards", "scale": "batch"}, "turn_credit"),
        ({"discount": 0.0}, "discount"),
        ({"reference_every": 5}, "kl_coef"),
        ({"replay_share": 1.0}, "replay_share"),
        ({"scale": "others"}, "leave_one_out"),
        ({"baseline": "batch"}, "zero_variance keep"),
        ({"baseline": "none"}, "zero_variance keep"),
        ({"clip": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"clip": "sapo", "clip_low": 0.0}, "temperatures"),
        ({"kl_coef": 0.1, "kl_form": "k1_reward", "scale": "group"}, "k1_reward"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"refill": 0.5}, "refill"),
        ({"ddof": 2}, "ddof"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(fields: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AlgorithmConfig.model_validate(fields)


def test_the_family_stays_small() -> None:
    assert len(AlgorithmConfig.model_fields) - 1 <= 35
    assert all(field.description for field in AlgorithmConfig.model_fields.values())


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        AlgorithmConfig().eps = 1.0
