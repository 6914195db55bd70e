"""vLLM servers: replicas that fail, come back, or answer wrongly, and one real server killed."""

import asyncio
import copy
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import PlainLearner, gap
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from vllm_stand_in import StandIn

from agentrl.engines.vllm.servers import CPU_FLAGS, SERVER_FLAGS, VllmServersEngine
from agentrl.engines.weights import InProcessWeightSync
from agentrl.errors import ConfigError, EngineFault, WeightsNotApplied
from agentrl.types import ActionTokens, Sampling

pytestmark = pytest.mark.skipif(find_spec("httpx") is None, reason="httpx is not installed")

SAMPLING = Sampling(max_tokens=5, stop_ids=frozenset(), seed=3)


def llama(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
            tie_word_embeddings=True, initializer_range=0.3,
        )
    ).eval()  # fmt: skip


@asynccontextmanager
async def pool(
    count: int, **options: Any
) -> AsyncGenerator[tuple[VllmServersEngine, list[StandIn]]]:
    replicas = [StandIn() for _ in range(count)]
    for replica in replicas:
        await replica.start()
    settings = {"request_timeout_s": 0.5, "patience_s": 8.0} | options
    async with VllmServersEngine(
        llama(), context_tokens=64, servers=[r.url for r in replicas], **settings
    ) as engine:
        for replica in replicas:
            replica.sessions.clear()
        yield engine, replicas
    for replica in replicas:
        await replica.stop()


async def episodes(engine: VllmServersEngine, count: int) -> list[ActionTokens]:
    return list(
        await asyncio.gather(
            *(engine.sample([n, 1], SAMPLING, session=f"e{n}") for n in range(count))
        )
    )


async def test_an_episode_returns_to_its_replica_and_others_stay_where_they_are() -> None:
    async with pool(3) as (engine, replicas):
        for _ in range(3):
            await episodes(engine, 12)
        homes = [{ids[0] for ids in r.sessions} for r in replicas]
        assert sum(map(len, homes)) == 12 and all(homes), homes
        await engine.drain(replicas[0].url)
        for replica in replicas:
            replica.sessions.clear()
        await episodes(engine, 12)
        now = [{ids[0] for ids in r.sessions} for r in replicas]
        assert not now[0] and all(old <= new for old, new in zip(homes[1:], now[1:], strict=True))
        engine.restore(replicas[0].url)
        async with asyncio.timeout(5):
            while not replicas[0].sessions:
                await episodes(engine, 12)
                await asyncio.sleep(0.1)


async def lost(reply: Any) -> Any:
    raise ConnectionError


async def slow(reply: Any) -> Any:
    await asyncio.sleep(1.0)
    return 200, reply


async def failing(reply: Any) -> Any:
    return 500, {"error": "out of memory, say"}


@pytest.mark.parametrize("fault", [lost, slow, failing])
async def test_a_reply_that_does_not_come_is_asked_for_again_and_counted_once(fault: Any) -> None:
    async with pool(2) as (engine, replicas):
        for replica in replicas:
            replica.faults.append(fault)
        actions = await episodes(engine, 8)
        assert [a.token_ids for a in actions] == [(3, 4, 5, 6, 7)] * 8, (
            "the same seed, the same draws"
        )
        again = await episodes(engine, 8)
        assert len(again) == 8


def spoiled(**changes: Any) -> Any:
    async def fault(reply: Any) -> Any:
        reply["choices"][0] |= changes
        return 200, reply

    return fault


async def nothing(reply: Any) -> Any:
    return 200, b"<html>"


async def refused(reply: Any) -> Any:
    return 400, {"error": {"message": "longer than the maximum model length"}}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (spoiled(token_ids=[3, 4, 5]), "3 ids and 5 logprobs"),
        (spoiled(token_ids=[3, 4, 5, 6, 8]), "not theirs"),
        (spoiled(token_ids=[]), "0 ids"),
        (spoiled(logprobs=None), "0 logprobs"),
        (spoiled(weight_versions=None), "versions of 0"),
        (spoiled(finish_reason="error"), "finish error"),
        (nothing, "sent"),
        (refused, "400.*maximum model length"),
    ],
)
async def test_a_reply_that_does_not_add_up_is_a_fault_and_no_sample(fault: Any, said: str) -> None:
    async with pool(1) as (engine, replicas):
        replicas[0].faults.append(fault)
        with pytest.raises(EngineFault, match=said) as caught:
            await engine.sample([1, 2], SAMPLING, session="e")
        assert "\n" not in str(caught.value)
        assert (await engine.sample([1, 2], SAMPLING, session="e")).token_ids == (3, 4, 5, 6, 7)


async def test_a_server_killed_in_mid_step_comes_back_with_the_published_weights() -> None:
    """Its requests go to the other; started anew it has old weights, which are never sampled."""
    async with pool(2) as (engine, replicas):
        await InProcessWeightSync(engine).publish(Scored(llama(1), 4))
        for replica in replicas:
            replica.delay_s = 0.2
        step = asyncio.ensure_future(episodes(engine, 16))
        await asyncio.sleep(0.1)
        await replicas[0].stop()
        actions = await step
        assert len(actions) == 16 and {v for a in actions for v in a.versions} == {4}
        await replicas[0].start()
        replicas[0].sessions.clear()
        async with asyncio.timeout(8):
            while not replicas[0].sessions:
                for action in await episodes(engine, 8):
                    assert set(action.versions) == {4}
        assert replicas[0].version == "4" and replicas[0].received == engine.fingerprint


async def test_a_server_started_anew_unnoticed_is_noticed_by_its_version() -> None:
    async with pool(1) as (engine, replicas):
        await replicas[0].stop()
        await replicas[0].start()
        action = await engine.sample([1, 2], SAMPLING, session="e")
        assert set(action.versions) == {0} and replicas[0].version == "0"


async def test_with_no_server_left_requests_and_publishes_say_so() -> None:
    async with pool(1, patience_s=1.0) as (engine, replicas):
        await replicas[0].stop()
        with pytest.raises(EngineFault, match="no vLLM server answered session e"):
            await engine.sample([1, 2], SAMPLING, session="e")
        with pytest.raises(WeightsNotApplied, match="no vLLM server took it"):
            await engine.load(llama(1).named_parameters(), version=1)


async def test_a_publish_waits_for_a_server_that_is_started_anew() -> None:
    """Killed and restarted twice around a step and a publish: every request is answered once."""
    async with pool(1) as (engine, replicas):
        (replica,) = replicas
        replica.delay_s = 0.3
        step = asyncio.ensure_future(episodes(engine, 8))
        for _ in range(2):
            await asyncio.sleep(0.1)
            await replica.stop()
            await replica.start()
        assert [a.token_ids for a in await step] == [(3, 4, 5, 6, 7)] * 8
        await replica.stop()
        publish = asyncio.ensure_future(InProcessWeightSync(engine).publish(Scored(llama(1), 4)))
        await asyncio.sleep(0.5)
        assert not publish.done()
        await replica.start()
        await publish
        assert replica.version == "4" and replica.received == engine.fingerprint
        assert {v for a in await episodes(engine, 4) for v in a.versions} == {4}


async def test_a_server_lost_at_the_probe_is_left_out_and_comes_back() -> None:
    """Between taking the weights and scoring with them: cut off, or started anew with old ones."""
    for fault in (lost, spoiled(weight_versions=[{"version": "default", "start": 0, "end": 1}])):
        for count in (1, 2):
            async with pool(count) as (engine, replicas):
                replicas[-1].faults.append(fault)
                await InProcessWeightSync(engine).publish(Scored(llama(1), 4))
                assert not replicas[-1].faults
                replicas[-1].sessions.clear()
                async with asyncio.timeout(8):
                    while not replicas[-1].sessions:
                        await episodes(engine, 8)
                        await asyncio.sleep(0.1)


async def cut_off() -> Any:
    raise ConnectionError


async def broken() -> Any:
    return 500, {"error": "weight x of shape y does not fit"}


async def unknown() -> Any:
    return 404, {"error": "no such route"}


async def ignored() -> Any:
    return 200, {}


@pytest.mark.parametrize(
    ("answer", "said"), [(broken, "does not fit"), (unknown, "404"), (ignored, "received")]
)
async def test_a_healthy_server_that_does_not_take_weights_stops_the_run_at_once(
    answer: Any, said: str
) -> None:
    async with pool(2, patience_s=60.0) as (engine, replicas), asyncio.timeout(5):
        replicas[1].publish_faults.append(answer)
        with pytest.raises(WeightsNotApplied, match=said) as caught:
            await InProcessWeightSync(engine).publish(Scored(llama(1), 4))
        assert replicas[1].url in str(caught.value) and "\n" not in str(caught.value)


async def test_a_server_that_scores_the_probe_otherwise_stops_the_run_at_once() -> None:
    async def other(reply: Any) -> Any:
        scored = [
            None if e is None else {i: {"logprob": -3.0} for i in e}
            for e in reply["prompt_logprobs"]
        ]
        return 200, reply | {"prompt_logprobs": scored}

    async with pool(2, patience_s=60.0) as (engine, replicas), asyncio.timeout(5):
        for replica in replicas:
            replica.faults += [other, other]
            with pytest.raises(WeightsNotApplied, match=r"nats|otherwise"):
                await InProcessWeightSync(engine).publish(Scored(llama(1), 4))
            replica.faults.clear()
        await InProcessWeightSync(engine).publish(Scored(llama(1), 4))


async def test_a_server_that_comes_back_and_does_not_take_weights_is_not_waited_for() -> None:
    async with pool(1, patience_s=60.0) as (engine, replicas), asyncio.timeout(8):
        (replica,) = replicas
        replica.publish_faults += [cut_off, ignored]
        with pytest.raises(WeightsNotApplied, match="received"):
            await InProcessWeightSync(engine).publish(Scored(llama(1), 4))
        await replica.stop()  # a new start may mend it
        await asyncio.sleep(1.5)
        await replica.start()
        await InProcessWeightSync(engine).publish(Scored(llama(1), 5))
        assert replica.version == "5"


async def test_a_server_whose_engine_died_at_a_publish_is_waited_for() -> None:
    async with pool(1) as (engine, replicas), asyncio.timeout(8):
        (replica,) = replicas
        replica.publish_faults.append(broken)
        replica.healthy = False
        publish = asyncio.ensure_future(InProcessWeightSync(engine).publish(Scored(llama(1), 4)))
        await asyncio.sleep(0.3)
        assert not publish.done()
        replica.healthy = True
        await publish
        assert replica.version == "4"


async def test_a_server_lost_at_the_first_publish_is_waited_for() -> None:
    replica = StandIn()
    await replica.start()
    replica.publish_faults.append(cut_off)
    async with (
        asyncio.timeout(8),
        VllmServersEngine(llama(), context_tokens=64, servers=[replica.url]) as engine,
    ):
        assert replica.received == engine.fingerprint
    await replica.stop()


async def test_what_a_server_must_be_started_with_is_checked_at_the_start() -> None:
    replica = StandIn()
    await replica.start()
    cases = [
        ({}, "at least one"),
        ({"servers": []}, "at least one"),
        ({"servers": [replica.url]}, "more than the 64"),
    ]
    for options, said in cases:
        with pytest.raises(ConfigError, match=said):
            async with VllmServersEngine(llama(), context_tokens=128, **options):
                pass
    await replica.stop()
    with pytest.raises(ConfigError, match="enable-scale-out"):
        async with VllmServersEngine(llama(), context_tokens=64, servers=[replica.url]):
            pass


class Scored(PlainLearner):
    """Scores every token as the stand-ins do."""

    def logprobs(self, token_ids: Any, temperature: float) -> list[float]:
        return [-2.0] * (len(token_ids) - 1)


class RealServer:
    """vLLM's own server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self._folder = f"http://127.0.0.1:{self.port}", folder

    def start(self) -> None:
        import shlex

        flags = (
            f"--model {self._folder} --host 127.0.0.1 --port {self.port} --dtype float32 "
            "--max-model-len 256 --max-num-batched-tokens 2048 --kv-cache-memory-bytes 16777216 "
            f"--max-num-seqs 8 {SERVER_FLAGS} {CPU_FLAGS}"
        )
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *shlex.split(flags)],
            env=os.environ | settings,
            stdout=(self._folder / "log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


async def until_healthy(server: RealServer) -> None:
    import httpx

    async with httpx.AsyncClient() as client, asyncio.timeout(200):
        while True:
            try:
                if (await client.get(f"{server.url}/health")).is_success:
                    return
            except httpx.HTTPError:
                await asyncio.sleep(0.5)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
async def test_a_real_server_killed_and_restarted_in_mid_step(tmp_path: Path) -> None:
    """Published, sampled, killed, restarted: nothing lost, nothing by old weights."""
    llama().save_pretrained(tmp_path)
    server, learner = RealServer(tmp_path), PlainLearner(llama(1), 4)
    server.start()
    try:
        await until_healthy(server)
        async with VllmServersEngine(
            copy.deepcopy(llama()), context_tokens=256, servers=[server.url], patience_s=240.0
        ) as engine:
            await InProcessWeightSync(engine).publish(learner)
            prompts = [[(7 * n + i) % 97 for i in range(20)] for n in range(64)]
            sampling = Sampling(max_tokens=200, stop_ids=frozenset(), seed=5)
            step = asyncio.gather(
                *(engine.sample(p, sampling, session=str(n)) for n, p in enumerate(prompts))
            )
            await asyncio.sleep(0.3)
            assert not step.done(), "the step must be in its middle"
            server.kill()
            server.start()
            actions = await step
            await InProcessWeightSync(engine).publish(PlainLearner(llama(2), 5))
            after = await engine.sample(prompts[0], sampling, session="0")
    finally:
        server.kill()
    assert set(after.versions) == {5}
    for prompt, action in zip(prompts, actions, strict=True):
        assert len(action.token_ids) == 200 and set(action.versions) == {4}
        assert gap(learner, prompt, action) < 1e-3
