"""An MCP server with a state, for tests: on standard streams, or at a port."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def remember(text: str, times: int = 1) -> str:
    """Keep a note."""
    notes.extend([text] * times)
    return f"{len(notes)} kept"


@server.tool()
def recall() -> list[str]:
    """All notes."""
    return notes


@server.tool()
def fail() -> str:
    """Never works."""
    raise ToolError("out of ink")


@server.tool()
def wait(seconds: float) -> str:
    """Take so long."""
    time.sleep(seconds)
    return "done"


@server.tool()
def process() -> str:
    """The number of this process, and whether it sees a secret."""
    return f"{os.getpid()} {'MY_TOKEN' in os.environ}"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    server.run()
