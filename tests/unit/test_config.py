from pathlib import Path

import pytest

from agentrl.config import RunConfig, dump_config, load_config
from agentrl.errors import ConfigError


def leaves(model: type) -> int:
    from pydantic import BaseModel

    return sum(
        leaves(f.annotation)
        if isinstance(f.annotation, type) and issubclass(f.annotation, BaseModel)
        else 1
        for f in model.model_fields.values()
    )


def test_every_field_says_what_it_is() -> None:
    for section in RunConfig.model_fields.values():
        for name, field in section.annotation.model_fields.items():
            assert field.description, name


def test_the_whole_configuration_is_small() -> None:
    assert leaves(RunConfig) <= 85


def test_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(None, ["learner.lr=1e-4", "environment.options={digits: 3}"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert config.learner.lr == 1e-4
    assert config.environment.options == {"digits": 3}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.lrr=1", "did you mean lr"),
        ("lerner.lr=1", "did you mean learner"),
        ("learner.lr=fast", "learner.lr"),
        ("learner.lr=-1", "learner.lr"),
        ("rollout.group_size=1", "rollout.group_size"),
        ("sampling.top_p=0.9", "top_p"),
        ("sampling.top_k=5", "top_k"),
        ("sampling.temperature=0", "temperature"),
        ("engine.context_tokens=256", "context_tokens"),
        ("learner.minibatches=4096", "minibatches"),
        ("learner", "section.field=value"),
        ("learner.lr.x=1", "learner"),
        ("learner.lr=[1", "not YAML"),
        ("algorithm.preset=grop", "grpo"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_field(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    message = str(caught.value)
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["- 1", "run: [", "\x00", "run: 7", "5"])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load_config(path)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load_config(path) == RunConfig()
