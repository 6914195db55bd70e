"""Sampling by vLLM servers on GPUs or hosts of their own: several replicas of one policy.

An episode stays with the replica that holds its prefix. A replica that fails is left out, its
requests go to others with the same seeds, and it comes back once it is healthy, has been given
the published weights, and scores the last probe as the others did.
"""

import asyncio
import hashlib
import importlib.util
import shlex
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engines.vllm.reply import ReplicaFailed, ReplicaLost
from agentrl.engines.vllm.settings import (
    SCORING,
    check_scoring_temperature,
    check_temperature,
    checked_ids,
    roomy_folder,
    sampling_fields,
)
from agentrl.engines.weights import TOLERANCE, Delivery, WeightNames
from agentrl.errors import ConfigError, EngineFault, WeightsNotApplied
from agentrl.types import ActionTokens, Sampling

if TYPE_CHECKING:
    from agentrl.engines.vllm.replica import Replica

T = TypeVar("T")

LOOK_EVERY_S = 1.0
SERVER_FLAGS = (
    "--logprobs-mode processed_logprobs --generation-config vllm --skip-tokenizer-init "
    "--no-async-scheduling --enable-scale-out --worker-extension-cls "
    "agentrl.engines.vllm.weights.WorkerExtension --weight-transfer-config "
    + shlex.quote('{"backend":"agentrl"}')
)
"""What `VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server` must be given."""

CPU_FLAGS = "--enforce-eager --block-size 32 --no-enable-chunked-prefill"
"""And on a CPU besides; --max-num-batched-tokens must then be at least the context."""


class VllmServersEngine:
    """An `InferenceEngine` in front of running vLLM servers that hold the same policy.

    `servers` are their addresses, started with `SERVER_FLAGS`; `folder` is where weights are put
    for them to read ("": a temporary one, so they are on this host). One try of a request takes
    at most `request_timeout_s`, and all its tries together `patience_s`.

    Use as `async with engine:`. Raises ConfigError when a server can't serve this.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_concurrent: int = 64,
        context_tokens: int = 2048,
        servers: Sequence[str] = (),
        folder: str = "",
        request_timeout_s: float = 600.0,
        patience_s: float = 900.0,
    ) -> None:
        if importlib.util.find_spec("httpx") is None:
            raise ConfigError("engine.name: vllm-servers needs httpx: install agentrl[vllm-client]")
        if not servers:
            raise ConfigError("engine.options.servers: name at least one address of a vLLM server")
        self.version = 0
        self.fingerprint = ""
        self.context_tokens = context_tokens
        self.dtype = model.dtype
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._names = WeightNames.of(model)
        self._model: PreTrainedModel | None = model
        self._addresses = servers
        self._folder = folder
        self._timeout_s, self._patience_s = request_timeout_s, patience_s
        self._gate = asyncio.Semaphore(max_concurrent)
        self._stack = AsyncExitStack()
        self._replicas: list[Replica] = []
        self._published: list[int] = []
        self._file: Path | None = None
        self._probe: tuple[list[int], list[float]] | None = None
        self._changed = asyncio.Condition()
        self._publishing = asyncio.Lock()
        self._closed = True

    async def __aenter__(self) -> Self:
        import httpx

        from agentrl.engines.vllm.replica import Replica

        async with AsyncExitStack() as stack:
            limits = httpx.Limits(max_connections=None)
            client = httpx.AsyncClient(timeout=self._timeout_s, limits=limits)
            await stack.enter_async_context(client)
            self._replicas = [Replica(url, client) for url in self._addresses]
            for replica in self._replicas:
                await self._check(replica)
            model, self._model = self._model, None
            assert model is not None, "an engine is opened once"
            place = self._folder or roomy_folder(model)
            self._scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
            self._closed = False
            await stack.enter_async_context(self._watched())
            await self.load(model.named_parameters(), version=0)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        async with self._changed:
            self._changed.notify_all()
        await self._stack.aclose()

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> ActionTokens:
        """Sample one action after `prompt_ids` on the session's replica, or on another.

        Raises ValueError for a prompt or temperature that can't be served; EngineFault for a
        reply that does not add up, or when no replica answered in `patience_s`.
        """
        check_temperature(sampling)
        prompt = self._checked(prompt_ids, f"session {session}: the prompt")
        fields = sampling_fields(
            sampling, min(sampling.max_tokens, self.context_tokens - len(prompt))
        )
        async with self._gate:
            return await self._persist(session, lambda r: r.sample(prompt, fields, self._published))

    @asynccontextmanager
    async def released(self) -> AsyncGenerator[None]:
        """Nothing: the accelerators of servers are their own, and sampling goes on."""
        yield

    async def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> str:
        """Publish to all replicas that serve, by a file; the fingerprint of what was given.

        A replica that is lost is left out until it has these weights; where none serves, the first
        to come back is waited for. Raises WeightsNotApplied if names or shapes are not the model's,
        at once if a healthy replica did not take it, or if none came back in `patience_s`.
        """
        async with self._publishing:
            path = self._scratch / f"weights-{version}-{len(self._published)}.safetensors"
            given = await asyncio.to_thread(self._write, weights, path)
            before, self._file = self._file, path
            self._published.append(version)
            self.version, self.fingerprint, self._probe = version, given, None
            serving = [r for r in self._replicas if r.serves]
            took = await asyncio.gather(*map(self._give, serving), return_exceptions=True)
            if before is not None:
                before.unlink()
        for replica, error in zip(serving, took, strict=True):
            self._leave_out(replica, error)
        await self._until_served()
        return given

    async def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Entry t-1 is the logprob (nats) of token t given the ids before it, on every replica.

        A replica that is lost meanwhile is left out. Raises ValueError as the vLLM engine does,
        WeightsNotApplied if the replicas disagree.
        """
        check_scoring_temperature(temperature)
        ids = self._checked(token_ids, "a sequence to score")
        first = await self._persist("probe", lambda r: r.score(ids, SCORING, self.version))
        self._probe = ids, first
        serving = [r for r in self._replicas if r.serves]
        agree = await asyncio.gather(*map(self._compare, serving), return_exceptions=True)
        for replica, error in zip(serving, agree, strict=True):
            self._leave_out(replica, error)
        return first

    async def drain(self, url: str) -> None:
        """Send nothing more to a replica, and wait until it has answered what it has."""
        (replica,) = (r for r in self._replicas if r.url == url.rstrip("/"))
        replica.drained = True
        await replica.idle.wait()

    def restore(self, url: str) -> None:
        """Bring a drained replica back, as soon as it is healthy and has the newest weights."""
        (replica,) = (r for r in self._replicas if r.url == url.rstrip("/"))
        replica.lost, replica.drained = "it was drained", False

    async def _until_served(self) -> None:
        """Wait for a replica with the newest weights; `_watch` takes back what is healthy."""
        replicas = self._replicas
        try:
            async with asyncio.timeout(self._patience_s), self._changed:
                await self._changed.wait_for(
                    lambda: any(r.serves for r in replicas) or all(r.refuses for r in replicas)
                )
            if any(r.serves for r in replicas):
                return
            waited = ""
        except TimeoutError:
            waited = f" in {self._patience_s:g} s"
        reasons = "; ".join(f"{r.url}: {r.lost or 'drained'}" for r in replicas)
        raise WeightsNotApplied(
            f"version {self.version}: no vLLM server took it{waited} ({reasons})"
        )

    def _checked(self, token_ids: Sequence[int], what: str) -> list[int]:
        return checked_ids(token_ids, what, context=self.context_tokens, vocab=self.vocab_size)

    async def _check(self, replica: "Replica") -> None:
        try:
            longest = await replica.context_tokens()
            await self._check_sampling(replica)
        except (ReplicaLost, EngineFault) as error:
            raise ConfigError(
                f"engine.options.servers: {replica.url} can't be used ({error}): start it with "
                f"VLLM_SERVER_DEV_MODE=1 and {SERVER_FLAGS}"
            ) from None
        if longest < self.context_tokens:
            raise ConfigError(
                f"engine.context_tokens ({self.context_tokens}) is more than the {longest} that "
                f"{replica.url} serves: lower it, or start the server with --max-model-len"
            )

    async def _check_sampling(self, replica: "Replica") -> None:
        """Raise EngineFault if the logprobs that a server sends are not after the temperature.

        With the top token alone in the support its processed logprob is 0, its raw one is not.
        """
        one = Sampling(max_tokens=1, stop_ids=frozenset(), top_k=1, temperature=2.0)
        action = await replica.sample([0], sampling_fields(one, 1), None)
        if action.logprobs is None or abs(action.logprobs[0]) > 1e-3:
            raise EngineFault("its logprobs are those before temperature and top_k")

    async def _persist(self, session: str, ask: "Callable[[Replica], Awaitable[T]]") -> T:
        """The first answer of the session's replica, or of the next when it is lost."""
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    replica = await self._replica_of(session)
                    try:
                        return await ask(replica)
                    except ReplicaLost as error:
                        replica.lost = str(error)
        except TimeoutError:
            reasons = "; ".join(f"{r.url}: {r.lost or 'slow'}" for r in self._replicas)
            raise EngineFault(
                f"no vLLM server answered session {session} in {self._patience_s:g} s ({reasons})"
            ) from None

    async def _replica_of(self, session: str) -> "Replica":
        """The same replica for a session as long as it serves; others keep their sessions."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._closed or any(r.serves for r in self._replicas)
            )
        if self._closed:
            raise EngineFault("the engine is closed or was not opened: use `async with engine:`")
        return max((r for r in self._replicas if r.serves), key=lambda r: _weight(session, r.url))

    @asynccontextmanager
    async def _watched(self) -> AsyncGenerator[None]:
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for replica in self._replicas:
                if not await replica.is_healthy():
                    replica.lost = replica.lost or "its health check failed"
                    replica.refuses = False
                elif replica.lost and not replica.drained and not replica.refuses:
                    await self._take_back(replica)

    async def _take_back(self, replica: "Replica") -> None:
        async with self._publishing:
            if self._file is None:
                return  # the first weights are still being written
            try:
                await self._give(replica)
                await self._compare(replica)
                replica.lost = ""
            except WeightsNotApplied as error:
                replica.lost, replica.refuses = str(error), True
            except ReplicaLost as error:
                replica.lost = str(error)
        async with self._changed:
            self._changed.notify_all()

    async def _give(self, replica: "Replica") -> None:
        """Bring the newest weights to a replica.

        Raises ReplicaLost, and WeightsNotApplied if it is well and still did not take them.
        """
        assert self._file is not None
        try:
            received = await replica.load(self._file, self.version)
        except ReplicaFailed as error:
            if not await replica.is_healthy():
                raise
            raise self._not_applied(replica, f"failed to take it: {error}") from None
        except EngineFault as error:
            raise self._not_applied(replica, f"refused it: {error}") from None
        if not received:
            raise ReplicaLost("it was started anew while it was given weights")
        if received != self.fingerprint:
            raise self._not_applied(
                replica, f"received {received} and not the learner's weights {self.fingerprint}"
            )

    async def _compare(self, replica: "Replica") -> None:
        """Raises ReplicaLost, and WeightsNotApplied if it scores the last probe otherwise."""
        if self._probe is None:
            return
        ids, expected = self._probe
        try:
            scores = await replica.score(ids, SCORING, self.version)
        except EngineFault as error:
            raise self._not_applied(replica, f"did not score the probe: {error}") from None
        if (
            not max(abs(a - b) for a, b in zip(scores, expected, strict=True))
            <= (TOLERANCE[self.dtype])
        ):
            raise self._not_applied(
                replica, f"scores {len(ids)} probe tokens otherwise than another server"
            )

    def _not_applied(self, replica: "Replica", what: str) -> WeightsNotApplied:
        return WeightsNotApplied(f"version {self.version}: {replica.url} {what}")

    def _leave_out(self, replica: "Replica", error: BaseException | None) -> None:
        """Note a replica as lost if that is what happened; any other error is raised."""
        if isinstance(error, ReplicaLost):
            replica.lost = str(error)
        elif error is not None:
            raise error

    def _write(self, weights: Iterable[tuple[str, Tensor]], path: Path) -> str:
        delivery = Delivery(self._names)
        tensors = {name: t.contiguous() for name, t in delivery.checked(weights)}
        save_file(tensors, path)
        return delivery.fingerprint()


def _weight(session: str, url: str) -> bytes:
    """Rendezvous hashing: a replica that leaves or comes moves no session of the others."""
    return hashlib.blake2b(f"{session}\n{url}".encode(), digest_size=8).digest()
