"""The policy behind HTTP, as the chat servers that agent programs know."""

import json
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.agents.anthropic import ANTHROPIC
from agentrl.agents.chat import CHAT
from agentrl.agents.responses import RESPONSES
from agentrl.agents.wire import Dialect
from agentrl.errors import ConfigError, ContextFull, Fault, OutOfTurns, RequestError
from agentrl.protocols import ChatPolicy

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

DIALECTS: Sequence[Dialect] = (CHAT, RESPONSES, ANTHROPIC)
MODEL = "policy"


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """Where a policy can be asked, and with which key. `answered` counts its answers."""

    url: str
    key: str
    answered: int = 0

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables from which the SDKs take address and key."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }


@asynccontextmanager
async def serve(policy: ChatPolicy) -> AsyncGenerator[Endpoint]:
    """Serve a policy on a free port of 127.0.0.1, to those who have the key, until the block ends.

    Raises ConfigError when starlette or uvicorn is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise _not_installed() from None
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    endpoint = Endpoint(url=url, key=f"agentrl-{secrets.token_urlsafe(24)}")
    config = uvicorn.Config(
        _application(policy, endpoint),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config.load()
    # Without `serve`, which would take over the process's signals.
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield endpoint
    finally:
        await server.shutdown(sockets=[listener])


def _application(policy: ChatPolicy, endpoint: Endpoint) -> "Starlette":
    try:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ImportError:
        raise _not_installed() from None

    async def models(_: "Request") -> "Response":
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "agentrl"}
        return JSONResponse({"object": "list", "data": [model]})

    routes = [Route(d.path, _handler(d, policy, endpoint), methods=["POST"]) for d in DIALECTS]
    return Starlette(routes=[*routes, Route("/v1/models", models)])


def _handler(
    dialect: Dialect, policy: ChatPolicy, endpoint: Endpoint
) -> Callable[["Request"], Awaitable["Response"]]:
    from starlette.responses import JSONResponse, StreamingResponse

    def refused(status: int, kind: str, message: str) -> "Response":
        return JSONResponse(dialect.refuse(kind, message), status_code=status)

    async def handle(request: "Request") -> "Response":
        if not _has_key(request.headers, endpoint.key):
            return refused(401, "invalid_api_key", "this is not the key of this episode")
        try:
            ask = dialect.read(_json(await request.body()), secrets.token_hex(12))
            answer = await policy.complete(
                ask.messages, ask.tools, max_tokens=ask.max_tokens, stop=ask.stop
            )
        except RequestError as error:
            return refused(400, _kind(error), str(error))
        except Fault as fault:
            # 400: an SDK would try again what can't be mended.
            return refused(400, "fault", str(fault))
        endpoint.answered += 1
        if ask.stream:
            chunks = (event.encoded() for event in dialect.events(ask, answer))
            return StreamingResponse(chunks, media_type="text/event-stream")
        return JSONResponse(dialect.write(ask, answer))

    return handle


def _has_key(headers: Mapping[str, str], key: str) -> bool:
    given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    return secrets.compare_digest(given.encode(), key.encode())


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    if not isinstance(value, dict):
        raise RequestError("the body is not an object")
    return value


def _kind(error: RequestError) -> str:
    if isinstance(error, ContextFull):
        return "context_length_exceeded"
    return "out_of_turns" if isinstance(error, OutOfTurns) else "invalid_request"


def _not_installed() -> ConfigError:
    return ConfigError("agent programs need a server: pip install 'agentrl[agents]'")
