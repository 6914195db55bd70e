"""A server that speaks vLLM's routes and fails on request; its draws are a function of the seed."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from safetensors import safe_open

from agentrl.engines.weights import checksum_of, digest


class StandIn:
    """Answers as vLLM does, except where `faults` says otherwise for the next generate calls."""

    def __init__(self) -> None:
        self.version = "default"
        self.received = ""
        self.sessions: list[list[int]] = []
        self.faults: list[Callable[[dict[str, Any]], Any]] = []
        self.publish_faults: list[Callable[[], Any]] = []
        self.healthy = True
        self.port = 0
        self.delay_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serve; after a `stop` on the same port, with the weights of a fresh start."""
        self.version, self.received = "default", ""
        self._open: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a kill does: connections end without a reply."""
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                size = next(
                    (int(line.split(":")[1]) for line in head.split("\r\n")
                     if line.lower().startswith("content-length")), 0
                )  # fmt: skip
                body = json.loads(await reader.readexactly(size) or b"{}")
                status, answer = await self._answer(head.split()[1].split("?")[0], body)
                raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(raw)}\r\n\r\n".encode())
                writer.write(raw)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        if route == "/v1/models":
            return 200, {"data": [{"max_model_len": 64}]}
        if route == "/health" and not self.healthy:
            return 503, {}
        if route == "/update_weights":
            if self.publish_faults:
                return await self.publish_faults.pop(0)()
            with safe_open(body["update_info"]["path"], framework="pt") as file:
                tensors = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118
            self.received = digest((name, checksum_of(t)) for name, t in tensors)
        if route == "/finish_weight_update":
            self.version = body["weight_version"]
        if route == "/collective_rpc":
            return 200, {"results": [[self.received, None]]}
        if route == "/inference/v1/generate":
            return await self._generate(body)
        return 200, {}

    async def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.sessions.append(body["token_ids"])
        params = body["sampling_params"]
        await asyncio.sleep(self.delay_s)
        count = params["max_tokens"]
        ids = [(params.get("seed", 0) + i) % 90 for i in range(count)]
        logprob = 0.0 if params.get("top_k") == 1 else -1.0
        choice = {
            "token_ids": ids,
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": i, "logprob": logprob} for i in ids]},
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
        }
        reply = {"choices": [choice], "prompt_logprobs": [None]}
        reply["prompt_logprobs"] += [{str(i): {"logprob": -2.0}} for i in body["token_ids"][1:]]
        if self.faults and params.get("top_k") != 1:
            return await self.faults.pop(0)(reply)
        return 200, reply
