"""Adapters: what is trained, what is served, what is the reference, what a checkpoint holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from learning_cases import batch_of, make_learner, random_groups, tiny_model
from transformers import AutoModelForCausalLM

from agentrl.algorithms import AlgorithmConfig
from agentrl.engines.transformers import TransformersEngine
from agentrl.engines.weights import InProcessWeightSync
from agentrl.errors import ConfigError, RecordError
from agentrl.learning.checkpoint import Progress, load_checkpoint, save_checkpoint
from agentrl.learning.learner import PolicyLearner
from agentrl.learning.lora import is_adapter, without_adapters

pytest.importorskip("peft")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def adapted(
    algorithm: AlgorithmConfig | None = None, *, seed: int = 0, **section: Any
) -> PolicyLearner:
    plan = {"lr": 1e-2, "lora_rank": 4, **section}
    return make_learner(algorithm or AlgorithmConfig(), model=tiny_model(seed), **plan)


def steps(learner: PolicyLearner, *numbers: int) -> list[dict[str, float]]:
    return [dict(learner.update(batch_of(random_groups(seed=n)))) for n in numbers]


def plain(learner: PolicyLearner) -> Any:
    """The model that is served: no adapter in it."""
    model = tiny_model(9)
    model.load_state_dict(dict(learner.weights()))
    return model


def test_adapters_change_nothing_until_they_are_trained() -> None:
    before = make_learner(AlgorithmConfig(), model=tiny_model())
    assert adapted().logprobs(IDS, 1.0) == before.logprobs(IDS, 1.0)


def test_the_served_weights_are_those_that_were_learned() -> None:
    learner = adapted()
    assert [n for n, _ in learner.weights()] == [n for n, _ in tiny_model().named_parameters()]
    started = learner.logprobs(IDS, 1.0)
    steps(learner, 0, 1)
    served = make_learner(AlgorithmConfig(), model=plain(learner)).logprobs(IDS, 1.0)
    assert learner.logprobs(IDS, 1.0) == pytest.approx(served, abs=1e-5)
    assert served != pytest.approx(started, abs=1e-3), "and they moved"


def test_only_adapters_are_trained() -> None:
    learner = adapted()
    before = {n: p.clone() for n, p in learner.model.named_parameters()}
    steps(learner, 0)
    changed = {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(map(is_adapter, changed))
    assert learner.trained().keys() == {n for n in before if is_adapter(n)}
    assert not any("lm_head" in n or "embed" in n for n in learner.trained())


def test_the_reference_is_the_policy_without_adapters() -> None:
    learner = adapted(AlgorithmConfig.model_validate({"kl_coef": 0.1}))
    assert learner.reference is None, "no second model"
    first, second = steps(learner, 0, 1)
    assert first["kl_ref"] == 0 and second["kl_ref"] > 0
    with without_adapters(learner.model):
        off = learner.logprobs(IDS, 1.0)
    assert off == make_learner(AlgorithmConfig(), model=tiny_model()).logprobs(IDS, 1.0)
    assert off != learner.logprobs(IDS, 1.0), "and they are on again"


def test_kl_is_that_to_a_second_model() -> None:
    algorithm = AlgorithmConfig.model_validate({"kl_coef": 0.1})
    learner = adapted(algorithm)
    steps(learner, 0)
    full = make_learner(algorithm, model=plain(learner), reference=tiny_model())
    (ours,), (theirs,) = steps(learner, 1), steps(full, 1)
    assert ours["kl_ref"] == pytest.approx(theirs["kl_ref"], rel=1e-4)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_the_same_seed_gives_the_same_adapters_and_no_other_draw_moves() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    model = tiny_model()
    torch.manual_seed(7)
    learner = make_learner(AlgorithmConfig(), model=model, lr=1e-2, lora_rank=4)
    assert torch.equal(torch.rand(3), wanted)
    for name, value in adapted().trained().items():
        assert torch.equal(value, learner.trained()[name])


def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(tmp_path: Path) -> None:
    unbroken = adapted()
    steps(unbroken, 0, 1, 2)
    first = adapted()
    steps(first, 0, 1)
    folder = save_checkpoint(tmp_path, first, Progress(version=2, cursor=7))
    resumed = adapted()
    load_checkpoint(folder, resumed)
    steps(resumed, 2)
    for name, value in unbroken.trained().items():
        assert torch.equal(value, resumed.trained()[name]), name
    saved: Any = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in first.weights():
        assert torch.equal(saved.get_parameter(name), value), "a plain model folder, merged"


@pytest.mark.parametrize("rank", [0, 8])
def test_a_checkpoint_of_another_rank_is_refused(tmp_path: Path, rank: int) -> None:
    folder = save_checkpoint(tmp_path, adapted(), Progress(version=0, cursor=0))
    if rank:
        with pytest.raises(RecordError, match="does not fit this run"):
            load_checkpoint(folder, adapted(lora_rank=rank))
    other = adapted(lora_rank=0)
    full = save_checkpoint(tmp_path / "full", other, Progress(version=0, cursor=0))
    with pytest.raises(RecordError, match="does not fit this run"):
        load_checkpoint(full, adapted())


async def test_an_engine_serves_them_and_the_probe_agrees() -> None:
    learner = adapted()
    steps(learner, 0, 1)
    async with TransformersEngine(tiny_model(), context_tokens=64) as engine:
        await InProcessWeightSync(engine).publish(learner)
        served = await engine.score(IDS, 1.0)
    assert served == pytest.approx(learner.logprobs(IDS, 1.0), abs=1e-5)


def test_bfloat16_weights_stay_and_adapters_are_float32() -> None:
    learner = make_learner(
        AlgorithmConfig(), model=tiny_model().to(torch.bfloat16), lr=1e-2, lora_rank=4
    )
    steps(learner, 0)
    for name, parameter in learner.model.named_parameters():
        wide = is_adapter(name) or name.startswith("lm_head")
        assert parameter.dtype is (torch.float32 if wide else torch.bfloat16), name
    assert all(w.dtype is torch.bfloat16 for n, w in learner.weights() if "lm_head" not in n)


def test_a_reference_that_moves_is_refused() -> None:
    algorithm = AlgorithmConfig.model_validate({"kl_coef": 0.1, "reference_every": 2})
    with pytest.raises(ConfigError, match="lora_rank"):
        adapted(algorithm)
