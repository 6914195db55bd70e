"""The transformers engine holds the engine contract, for several architectures."""

import asyncio
import copy
import threading
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from engine_cases import (
    Altered,
    PlainLearner,
    scored_by_the_version_of_each_token,
    with_fixed_logits,
)
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from agentrl.engines.transformers import TransformersEngine
from agentrl.engines.weights import InProcessWeightSync
from agentrl.errors import ConfigError, EngineFault, WeightsNotApplied
from agentrl.testing.engine import ENGINE_CHECKS, PUBLISH_CHECKS, EngineCheck, EngineKit
from agentrl.types import Sampling

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, Any] = {
    "llama-grouped": lambda: LlamaConfig(**SHAPE),
    "llama-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True, head_dim=6),
    "qwen2-tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "mistral": lambda: MistralConfig(**SHAPE | {"num_key_value_heads": 1}, sliding_window=None),
    "gpt2-learned-positions": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=2048, initializer_range=0.3
    ),
}


def build(config: Any, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def fixed_model(logits: Sequence[float]) -> PreTrainedModel:
    return with_fixed_logits(build(LlamaConfig(**SHAPE)), logits)


class BrokenLlama(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory, say")


def kit(name: str) -> EngineKit:
    before, after = build(CONFIGS[name]()), build(CONFIGS[name](), seed=1)

    @asynccontextmanager
    async def start(
        model: PreTrainedModel, *, max_concurrent: int = 8, context_tokens: int = 256
    ) -> AsyncGenerator[TransformersEngine]:
        # A small prefill budget, so that every check meets chunks and their order.
        async with TransformersEngine(
            copy.deepcopy(model),
            max_concurrent=max_concurrent,
            context_tokens=context_tokens,
            prefill_tokens=24,
        ) as engine:
            yield engine

    return EngineKit(
        open=lambda **sizes: start(before, **sizes),
        open_fixed=lambda logits: start(fixed_model(logits)),
        open_broken=lambda: start(BrokenLlama(LlamaConfig(**SHAPE))),
        sync=InProcessWeightSync,
        before=PlainLearner(before, 3),
        after=PlainLearner(after, 4),
        vocab_size=VOCAB,
    )


@pytest.mark.parametrize("check", [*ENGINE_CHECKS, *PUBLISH_CHECKS], ids=lambda c: c.__name__)
async def test_contract(check: EngineCheck) -> None:
    await check(kit("llama-grouped"))


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "llama-grouped"])
@pytest.mark.parametrize(
    "check",
    [c for c in (*ENGINE_CHECKS, *PUBLISH_CHECKS) if "full_forward" in c.__name__
     or "prefix" in c.__name__ or "places" in c.__name__ or "publishing" in c.__name__],
    ids=lambda c: c.__name__,
)  # fmt: skip
async def test_contract_of_other_architectures(check: EngineCheck, name: str) -> None:
    await check(kit(name))


async def test_members_of_a_group_share_the_work_of_their_prompt() -> None:
    """Eight members with one prompt of 200 tokens: it goes through the model once."""
    model = build(CONFIGS["llama-grouped"]())
    seen: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    prompt = [(7 * i) % VOCAB for i in range(200)]
    sampling = Sampling(max_tokens=1, stop_ids=frozenset())
    async with TransformersEngine(model, max_concurrent=8, context_tokens=256) as engine:
        await asyncio.gather(*(engine.sample(prompt, sampling, session=f"m{n}") for n in range(8)))
    assert sum(seen) < 200 + 8 * 2 * 8, seen


async def test_a_turn_prefills_only_what_was_added() -> None:
    model = build(CONFIGS["llama-grouped"]())
    seen: list[int] = []
    async with TransformersEngine(model, max_concurrent=2, context_tokens=256) as engine:
        history = [(5 * i) % VOCAB for i in range(150)]
        sampling = Sampling(max_tokens=4, stop_ids=frozenset())
        action = await engine.sample(history, sampling, session="e")
        model.base_model.register_forward_pre_hook(
            lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].numel()),
            with_kwargs=True,
        )
        history += [*action.token_ids, 1, 2, 3]
        await engine.sample(history, sampling, session="e")
    assert sum(seen) == 1 + 3 + 3, seen  # the last sampled id, what was added, three more draws


async def test_an_action_across_a_publish_is_scored_by_the_weights_of_each_token() -> None:
    """The rows that run are prefilled again: no key or value of the old weights is read."""
    tools, model = kit("llama-grouped"), build(CONFIGS["llama-grouped"]())
    steps, begun = iter(range(10_000)), threading.Event()
    model.register_forward_hook(lambda *_: begun.set() if next(steps) == 20 else None)
    prompt, sampling = (5, 6, 7), Sampling(max_tokens=500, stop_ids=frozenset())
    async with TransformersEngine(model, context_tokens=1024, version=3) as engine:
        running = asyncio.ensure_future(engine.sample(prompt, sampling, session="e"))
        assert await asyncio.to_thread(begun.wait, 30)
        await tools.sync(engine).publish(tools.after)
        action = await running
    scored_by_the_version_of_each_token(tools, prompt, action, 1e-4)


async def test_no_thread_is_left_and_a_closed_engine_says_so() -> None:
    before = threading.active_count()
    engine = TransformersEngine(build(CONFIGS["llama-grouped"]()), context_tokens=64)
    with pytest.raises(EngineFault, match="not open"):
        await engine.sample([1], Sampling(max_tokens=1, stop_ids=frozenset()), session="s")
    async with engine:
        assert any(t.name == "agentrl-engine" for t in threading.enumerate())
    assert not any(t.name == "agentrl-engine" for t in threading.enumerate())
    assert threading.active_count() <= before + 1  # the pool thread that waited for the join
    with pytest.raises(EngineFault, match="closed"):
        await engine.sample([1], Sampling(max_tokens=1, stop_ids=frozenset()), session="s")


async def test_a_cancelled_release_lets_requests_run_again() -> None:
    tools = kit("llama-grouped")
    sampling = Sampling(max_tokens=600, stop_ids=frozenset())
    async with tools.open(max_concurrent=1, context_tokens=1024) as engine:
        running = asyncio.ensure_future(engine.sample((1, 2), sampling, session="e"))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), engine.released():
                raise AssertionError("released while a request was running")
        running.cancel()
        short = Sampling(max_tokens=2, stop_ids=frozenset())
        async with asyncio.timeout(20):
            assert len((await engine.sample((1, 2), short, session="f")).token_ids) == 2


async def test_logits_that_are_not_finite_fail_the_request_and_not_the_engine() -> None:
    tools = kit("llama-grouped")
    poisoned = build(CONFIGS["llama-grouped"]())
    with torch.no_grad():
        poisoned.get_output_embeddings().weight[3] = torch.nan
    sampling = Sampling(max_tokens=4, stop_ids=frozenset())
    async with tools.open(max_concurrent=2, context_tokens=64) as engine:
        with pytest.raises(WeightsNotApplied):  # the probe has no numbers to compare
            await tools.sync(engine).publish(PlainLearner(poisoned, 5))
        with pytest.raises(EngineFault, match="not finite"):
            await engine.sample((1, 2), sampling, session="e")
        await tools.sync(engine).publish(tools.after)
        action = await engine.sample((1, 2), sampling, session="e")
        assert action.logprobs == pytest.approx(
            tools.after.logprobs([1, 2, *action.token_ids], 1.0)[1:], abs=1e-4
        )


def altered_weights(model: PreTrainedModel) -> dict[str, list[tuple[str, Tensor]]]:
    own = [(n, p.detach()) for n, p in model.named_parameters()]
    name, first = own[0]
    return {
        "no such weight": [*own, ("adapter.weight", torch.ones(2))],
        "never came": own[:-1],
        "shape": [(name, first[:-1]), *own[1:]],
        "nats": [(name, first.roll(1, 0)), *own[1:]],
    }


@pytest.mark.parametrize("wrong", ["no such weight", "never came", "shape", "nats"])
async def test_a_publish_that_does_not_arrive_stops_the_run(wrong: str) -> None:
    tools = kit("llama-grouped")
    model = build(CONFIGS["llama-grouped"](), seed=2)
    learner = Altered(model, altered_weights(model)[wrong])
    async with tools.open(max_concurrent=2, context_tokens=64) as engine:
        with pytest.raises(WeightsNotApplied, match=wrong) as caught:
            await tools.sync(engine).publish(learner)
    assert "\n" not in str(caught.value)


async def test_two_values_for_a_tied_weight_are_refused() -> None:
    tools = kit("qwen2-tied")
    model = build(Qwen2Config(**SHAPE, tie_word_embeddings=False), seed=2)
    async with tools.open(max_concurrent=2, context_tokens=64) as engine:
        with pytest.raises(WeightsNotApplied, match="tied"):
            await tools.sync(engine).publish(PlainLearner(model, 5))


async def test_a_tied_weight_may_come_under_all_its_names() -> None:
    tools = kit("qwen2-tied")
    model = build(CONFIGS["qwen2-tied"](), seed=2)
    names = model.named_parameters(remove_duplicate=False)
    async with tools.open(max_concurrent=2, context_tokens=64) as engine:
        await tools.sync(engine).publish(Altered(model, names))


async def test_the_engine_refuses_to_share_memory_with_the_learner() -> None:
    model = build(CONFIGS["llama-grouped"]())
    async with TransformersEngine(model, max_concurrent=1, context_tokens=64) as engine:
        with pytest.raises(WeightsNotApplied, match="own memory"):
            await InProcessWeightSync(engine).publish(PlainLearner(model, 1))


async def test_an_engine_that_ignores_the_weights_is_found_out() -> None:
    """A publish that copies nothing: the fingerprint stays, though every call succeeds."""

    class Deaf(TransformersEngine):
        async def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> str:
            kept = self.fingerprint
            given = await super().load(weights, version=version)
            self.fingerprint = kept
            return given

    tools = kit("llama-grouped")
    async with Deaf(build(CONFIGS["llama-grouped"]()), context_tokens=64) as engine:
        with pytest.raises(WeightsNotApplied, match="holds"):
            await InProcessWeightSync(engine).publish(tools.after)


async def test_unchanged_weights_publish_as_a_new_version() -> None:
    """Learning rate 0: the fingerprint stays and that is right; one changed weight changes it."""
    tools = kit("llama-grouped")
    model = build(CONFIGS["llama-grouped"]())
    async with TransformersEngine(copy.deepcopy(model), context_tokens=64) as engine:
        sync, first = tools.sync(engine), engine.fingerprint
        await sync.publish(PlainLearner(model, 1))
        assert (engine.version, engine.fingerprint) == (1, first)
        with torch.no_grad():
            model.get_output_embeddings().weight[11, 3] += 1.0
        await sync.publish(PlainLearner(model, 2))
        assert engine.version == 2 and engine.fingerprint != first


async def test_bfloat16_serves_float32_masters() -> None:
    master = build(CONFIGS["llama-grouped"](), seed=4)
    served = copy.deepcopy(master).to(torch.bfloat16)
    rounded = copy.deepcopy(served).float()
    async with TransformersEngine(served, max_concurrent=2, context_tokens=64) as engine:
        learner = Altered(rounded, ((n, p.detach()) for n, p in master.named_parameters()))
        await InProcessWeightSync(engine).publish(learner)
        sampling = Sampling(max_tokens=8, stop_ids=frozenset())
        action = await engine.sample((1, 2, 3), sampling, session="e")
        assert action.logprobs is not None and len(action.logprobs) == 8


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (lambda: MistralConfig(**SHAPE, sliding_window=128), "window"),
        (lambda: LlamaConfig(**SHAPE | {"max_position_embeddings": 128}), "positions"),
    ],
)
def test_a_model_that_would_be_served_wrong_is_refused(config: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        TransformersEngine(build(config()), context_tokens=256)
    assert "\n" not in str(caught.value)


def test_a_model_that_shares_its_configuration_is_left_alone() -> None:
    """Padded and plain forwards of another model equal those before the engine came."""
    config = CONFIGS["llama-grouped"]()
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    before = model(ids).logits, model(ids, attention_mask=mask).logits
    TransformersEngine(LlamaForCausalLM(config), context_tokens=64)
    after = model(ids).logits, model(ids, attention_mask=mask).logits
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old[:, 5:], new[:, 5:])
