"""Tools of a Model Context Protocol server, by the official SDK."""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cached_property
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from agentrl.errors import PluginError, ToolError
from agentrl.tools.foreign import Call, ForeignTool, schema_of
from agentrl.tools.text import as_text, shortened

if TYPE_CHECKING:
    from mcp import Client

_SAID = 1000
"""Characters of a server's standard error that are shown when it fails."""
OPEN_TIMEOUT_S = 60.0
"""Starting a server may take long: it is not the model's time."""


class McpServer:
    """An MCP server as a source of tools: a program on its standard streams, or an address.

    A program is started anew for each episode, beside the sandbox and with few of this process's
    variables (`environ` adds to them); an address (`https://…/mcp`) is shared by all episodes, and
    so is whatever state it keeps. `only` names the tools to take (default: all); `prefix` goes
    before each name. Raises PluginError unless exactly one of `command` and `url` is given.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        *,
        url: str = "",
        environ: Mapping[str, str] | None = None,
        only: Sequence[str] = (),
        prefix: str = "",
        timeout_s: float = 30.0,
    ) -> None:
        if bool(command) == bool(url):
            raise PluginError("an MCP server is a command or a url: give one of them")
        self._command, self._url, self._environ = tuple(command), url, environ
        self._only, self._prefix, self._timeout_s = tuple(only), prefix, timeout_s

    def tools(self) -> Sequence[ForeignTool]:
        """The server's tools; it is asked once. Raises PluginError if it can't be."""
        return self._tools

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[Call]:
        """A talk with the server: a fresh process, or a fresh session at its address."""
        from mcp import MCPError

        async with self._connected() as client:

            async def call(name: str, arguments: Mapping[str, Any]) -> str:
                try:
                    result = await client.call_tool(name, dict(arguments))
                except MCPError as error:
                    raise ToolError(shortened(str(error), 500)) from None
                text = _text(result)
                if result.is_error:
                    raise ToolError(text or "the tool failed")
                return text

            yield call

    @cached_property
    def _tools(self) -> tuple[ForeignTool, ...]:
        # In a thread: there may be an event loop in this one.
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(lambda: asyncio.run(self._listed())).result()
        missing = sorted(set(self._only) - {tool.name for tool in found})
        if missing:
            raise PluginError(f"{self}: it has no tool {missing[0]!r}")
        return tuple(
            self._foreign(tool) for tool in found if tool.name in (self._only or (tool.name,))
        )

    async def _listed(self) -> list[Any]:
        found: list[Any] = []
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S), self._connected() as client:
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        return found
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(f"{self} can't be asked for its tools: {_reason(error)}") from error

    def _foreign(self, tool: Any) -> ForeignTool:
        name = self._prefix + tool.name
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", name):
            raise PluginError(f"{self}: {name!r} is no tool name (letters, digits, _ and -)")
        return ForeignTool(
            name=name,
            schema=schema_of(name, tool.description or "", tool.input_schema),
            remote_name=tool.name,
            server=self,
            timeout_s=self._timeout_s,
        )

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator["Client"]:
        """A client; what a program writes on its standard error is kept out of the terminal."""
        try:
            from mcp import Client, StdioServerParameters, stdio_client
        except ImportError:
            raise PluginError("MCP tools need the SDK: pip install 'agentrl[mcp]'") from None
        if self._url:
            async with Client(self._url) as client:
                yield client
            return
        program, *arguments = self._command
        environ = None if self._environ is None else dict(self._environ)
        asked = StdioServerParameters(command=program, args=arguments, env=environ)
        with TemporaryFile("w+", errors="replace") as errors:
            try:
                async with Client(stdio_client(asked, errlog=errors)) as client:
                    yield client
            except Exception as error:
                errors.seek(0)
                said = shortened(errors.read()[-_SAID:], _SAID)
                raise ConnectionError(f"{_reason(error)}; it said: {said}") from error

    def __str__(self) -> str:
        return f"MCP server {self._url or ' '.join(self._command)}"


def _text(result: Any) -> str:
    """What a model reads of a result: its texts; other contents are named by kind."""
    parts = [
        part.text if part.type == "text" else f"[{part.type}: not shown]" for part in result.content
    ]
    if not parts and result.structured_content is not None:
        return as_text(result.structured_content)
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """The innermost of nested groups, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {shortened(str(error), 300)}"
