"""Tools of real MCP servers and of a real HTTP service."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import EnvironmentFault, PluginError
from agentrl.rollout import Limits, Stage, run_group
from agentrl.testing.fakes import CharRenderer, FakeVerifier, FixedEngine, a_problem
from agentrl.tools import McpServer, OpenApiServer, ToolEnvironment, call, tool
from agentrl.tools.foreign import ForeignTool, schema_of
from agentrl.types import Message, ToolCall, assistant

HERE = Path(__file__).parent
NOTES = (sys.executable, str(HERE / "notes_server.py"))
pytestmark = pytest.mark.timeout(60)


def environment(*servers: Any) -> type[ToolEnvironment]:
    class Noted(ToolEnvironment):
        verifier = FakeVerifier()

        @tool
        def own(self) -> str:
            """A method."""
            return "mine"

        @staticmethod
        def problems(split: str) -> list[Any]:
            return [a_problem()]

    Noted.servers = servers
    return Noted


async def said(episode: ToolEnvironment, name: str, **arguments: Any) -> tuple[str, str]:
    """What the model reads, and the status of the call."""
    step = await episode.step(call(name, **arguments))
    return step.observation[0].content, step.events[0].status


@pytest.fixture(scope="module")
def notes() -> McpServer:
    pytest.importorskip("mcp")
    return McpServer(NOTES, timeout_s=1.0)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    pytest.importorskip("mcp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*NOTES, str(port)], **quiet)
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- MCP


def test_the_model_sees_what_the_server_describes(notes: McpServer) -> None:
    tools = {t.name: t for t in environment(notes)(sandbox=None).tools}
    assert list(tools)[:3] == ["own", "remember", "recall"]
    function = tools["remember"].schema["function"]
    assert function["description"] == "Keep a note."
    assert function["parameters"]["required"] == ["text"]
    assert function["parameters"]["properties"]["times"]["type"] == "integer"


async def test_each_episode_has_a_process_of_its_own(
    notes: McpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hush")
    one, two = (environment(notes)(sandbox=None) for _ in range(2))
    assert await said(one, "remember", text="a", times=2) == ("2 kept", "ok")
    assert await said(two, "remember", text="b") == ("1 kept", "ok")
    assert await said(one, "own") == ("mine", "ok")
    process, secret = (await said(one, "process"))[0].split()
    assert secret == "False"
    await one.step(assistant("the end"))
    await two.artifacts()
    end = time.monotonic() + 5
    while Path("/proc", process).exists() and time.monotonic() < end:
        await asyncio.sleep(0.05)
    assert not Path("/proc", process).exists()


async def test_what_goes_wrong_is_for_the_model_to_read(notes: McpServer) -> None:
    episode = environment(notes)(sandbox=None)
    try:
        text, status = await said(episode, "fail")
        assert status == "error" and "out of ink" in text
        text, status = await said(episode, "remember", text="x", times="many")
        assert status == "error" and "times" in text
        text, status = await said(episode, "wait", seconds=5)
        assert (text, status) == ("error: wait ran out of its 1 s", "timeout")
        assert (await said(episode, "remember", text="y"))[1] == "ok"
        assert (await said(episode, "remember"))[0] == "error: remember: text is missing"
        assert "unknown argument 'loud'" in (await said(episode, "recall", loud=True))[0]
        bare = ToolCall(id="c", name="wait", arguments="0.01")
        step = await episode.step(Message(role="assistant", content="", tool_calls=(bare,)))
        assert step.observation[0].content == "done"
    finally:
        await episode.artifacts()


async def test_an_agent_that_kills_the_server_is_graded(notes: McpServer) -> None:
    stage = Stage(
        engine=FixedEngine("@die {}", "@recall {}", "end"),
        renderer=CharRenderer(),
        environment=environment(notes),
        limits=Limits(timeout_s=30, context_tokens=10_000),
    )
    group = await run_group(stage, a_problem(), size=1, seed=0)
    assert group.faults == ()
    statuses = [event.status for event in group.trajectories[0].events]
    assert set(statuses) <= {"error", "timeout"} and len(statuses) == 2


async def test_an_address_is_shared_by_all_episodes(address: str) -> None:
    server = McpServer(url=address, only=("remember", "recall"), prefix="shared_")
    one, two = (environment(server)(sandbox=None) for _ in range(2))
    assert [t.name for t in one.tools] == ["own", "shared_remember", "shared_recall"]
    assert (await said(one, "shared_remember", text="a"))[1] == "ok"
    assert "a" in (await said(two, "shared_recall"))[0]
    await asyncio.gather(one.artifacts(), two.artifacts())


async def test_a_server_that_is_not_there_is_no_fault_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    gone = McpServer((sys.executable, str(tmp_path / "none.py")))
    with pytest.raises(PluginError, match="can't be asked for its tools"):
        gone.tools()

    class Goes(McpServer):
        def tools(self) -> Any:
            return (ForeignTool(name="f", schema=schema_of("f", "", {}), remote_name="f",
                                server=self),)  # fmt: skip

    with pytest.raises(EnvironmentFault, match="the tool server"):
        await said(environment(Goes(url="http://127.0.0.1:9/mcp"))(sandbox=None), "f")


def test_wrong_servers_are_refused(notes: McpServer) -> None:
    with pytest.raises(PluginError, match="a command or a url"):
        McpServer()
    with pytest.raises(PluginError, match="no tool 'fly'"):
        McpServer(NOTES, only=("fly",)).tools()
    with pytest.raises(PluginError, match="two tools named 'remember'"):
        _ = environment(notes, notes)(sandbox=None).tools
    with pytest.raises(PluginError, match="no tool name"):
        McpServer(NOTES, prefix="a b").tools()


# ---------------------------------------------------------------- OpenAPI

DOCUMENT: Any = {
    "openapi": "3.1.0",
    "paths": {
        "/items/{item}": {
            "parameters": [{"$ref": "#/components/parameters/item"}],
            "get": {
                "operationId": "getItem",
                "summary": "One item.",
                "parameters": [
                    {"name": "full", "in": "query", "schema": {"type": "boolean"}},
                    {"name": "X-Note", "in": "header", "schema": {"type": "string"}},
                ],
            },
            "put": {
                "operationId": "put.item",
                "requestBody": {"content": {"application/json": {"schema": {
                    "$ref": "#/components/schemas/Item"}}}},
            },
        },
        "/fail": {"get": {}},
    },
    "components": {
        "parameters": {"item": {"name": "item", "in": "path", "required": True}},
        "schemas": {"Item": {
            "required": ["size"],
            "properties": {
                "size": {"type": "integer"},
                "parent": {"$ref": "#/components/schemas/Item"},
            },
        }},
    },
}  # fmt: skip


@asynccontextmanager
async def service() -> AsyncGenerator[str]:
    """An HTTP service that says what it was asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.decode().splitlines()
            sizes = [int(line[15:]) for line in lines if line.lower().startswith("content-length:")]
            body = (await reader.readexactly(sizes[0])).decode() if sizes else ""
            note = [line for line in lines if line.lower().startswith("x-note")]
            text = json.dumps([lines[0].rsplit(" ", 1)[0], *note, body]).encode()
            status = "404 Not Found" if "fail" in lines[0] else "200 OK"
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
            )

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def document(folder: Path, content: Any = DOCUMENT) -> Path:
    path = folder / "api.json"
    path.write_text(json.dumps(content))
    return path


async def test_operations_are_tools(tmp_path: Path) -> None:
    async with service() as url:
        episode = environment(OpenApiServer(document(tmp_path), url=url))(sandbox=None)
        tools = {t.name: t.schema["function"] for t in episode.tools}
        assert list(tools) == ["own", "getItem", "put_item", "get_fail"]
        assert tools["getItem"]["description"] == "One item."
        assert tools["getItem"]["parameters"]["required"] == ["item"]
        assert tools["put_item"]["parameters"]["required"] == ["item", "size"]
        text, _ = await said(
            episode, "getItem", **{"item": "../a b?", "full": True, "X-Note": "hi"}
        )
        assert json.loads(text) == ["GET /items/%2E%2E%2Fa%20b%3F?full=true", "X-Note: hi", ""]
        text, _ = await said(episode, "put_item", item=3, size=4)
        assert json.loads(text) == ["PUT /items/3", '{"size":4}']
        text, status = await said(episode, "get_fail")
        assert status == "error" and text.startswith("error: 404 Not Found")
        text, status = await said(episode, "getItem", **{"item": "x", "X-Note": "a\r\nb: c"})
        assert (text, status) == ("error: a path or a header is one line", "error")
        await episode.artifacts()


async def test_a_service_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    server = OpenApiServer(document(tmp_path), url="http://127.0.0.1:9", only=("getItem",))
    with pytest.raises(EnvironmentFault, match="ConnectError"):
        await said(environment(server)(sandbox=None), "getItem", item="x")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([], "no OpenAPI document"),
        ({"paths": {}}, "no operation at all"),
        ({"paths": {"/x": {"get": {"parameters": [{"$ref": "#/nowhere"}]}}}}, "no #/nowhere"),
    ],
)
def test_a_wrong_document_is_refused(tmp_path: Path, content: Any, why: str) -> None:
    with pytest.raises(PluginError, match=why):
        OpenApiServer(document(tmp_path, content), url="http://x").tools()
    with pytest.raises(PluginError, match=r"none\.yaml"):
        OpenApiServer(tmp_path / "none.yaml").tools()


def test_the_documentation_is_true() -> None:
    text = (HERE.parents[1] / "docs" / "tools.md").read_text(encoding="utf-8")
    (office,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    made: dict[str, Any] = {}
    exec(office, made)
    assert len(made["Office"].servers) == 3
