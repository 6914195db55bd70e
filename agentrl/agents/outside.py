"""The base class of environments that an agent program leads."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, ClassVar

from agentrl.agents.endpoint import serve
from agentrl.agents.program import Heard, run_program
from agentrl.errors import EnvironmentFault, ToolError
from agentrl.protocols import ChatPolicy, Sandbox, Script, Tool, Verifier
from agentrl.tools import says_nothing
from agentrl.types import Message, Messages, Step, Task

MAX_ARTIFACT_BYTES = 1 << 20


class OutsideAgent:
    """One episode of an agent program; subclass it and set `command`.

    The program runs once, in a folder of its own, beside the sandbox: it must not run on this
    machine what the policy writes. Its environment has the policy's address and key under the names
    that the OpenAI and Anthropic SDKs read, and `AGENTRL_TASK`: JSON with the task's id, prompt and
    setup. The prompt's last message is on its standard input. What it prints is the artifact
    `stdout`. An exit code other than 0 ends the episode as truncated.

    For a program that is a coroutine, or that needs the sandbox, override `run_agent`.
    """

    command: ClassVar[Sequence[str]] = ()
    environ: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Further variables of the program; a key that it needs for something else goes here."""
    scripts: ClassVar[Mapping[str, Script]] = MappingProxyType({"null": says_nothing})
    verifier: ClassVar[Verifier]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.scripts = MappingProxyType({"null": says_nothing, **cls.scripts})

    def __init__(self, *, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._folder: TemporaryDirectory[str] | None = None
        self._heard = Heard()
        self._task = Task(id="none", prompt=())

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools that the tool format has to know by name; the program's requests bring others."""
        return ()

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox. Raises EnvironmentFault if the task asked for none."""
        if self._sandbox is None:
            raise EnvironmentFault(
                f"task {self._task.id} has no sandbox: give its Task a SandboxSpec"
            )
        return self._sandbox

    async def run_agent(self, task: Task, policy: ChatPolicy, *, seed: int) -> bool:
        """Run the program to its end; whether its exit code was 0.

        Raises EnvironmentFault if it can't be started, or fails before the policy's first answer.
        """
        if not self.command:
            raise EnvironmentFault(
                f"{type(self).__name__} has no command: set it to the program's argv"
            )
        self._task, self._folder = task, TemporaryDirectory(prefix="agentrl-agent-")
        about = {
            "id": task.id,
            "prompt": [{"role": m.role, "content": m.content} for m in task.prompt],
            "setup": dict(task.setup),
            "seed": seed,
        }
        async with serve(policy) as endpoint:
            exit_code = await run_program(
                self.command,
                environ={**self.environ, **endpoint.environ, "AGENTRL_TASK": json.dumps(about)},
                stdin=task.prompt[-1].content.encode() if task.prompt else b"",
                folder=Path(self._folder.name),
                heard=self._heard,
            )
        if exit_code != 0 and not endpoint.answered:
            said = " ".join(self._heard.stderr.decode(errors="replace").split())
            raise EnvironmentFault(
                f"the agent program ended with exit code {exit_code} before the policy's first "
                f"answer: {said[-500:]}"
            )
        return exit_code == 0

    async def reset(self, task: Task, *, seed: int) -> tuple[Messages, Mapping[str, Any]]:
        """The task's own prompt; the program will ask in its own words."""
        self._task = task
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """Raises EnvironmentFault: nobody steps what a program leads."""
        raise EnvironmentFault(f"{type(self).__name__} is led by its program and can't be stepped")

    async def artifacts(self) -> Mapping[str, bytes]:
        """`stdout`, and the task's artifacts from the sandbox or else the program's folder."""
        found = {"stdout": bytes(self._heard.stdout)} if self._heard.stdout else {}
        for path in self._task.artifacts:
            data = await self._artifact(path)
            if data is not None:
                found[path] = data
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)
            self._folder = None
        return found

    async def _artifact(self, path: str) -> bytes | None:
        if self._sandbox is not None:
            try:
                return await self._sandbox.read_file(path, max_bytes=MAX_ARTIFACT_BYTES)
            except ToolError:
                return None
        if self._folder is None:
            return None
        return await asyncio.to_thread(_read, self._folder.name, path)


def _read(root: str, name: str) -> bytes | None:
    """A regular file in the folder, and not one that a link in it points to elsewhere."""
    folder = Path(root).resolve()
    path = (folder / name).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        return None
    with path.open("rb") as file:
        data = file.read(MAX_ARTIFACT_BYTES + 1)
    return data if len(data) <= MAX_ARTIFACT_BYTES else None
