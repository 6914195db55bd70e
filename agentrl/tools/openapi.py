"""Tools from an OpenAPI document: each operation is one."""

import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from agentrl.errors import PluginError, ToolError
from agentrl.tools.foreign import Call, ForeignTool, schema_of

_METHODS = ("get", "put", "post", "delete", "patch")
_MAX_DEPTH = 20
"""Of references within references: a schema that holds itself is shown as an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    name: str
    method: str
    path: str
    description: str
    parameters: Mapping[str, Any]
    places: Mapping[str, str]
    """Where each argument goes: path, query, header or body."""


class OpenApiServer:
    """The operations of an OpenAPI 3 document (JSON or YAML) as tools, called over HTTP.

    Parameters and the properties of a JSON body become one flat object. `url` is where the service
    answers (default: the document's first server), `headers` go with every call, `only` names the
    operations to take. All episodes share the service; each has its own cookies.
    """

    def __init__(
        self,
        document: Path | str,
        *,
        url: str = "",
        headers: Mapping[str, str] | None = None,
        only: Sequence[str] = (),
        timeout_s: float = 30.0,
    ) -> None:
        self._path, self._url, self._headers = Path(document), url, dict(headers or {})
        self._only, self._timeout_s = tuple(only), timeout_s

    def tools(self) -> Sequence[ForeignTool]:
        """The document's operations. Raises PluginError if it can't be read."""
        return tuple(
            ForeignTool(
                name=operation.name,
                schema=schema_of(operation.name, operation.description, operation.parameters),
                remote_name=operation.name,
                server=self,
                timeout_s=self._timeout_s,
            )
            for operation in self._operations.values()
        )

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[Call]:
        """A client of the service."""
        try:
            import httpx
        except ImportError:
            raise PluginError("OpenAPI tools need httpx: pip install 'agentrl[openapi]'") from None
        client = httpx.AsyncClient(base_url=self._base, headers=self._headers, timeout=None)
        async with client:

            async def call(name: str, arguments: Mapping[str, Any]) -> str:
                answer = await client.request(**_request(self._operations[name], arguments))
                if answer.is_error:
                    raise ToolError(f"{answer.status_code} {answer.reason_phrase}: {answer.text}")
                return answer.text

            yield call

    @cached_property
    def _document(self) -> Mapping[str, Any]:
        try:
            found = yaml.safe_load(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise PluginError(f"{self._path}: {' '.join(str(error).split())}") from None
        if not isinstance(found, dict) or not isinstance(found.get("paths"), dict):
            raise PluginError(f"{self._path} is no OpenAPI document: it has no paths")
        return found

    @cached_property
    def _base(self) -> str:
        servers = self._document.get("servers") or [{}]
        base = self._url or str(servers[0].get("url", ""))
        if not base.startswith(("http://", "https://")):
            raise PluginError(f"{self._path} names no server: give OpenApiServer a url")
        return base

    @cached_property
    def _operations(self) -> Mapping[str, _Operation]:
        found = {o.name: o for o in _read(self._document) if o.name in (self._only or (o.name,))}
        missing = sorted(set(self._only) - set(found))
        if missing or not found:
            wanted = missing[0] if missing else "at all"
            raise PluginError(f"{self._path} has no operation {wanted}")
        return found


def _read(document: Mapping[str, Any]) -> Iterator[_Operation]:
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                yield _operation(document, path, method, item)


def _operation(
    document: Mapping[str, Any], path: str, method: str, item: Mapping[str, Any]
) -> _Operation:
    operation = item[method]
    properties: dict[str, Any] = {}
    required: list[str] = []
    places: dict[str, str] = {}
    for given in [*item.get("parameters", []), *operation.get("parameters", [])]:
        parameter = _whole(document, given)
        name, schema = parameter["name"], parameter.get("schema", {"type": "string"})
        described = {"description": parameter["description"]} if "description" in parameter else {}
        properties[name], places[name] = {**schema, **described}, parameter["in"]
        if parameter.get("required") and name not in required:
            required.append(name)
    body = _whole(document, operation.get("requestBody", {}))
    shape = body.get("content", {}).get("application/json", {}).get("schema", {})
    for name, schema in shape.get("properties", {}).items():
        properties[name], places[name] = schema, "body"
    required += [name for name in shape.get("required", []) if name not in required]
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", operation.get("operationId") or f"{method}{path}")
    said = (operation.get("summary"), operation.get("description"))
    return _Operation(
        name=plain.strip("_")[:64],
        method=method.upper(),
        path=path,
        description="\n".join(text for text in said if text),
        parameters={"type": "object", "properties": properties, "required": required},
        places=places,
    )


def _whole(document: Mapping[str, Any], value: Any, depth: int = 0) -> Any:
    """The value with its references (within the document) put in their places."""
    if isinstance(value, list):
        return [_whole(document, part, depth) for part in value]
    if not isinstance(value, dict):
        return value
    reference = value.get("$ref")
    if not isinstance(reference, str):
        return {name: _whole(document, part, depth) for name, part in value.items()}
    if depth >= _MAX_DEPTH:
        return {"type": "object"}
    target: Any = document
    for step in reference.removeprefix("#/").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if not reference.startswith("#/") or not isinstance(target, dict) or step not in target:
            raise PluginError(f"the OpenAPI document has no {reference}")
        target = target[step]
    return _whole(document, target, depth + 1)


def _request(operation: _Operation, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The HTTP request of a call. Raises ToolError for a path without its arguments."""
    placed: dict[str, dict[str, Any]] = {"path": {}, "query": {}, "header": {}, "body": {}}
    for name, value in arguments.items():
        placed.setdefault(operation.places[name], {})[name] = value
    path = operation.path
    for name in re.findall(r"\{([^}]*)\}", operation.path):
        if name not in placed["path"]:
            raise ToolError(f"{operation.name}: {name} is missing")
        # Wholly quoted: an argument stays one step of the path.
        step = quote(_plain(placed["path"][name]), safe="").replace(".", "%2E")
        path = path.replace(f"{{{name}}}", step)
    request: dict[str, Any] = {"method": operation.method, "url": path.lstrip("/")}
    if placed["query"]:
        request["params"] = placed["query"]
    if placed["header"]:
        request["headers"] = {name: _plain(value) for name, value in placed["header"].items()}
    if placed["body"]:
        request["json"] = placed["body"]
    return request


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if "\n" in text or "\r" in text or "\0" in text:
        raise ToolError("a path or a header is one line")
    return text
