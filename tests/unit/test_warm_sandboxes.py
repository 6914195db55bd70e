"""Sandboxes that are ready before they are asked for: used once, of the right kind, all closed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from agentrl.errors import SandboxFault
from agentrl.protocols import Sandbox
from agentrl.rollout import WarmSandboxes
from agentrl.testing.fakes import FakeSandbox, FakeSandboxes
from agentrl.types import SandboxSpec

ONE, OTHER = SandboxSpec(files={"a": b"1"}), SandboxSpec(memory_mb=99)


async def until_open(inner: FakeSandboxes, many: int) -> None:
    async with asyncio.timeout(2):
        while inner.open_now != many:
            await asyncio.sleep(0.001)


async def test_the_next_one_is_open_before_it_is_asked_for() -> None:
    inner = FakeSandboxes()
    async with WarmSandboxes(inner, size=2) as warm:
        async with warm.session(ONE) as first:
            await until_open(inner, 3)
            inner.delay_s = 9  # who has to wait for a fresh one now, waits long
            async with asyncio.timeout(1), warm.session(ONE) as second:
                assert second is not first
        inner.delay_s = 0
    assert inner.open_now == 0


async def test_each_is_used_once() -> None:
    inner = FakeSandboxes()
    async with WarmSandboxes(inner, size=3) as warm:
        for number in range(8):
            async with warm.session(ONE) as sandbox:
                assert await sandbox.read_file("a", max_bytes=9) == b"1"
                await sandbox.write_file("a", str(number).encode())
    assert inner.open_now == 0


async def test_another_kind_gets_its_own_and_the_old_ones_are_closed() -> None:
    inner = FakeSandboxes()
    async with WarmSandboxes(inner, size=2) as warm:
        async with warm.session(ONE):
            await until_open(inner, 3)
        async with warm.session(OTHER) as sandbox:
            assert isinstance(sandbox, FakeSandbox) and sandbox.files == {}
            await until_open(inner, 3)
    assert inner.open_now == 0


async def test_many_at_once_of_changing_kinds_leave_nothing() -> None:
    inner = FakeSandboxes(delay_s=0.001)

    async def one(number: int) -> None:
        async with warm.session((ONE, OTHER)[number % 2]) as sandbox:
            assert isinstance(sandbox, FakeSandbox)
            assert sandbox.files == ({"a": b"1"}, {})[number % 2]
            await asyncio.sleep(0.001 * (number % 3))

    async with WarmSandboxes(inner, size=4) as warm:
        await asyncio.gather(*(one(number) for number in range(40)))
    assert inner.open_now == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Dead(FakeSandbox):
    """Its engine was restarted."""

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        raise SandboxFault("the engine was restarted")


class Restarted(FakeSandboxes):
    """The first three sandboxes are dead."""

    @asynccontextmanager
    async def session(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        async with super().session(spec) as sandbox:
            yield Dead() if self.log.count("open") <= 3 else sandbox


async def test_one_that_has_died_while_it_waited_is_not_given_out() -> None:
    inner = Restarted()
    async with WarmSandboxes(inner, size=2) as warm:
        async with warm.session(ONE):  # nobody was ready: a fresh one, whatever it is
            await until_open(inner, 3)
        async with warm.session(ONE) as sandbox:
            assert await sandbox.read_file("a", max_bytes=9) == b"1"
    assert inner.open_now == 0


async def test_a_sandbox_that_cannot_be_opened_is_a_fault_each_time() -> None:
    class Broken(FakeSandboxes):
        @asynccontextmanager
        async def session(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
            raise OSError("no engine")
            yield FakeSandbox()

    async with WarmSandboxes(Broken(), size=2) as warm:
        for _ in range(3):
            with pytest.raises(SandboxFault, match="no engine"):
                async with warm.session(ONE):
                    raise AssertionError("must not open")
