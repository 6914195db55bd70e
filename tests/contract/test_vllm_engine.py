"""The vLLM engine holds the engine contract, by real vLLM on a CPU."""

import asyncio
import copy
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    Altered,
    PlainLearner,
    gap,
    scored_by_the_version_of_each_token,
    with_fixed_logits,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentrl.engines.vllm.engine import VllmEngine
from agentrl.engines.weights import InProcessWeightSync
from agentrl.errors import ConfigError, WeightsNotApplied
from agentrl.testing.engine import ENGINE_CHECKS, PUBLISH_CHECKS, EngineCheck, EngineKit
from agentrl.types import Sampling

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]

# Environments may have imported it before the engine starts (bm25s does): vLLM must bear it.
pytest.importorskip("numba")

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}


def llama(seed: int = 0, *, tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).eval()


class BrokenEngine(VllmEngine):
    """Real vLLM with a model whose forward pass raises."""

    def _build(self) -> Any:
        def fail(*_: object) -> None:
            raise RuntimeError("out of memory, say")

        stepper = super()._build()
        stepper.llm.apply_model(lambda model: model.register_forward_pre_hook(fail) and None)
        return stepper


@asynccontextmanager
async def start(
    model: PreTrainedModel,
    *,
    max_concurrent: int = 8,
    context_tokens: int = 256,
    kind: type[VllmEngine] = VllmEngine,
) -> AsyncGenerator[VllmEngine]:
    async with kind(
        copy.deepcopy(model), max_concurrent=max_concurrent, context_tokens=context_tokens
    ) as engine:
        yield engine


def kit() -> EngineKit:
    before, after = llama(), llama(1)
    return EngineKit(
        open=lambda **sizes: start(before, **sizes),
        open_fixed=lambda logits: start(with_fixed_logits(llama(tied=False), logits)),
        open_broken=lambda: start(before, kind=BrokenEngine),
        sync=InProcessWeightSync,
        before=PlainLearner(before, 3),
        after=PlainLearner(after, 4),
        vocab_size=VOCAB,
    )


@pytest.mark.parametrize("check", [*ENGINE_CHECKS, *PUBLISH_CHECKS], ids=lambda c: c.__name__)
async def test_contract(check: EngineCheck) -> None:
    await check(kit())


class UnrepairedEngine(VllmEngine):
    """Real vLLM that takes weights as vLLM alone does."""

    weight_transfer = "unrepaired"

    def _build(self) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from agentrl.engines.vllm.weights import ReceivedWeights

        class Unrepaired(ReceivedWeights):
            def repair(self) -> None:
                """What is shown to be needed is left out."""

        WeightTransferEngineFactory.register_engine("unrepaired", Unrepaired)
        return super()._build()


async def test_a_tied_head_that_keeps_its_old_weights_is_found_out() -> None:
    """Every call of the publish succeeds and the fingerprint is right; only the probe sees it."""
    tools = kit()
    async with start(llama(), kind=UnrepairedEngine) as engine:
        with pytest.raises(WeightsNotApplied, match="nats") as caught:
            await tools.sync(engine).publish(tools.after)
    assert "\n" not in str(caught.value)


async def test_a_published_engine_equals_a_fresh_one() -> None:
    """Same ids and logprobs as vLLM started on the new weights, within 1e-3 of a plain forward."""
    for tied in (True, False):
        before, after = llama(tied=tied), llama(1, tied=tied)
        learner = PlainLearner(after, 7)
        prompts = [[(5 * i + n) % VOCAB for i in range(20 + n)] for n in range(6)]

        async def actions(engine: VllmEngine, prompts: Sequence[Sequence[int]] = prompts) -> Any:
            sampling = Sampling(max_tokens=40, stop_ids=frozenset(), temperature=0.8)
            return await asyncio.gather(
                *(engine.sample(p, sampling, session=str(n)) for n, p in enumerate(prompts))
            )

        async with start(before) as engine, start(after) as fresh:
            await InProcessWeightSync(engine).publish(learner)
            published, expected = await actions(engine), await actions(fresh)
        for prompt, ours, theirs in zip(prompts, published, expected, strict=True):
            assert ours.token_ids == theirs.token_ids and set(ours.versions) == {7}
            assert (
                max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) < 1e-4
            )
            assert gap(learner, prompt, ours, 0.8) < 1e-3


async def test_an_action_across_a_publish_is_scored_by_the_weights_of_each_token() -> None:
    """Running rows are prefilled again: no key or value of the old weights is read."""
    tools = kit()
    prompt, sampling = (5, 6, 7), Sampling(max_tokens=900, stop_ids=frozenset())
    async with start(llama(), context_tokens=1024) as engine:
        await tools.sync(engine).publish(tools.before)
        running = asyncio.ensure_future(engine.sample(prompt, sampling, session="e"))
        for number in range(20):  # as many decode steps have passed
            await engine.score([1, 2 + number], 1.0)
        await tools.sync(engine).publish(tools.after)
        action = await running
    scored_by_the_version_of_each_token(tools, prompt, action, 1e-3)


async def test_a_publish_that_does_not_arrive_stops_the_run() -> None:
    """Unknown, missing, misshapen and wrong weights; afterwards a right publish still works."""
    tools, model = kit(), llama(2)
    own = [(n, p.detach()) for n, p in model.named_parameters()]
    name, first = own[0]
    wrongs = {
        "no such weight": [*own, ("adapter.weight", torch.ones(2))],
        "never came": own[:-1],
        "shape": [(name, first[:-1]), *own[1:]],
        "tied": [*own, ("lm_head.weight", first + 1)],
        "nats": [(name, first.roll(1, 0)), *own[1:]],
    }
    async with start(llama()) as engine:
        for what, weights in wrongs.items():
            with pytest.raises(WeightsNotApplied, match=what) as caught:
                await tools.sync(engine).publish(Altered(model, weights))
            assert "\n" not in str(caught.value)
        await tools.sync(engine).publish(Altered(model, [*own, ("lm_head.weight", first)]))
        before = engine.fingerprint
        await tools.sync(engine).publish(PlainLearner(model, 10))
        assert (engine.version, engine.fingerprint) == (10, before), (
            "the same weights, a new version"
        )
        await tools.sync(engine).publish(tools.after)
        assert engine.fingerprint != before


async def test_the_probe_needs_numbers_and_a_request_too() -> None:
    """Weights with a NaN: the publish stops the run; a mended publish serves again."""
    tools, poisoned = kit(), llama(3)
    with torch.no_grad():
        poisoned.get_input_embeddings().weight[3] = torch.nan
    async with start(llama()) as engine:
        with pytest.raises(WeightsNotApplied):
            await tools.sync(engine).publish(PlainLearner(poisoned, 5))
        await tools.sync(engine).publish(tools.after)
        action = await engine.sample(
            (1, 2), Sampling(max_tokens=4, stop_ids=frozenset()), session="e"
        )
    assert set(action.versions) == {4}


async def test_a_turn_prefills_only_what_was_added() -> None:
    """vLLM counts the tokens it took from its cache: all whole blocks of the earlier turn."""
    history = [(5 * i) % VOCAB for i in range(150)]
    sampling = Sampling(max_tokens=40, stop_ids=frozenset())
    async with start(llama()) as engine:
        seen: list[int] = []
        engine._stepper.llm.apply_model(
            lambda model: (
                model.model.register_forward_pre_hook(
                    lambda _module, args, kwargs: seen.append(
                        (args or [*kwargs.values()])[0].numel()
                    ),
                    with_kwargs=True,
                )
                and None
            )
        )
        action = await engine.sample(history, sampling, session="e")
        seen.clear()
        await engine.sample([*history, *action.token_ids, 1, 2, 3], sampling, session="e")
        again = sum(seen) - 39  # one token in each step after the first
        seen.clear()
        await engine.sample([*history[:-1], 4], sampling, session="f")
        shared = sum(seen) - 39
    assert again < 33 + 3, "the prefix of the session was not found"
    assert shared < 33, "another session's prefix was not found"


async def test_more_prompt_tokens_than_one_step_takes() -> None:
    """Forty prompts at once, three times what a step prefills: none is cut in chunks."""
    learner = PlainLearner(llama(), 0)
    prompts = [[(11 * n + i) % VOCAB for i in range(150 + n)] for n in range(40)]
    sampling = Sampling(max_tokens=3, stop_ids=frozenset())
    async with start(llama(), max_concurrent=40) as engine:
        actions = await asyncio.gather(
            *(engine.sample(p, sampling, session=str(n)) for n, p in enumerate(prompts))
        )
    for prompt, action in zip(prompts, actions, strict=True):
        assert gap(learner, prompt, action) < 1e-4


async def test_starting_vllm_leaves_the_random_states_and_threads_alone() -> None:
    """vLLM seeds all of them with 0 and sets torch to one thread: the learner's are ours."""
    model, threads = llama(), torch.get_num_threads()
    random.seed(11), np.random.seed(11), torch.manual_seed(11)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    async with VllmEngine(model, max_concurrent=2, context_tokens=64):
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])
        assert torch.get_num_threads() == threads


async def test_what_vllm_would_change_is_refused() -> None:
    async with start(llama()) as engine:
        cold = Sampling(max_tokens=4, stop_ids=frozenset(), temperature=0.005)
        with pytest.raises(ValueError, match="another policy"):
            await engine.sample((1, 2), cold, session="e")
        with pytest.raises(ValueError, match="temperature 1"):
            await engine.score((1, 2), 0.5)
    with pytest.raises(ConfigError, match="positions"):
        VllmEngine(llama(), context_tokens=4096)


async def test_bfloat16_serves_float32_masters() -> None:
    master = llama(4)
    rounded = copy.deepcopy(master).to(torch.bfloat16).float()
    async with start(copy.deepcopy(master).to(torch.bfloat16)) as engine:
        learner = Altered(rounded, ((n, p.detach()) for n, p in master.named_parameters()))
        await InProcessWeightSync(engine).publish(learner)
        action = await engine.sample(
            (1, 2, 3), Sampling(max_tokens=8, stop_ids=frozenset()), session="e"
        )
    assert action.logprobs is not None and len(action.logprobs) == 8
