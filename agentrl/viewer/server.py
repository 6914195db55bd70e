"""Serves a run to the page, on this machine only.

What a model wrote is sent as JSON and shown as text. The page may load nothing from elsewhere, and
another page can ask for nothing: its host is not ours, and a replay needs a header that only our
page sends.
"""

import re
import socket
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.errors import AgentRLError, ConfigError, RecordError
from agentrl.metrics import as_line
from agentrl.viewer.details import Details
from agentrl.viewer.rows import Wanted, wanted_of

PAGE = files("agentrl.viewer").joinpath("page")
PAGE_SIZE = 50
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


def application(details: Details) -> Starlette:
    """The web application around a run."""

    def groups(request: Request) -> Any:
        asked = {name: value for name, value in request.query_params.items() if value}
        begin = asked.pop("begin", "0")
        if not re.fullmatch("[0-9]{1,9}", begin):
            raise ConfigError(f"begin: {begin[:40]} is no number of groups to pass over")
        wanted = wanted_of(asked)
        rows, more = details.rows.page(wanted, begin=int(begin), size=PAGE_SIZE)
        return {"rows": rows, "more": more}

    def rung(request: Request) -> Any:
        if request.headers.get("x-agentrl") != "replay":
            raise ConfigError("a replay is asked for by the page itself")
        from agentrl.viewer.replays import replay  # loads torch, which looking does not need

        return replay(details, request.path_params["depth"], details.episode(*_place(request, 3)))

    return Starlette(
        routes=[
            Route("/", _file("index.html")),
            Route("/{name}", _file()),
            Route("/api/run", _json(lambda _: details.overview())),
            Route("/api/groups", _json(groups)),
            Route("/api/group/{place:path}", _json(lambda r: details.group(*_place(r, 2)))),
            Route(
                "/api/trajectory/{place:path}", _json(lambda r: details.trajectory(*_place(r, 3)))
            ),
            Route(
                "/api/difference/{place:path}", _json(lambda r: details.difference(*_place(r, 4)))
            ),
            Route("/api/replay/{depth}/{place:path}", _json(rung), methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
    )


def serve(details: Details, *, port: int, ready: Callable[[str], None]) -> None:
    """Serve until somebody ends it; `ready` is told the address. Port 0 is any free one.

    Raises ConfigError when the port is taken.
    """
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("127.0.0.1", port))
            door.listen()
        except OSError as error:
            raise ConfigError(
                f"port {port} can't be used ({error.strerror}): choose another --port"
            ) from None
        details.rows.page(Wanted(), begin=0, size=PAGE_SIZE)  # so that the first page is there
        ready(f"http://127.0.0.1:{door.getsockname()[1]}/")
        config = uvicorn.Config(application(details), log_level="warning", lifespan="off")
        uvicorn.Server(config).run(sockets=[door])


def _place(request: Request, size: int) -> list[int]:
    """Step, group, and members. Raises RecordError for what no run can hold."""
    numbers = request.path_params["place"].split("/")
    if len(numbers) != size or not all(re.fullmatch("[0-9]{1,9}", n) for n in numbers):
        raise RecordError("there is nothing at that address")
    return [int(number) for number in numbers]


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint whose mistakes are one line of JSON, too."""

    def endpoint(request: Request) -> Response:
        try:
            return _response(as_line(answer(request)), "application/json")
        except (AgentRLError, ValueError, TypeError, KeyError) as error:
            said = as_line({"error": " ".join(str(error).split())})
            return _response(said, "application/json", status=400)

    return endpoint


def _file(name: str | None = None) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        wanted = name or request.path_params["name"]
        if wanted not in {part.name for part in PAGE.iterdir()}:
            return _response("not here", "text/plain", status=404)
        kind = _TYPES[wanted.rpartition(".")[2]]
        return _response(PAGE.joinpath(wanted).read_text(encoding="utf-8"), kind)

    return endpoint


def _response(text: str, kind: str, *, status: int = 200) -> Response:
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    # Half a surrogate pair, which JSON may carry, is no UTF-8.
    data = text.encode(errors="replace")
    return Response(data, status, headers, media_type=f"{kind}; charset=utf-8")
