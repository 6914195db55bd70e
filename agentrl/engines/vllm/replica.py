"""One vLLM server: its routes, and what can go wrong on the way."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from agentrl.engines.vllm.reply import ReplicaFailed, ReplicaLost, Span, action_of, scores_of
from agentrl.errors import EngineFault
from agentrl.types import ActionTokens

M = TypeVar("M", bound=BaseModel)

_HEALTH_S = 5.0


class _Span(BaseModel):
    version: str
    start: int
    end: int


class _Scored(BaseModel):
    token_id: int
    logprob: float


class _Logprobs(BaseModel):
    content: list[_Scored]


class _Choice(BaseModel):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Logprob(BaseModel):
    logprob: float


class _Generated(BaseModel):
    choices: list[_Choice]
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


class _Model(BaseModel):
    max_model_len: int


class _Models(BaseModel):
    data: list[_Model]


class _Results(BaseModel):
    results: list[tuple[str, str | None]]


class Replica:
    """A vLLM server that was started with `SERVER_FLAGS`, and whether it can be asked."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.url = url.rstrip("/")
        self.lost = ""
        """Why nothing is sent to it; empty while it serves."""
        self.drained = False
        self.refuses = False
        """It is well, but did not take the published weights: only a new start may mend that."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._in_flight = 0
        self._client = client

    @property
    def serves(self) -> bool:
        """Whether requests may be sent to it."""
        return not self.lost and not self.drained

    async def sample(
        self, prompt: Sequence[int], fields: Mapping[str, Any], known: Collection[int] | None
    ) -> ActionTokens:
        """One action; `known` has the weight versions that it may have sampled with (None: any).

        Raises ReplicaLost without a reply or with one by other weights, EngineFault for a reply
        that does not add up.
        """
        choice = (await self._generate(prompt, fields, known)).choices[0]
        spans = choice.weight_versions or []
        if known is None:
            spans = [_Span(version="0", start=s.start, end=s.end) for s in spans]
        scored = choice.logprobs.content if choice.logprobs else []
        return action_of(
            choice.token_ids,
            [(entry.token_id, entry.logprob) for entry in scored],
            [Span(s.version, s.start, s.end) for s in spans],
            choice.finish_reason,
        )

    async def score(
        self, ids: Sequence[int], fields: Mapping[str, Any], version: int
    ) -> list[float]:
        """The logprobs (nats) of ids after the first, by `version`. Raises what `sample` raises."""
        entries = (await self._generate(ids, fields, [version])).prompt_logprobs or []
        return scores_of(ids, [{t: s.logprob for t, s in (e or {}).items()} for e in entries])

    async def context_tokens(self) -> int:
        """The longest sequence that it serves."""
        return (await self._call("GET", "/v1/models", _Models)).data[0].max_model_len

    async def is_healthy(self) -> bool:
        """Whether it answers, and its engine lives."""
        try:
            return (await self._client.get(f"{self.url}/health", timeout=_HEALTH_S)).is_success
        except httpx.HTTPError:
            return False

    async def load(self, path: Path, version: int) -> str:
        """Have it read weights from a file and serve them as `version`; their fingerprint there.

        Requests in flight wait meanwhile and go on under the new weights, prefilled again.
        Raises ReplicaLost, EngineFault.
        """
        await self._post("/pause?mode=keep")
        try:
            await self._post("/start_weight_update")
            await self._post("/update_weights", {"update_info": {"path": str(path)}})
            await self._post("/finish_weight_update", {"weight_version": str(version)})
            await self._post("/reset_prefix_cache?reset_running_requests=true")
        finally:
            await self._post("/resume")
        body = {"method": "agentrl_fingerprints"}
        found = await self._call("POST", "/collective_rpc", _Results, body)
        return "|".join(sorted({received for received, _ in found.results}))

    async def _generate(
        self, ids: Sequence[int], fields: Mapping[str, Any], known: Collection[int] | None
    ) -> _Generated:
        body = {"token_ids": list(ids), "sampling_params": dict(fields)}
        self._in_flight += 1
        self.idle.clear()
        try:
            reply = await self._call("POST", "/inference/v1/generate", _Generated, body)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self.idle.set()
        if len(reply.choices) != 1:
            raise EngineFault(f"{self.url} sent {len(reply.choices)} answers to one request")
        spans = reply.choices[0].weight_versions or []
        strange = {s.version for s in spans} - set(map(str, known or ()))
        if known is not None and strange:
            raise ReplicaLost(f"it samples with version {min(strange)}: it was started anew")
        return reply

    async def _call(
        self, method: str, route: str, model: type[M], body: Mapping[str, Any] | None = None
    ) -> M:
        response = await self._send(method, route, body)
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise EngineFault(
                f"{self.url}{route} sent {where or 'no JSON'}: {first['msg']}"
            ) from None

    async def _post(self, route: str, body: Mapping[str, Any] | None = None) -> None:
        await self._send("POST", route, body)

    async def _send(
        self, method: str, route: str, body: Mapping[str, Any] | None
    ) -> httpx.Response:
        try:
            response = await self._client.request(method, f"{self.url}{route}", json=body)
        except httpx.HTTPError as error:
            raise ReplicaLost(f"{type(error).__name__} at {route}") from None
        if response.status_code >= 500:
            said = " ".join(response.text.split())[:300]
            raise ReplicaFailed(f"status {response.status_code} at {route}: {said}")
        if not response.is_success:
            said = " ".join(response.text.split())[:300]
            raise EngineFault(f"{self.url}{route} refused ({response.status_code}): {said}")
        return response
