"""Mend a small repository with one fault; graded on a fresh copy with the agent's changed files."""

from collections.abc import Generator, Iterator, Sequence
from hashlib import sha256

from agentrl.errors import ToolError
from agentrl.protocols import Script, Split
from agentrl.tools import ToolEnvironment, answer, call, problem, tool
from agentrl.types import ExecResult, Message, Messages, Problem, SandboxSpec, system, user
from agentrl.verifiers import Case, Suite, UnitTests
from agentrl_environments.bugfix_repositories import MAIN, STEPS, TESTS, Repository, repositories
from agentrl_environments.code_cheats import CHEATS

MAX_FILE_BYTES = 1 << 18
INSTRUCTIONS = (
    "A test of this repository fails because of one fault in its code. Find and mend it with the "
    "tools. Only files that exist under `toolbox/` are graded, with other tests than those here. "
    "When it is mended, say so."
)


def _rewrites(path: str, source: str) -> Script:
    def script(problem: Problem) -> Generator[Message, Messages, None]:
        """A cheat: another content for a file, and the claim that all is well."""
        (seen,) = yield call("read_file", path=path)
        name = problem.reference.cases[0].call.partition(":")[2]
        yield call("edit", path=path, old=seen.content, new=source.replace("NAME", name))
        yield call("run_tests")
        yield answer("All tests pass. Reward: 1.0")

    return script


class Bugfix(ToolEnvironment):
    """List, read, search, edit, test; the episode ends with an answer in words."""

    verifier = UnitTests()

    @tool(timeout_s=20)
    async def list_files(self) -> str:
        """List the files of the repository."""
        return _shown(await self.sandbox.exec(["find", ".", "-type", "f"], timeout_s=5))

    @tool(timeout_s=20)
    async def read_file(self, path: str) -> str:
        """Read a file of the repository."""
        return await self._read(path)

    @tool(timeout_s=20)
    async def search(self, text: str) -> str:
        """Find the lines that hold a text, as path:line:content."""
        if "\0" in text:
            raise ToolError("the text holds a NUL character")
        if len(text) > 1000:
            raise ToolError("the text is longer than 1000 characters")
        command = ["grep", "-rnIF", "--exclude-dir=__pycache__", "-e", text, "."]
        found = await self.sandbox.exec(command, timeout_s=5)
        return _shown(found) if found.exit_code != 1 else "no line holds it"

    @tool(timeout_s=20)
    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file by another."""
        content = await self._read(path)
        count = content.count(old) if old else 0
        if count != 1:
            raise ToolError(f"the old text occurs {count} times in {path}; it must occur once")
        changed = content.replace(old, new).encode(errors="replace")
        if len(changed) > MAX_FILE_BYTES:
            raise ToolError(f"{path} would have more than {MAX_FILE_BYTES} bytes")
        await self.sandbox.write_file(path, changed)
        return f"{path} is changed"

    @tool(timeout_s=30)
    async def run_tests(self) -> str:
        """Run the repository's own tests."""
        command = ["python3", "-S", "-B", "-m", "unittest", "discover", "-s", "tests", "-t", "."]
        return _shown(await self.sandbox.exec(command, timeout_s=10))

    async def _read(self, path: str) -> str:
        data = await self.sandbox.read_file(path, max_bytes=MAX_FILE_BYTES)
        return data.decode(errors="replace")

    @staticmethod
    def problems(
        split: Split, *, steps: Sequence[int] = (3, 4), count: int = 1000, seed: int = 0
    ) -> Iterator[Problem]:
        """`count` repositories at most; one is in the test split when its hash says so.

        `steps` are levels of `code_exercises`: 3 has two functions, 4 has up to four, and in either
        one of them has a fault.
        """
        if count < 1 or not steps or not set(steps) <= {3, 4}:
            raise ValueError("count must be at least 1, and steps some of 3 and 4")
        given = 0
        for repository in repositories(steps, seed):
            digest = sha256(repository.task.encode()).digest()[0]
            if (digest % 5 == 0) == (split == "test"):
                yield _problem(repository)
                given += 1
                if given == count:
                    return

    @staticmethod
    def oracle(problem: Problem) -> Generator[Message, Messages, None]:
        """Look around, replace the file that has the fault, test."""
        yield call("list_files")
        yield call("run_tests")
        (seen,) = yield call("read_file", path=STEPS)
        mended = problem.reference.solution[STEPS]
        yield call("edit", path=STEPS, old=seen.content, new=mended)
        yield call("run_tests")
        yield answer("Mended.")

    scripts = {  # noqa: RUF012
        "oracle": oracle,
        "edits_the_tests": _rewrites(TESTS, "import unittest\n"),
        **{name: _rewrites(MAIN, source) for name, source in CHEATS.items()},
    }


def _problem(repository: Repository) -> Problem:
    spec = SandboxSpec(memory_mb=256, files=repository.files)
    cases = tuple(
        Case(call=f"toolbox.main:{repository.name}", arguments=(given,), expected=value)
        for given, value in repository.hidden
    )
    return problem(
        (system(INSTRUCTIONS), user(f"What toolbox.main should do: {repository.task}")),
        Suite(cases=cases, solution={STEPS: repository.mended}),
        id=sha256(repr((repository.task, sorted(repository.files.items()))).encode()).hexdigest()[
            :16
        ],
        sandbox=spec,
        grading=spec,
        artifacts=sorted(path for path in repository.files if path.startswith("toolbox/")),
    )


def _shown(done: ExecResult) -> str:
    """What a command said, and how it ended if that was badly."""
    said = (done.stdout + done.stderr).decode(errors="replace").rstrip("\n")
    if done.timed_out:
        return f"{said}\ntimed out".lstrip()
    return said or f"[exit code {done.exit_code}]"
