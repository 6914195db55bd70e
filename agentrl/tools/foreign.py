"""Tools that are no methods: they live in a server, and each episode talks to it in its own way."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.errors import EnvironmentFault, ToolError
from agentrl.guard import blaming
from agentrl.tools.text import shortened, whole_characters

Call = Callable[[str, Mapping[str, Any]], Coroutine[Any, Any, Any]]
"""Calls a tool by its name on the server. Raises ToolError for what the model should read."""


class ToolServer(Protocol):
    """Where some tools live."""

    def tools(self) -> Sequence["ForeignTool"]:
        """What it offers, the same each time. Raises PluginError if it can't be asked."""
        ...

    def session(self) -> AbstractAsyncContextManager[Call]:
        """One episode's talk with it: fresh when the block begins, nothing left when it ends."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTool:
    """A tool as the model sees it, and what its server calls it."""

    name: str
    schema: Mapping[str, Any]
    remote_name: str
    server: ToolServer
    final: bool = False
    timeout_s: float = 30.0
    max_output_bytes: int = 16_384


def schema_of(name: str, description: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function in the OpenAI form."""
    wanted = {"type": "object", "properties": {}, **parameters}
    function = {"name": name, "description": description, "parameters": wanted}
    return {"type": "function", "function": function}


def object_of(tool: ForeignTool, raw: str) -> Mapping[str, Any]:
    """A call's arguments, with names that the tool has. Raises ToolError naming what is wrong.

    A tool with one parameter also takes the bare value. Types are the server's business.
    """
    parameters = tool.schema["function"]["parameters"]
    known, required = list(parameters["properties"]), parameters.get("required", [])
    try:
        values: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = shortened(str(error), 200)
        raise ToolError(f"the arguments of {tool.name} are not JSON ({reason})") from None
    if not isinstance(values, dict) and len(known) == 1:
        values = {known[0]: values}
    if not isinstance(values, dict):
        names = ", ".join(known) or "nothing"
        raise ToolError(f"the arguments of {tool.name} must be an object with {names}")
    missing = [name for name in required if name not in values]
    if missing:
        raise ToolError(f"{tool.name}: {missing[0]} is missing")
    odd = [name for name in values if name not in known]
    if odd and parameters.get("additionalProperties", False) is False:
        raise ToolError(
            f"{tool.name}: unknown argument {shortened(odd[0], 80)!r}; "
            f"known: {', '.join(known) or 'none'}"
        )
    return json.loads(whole_characters(json.dumps(values)))


class HeldSession:
    """An episode's session with a server: opened when first needed, closed when told to.

    One task enters and leaves it, as the libraries behind sessions want. Raises EnvironmentFault
    when it can't be opened.
    """

    def __init__(self, server: ToolServer) -> None:
        self._server = server
        self._done = asyncio.Event()
        self._opened: asyncio.Future[Call] | None = None

    async def opened(self) -> Call:
        """What calls the server's tools."""
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._opened))
        return await asyncio.shield(self._opened)

    async def close(self) -> None:
        """Close what was opened, give up what is being opened."""
        if self._opened is None:
            return
        self._done.set()
        if not self._opened.done():
            self._opened.cancel()
            self._holder.cancel()
        await asyncio.wait({self._holder})

    async def _hold(self, opened: asyncio.Future[Call]) -> None:
        try:
            with blaming(EnvironmentFault, "the tool server"):
                async with self._server.session() as call:
                    if not opened.cancelled():
                        opened.set_result(call)
                    await self._done.wait()
        except EnvironmentFault as fault:
            if not opened.done():
                opened.set_exception(fault)
                opened.exception()  # seen: nobody may be waiting any more
