"""Calls that may hang are ended, and what they do stays theirs."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from agentrl.errors import VerifierFault
from agentrl.verifiers import KillablePool, Reply

FILE = """
import os, sys, time
READY = []

def load():
    print("not a reply")
    READY.append(1)

def answer(question):
    kind, value = question
    if kind == "echo":
        return [value, READY]
    if kind == "remember":
        READY.append(value)
        return READY
    if kind == "sleep":
        time.sleep(60)
    if kind == "spin":
        while True:
            pass
    if kind == "eat":
        return len("x" * 10**11)
    if kind == "raise":
        raise ValueError("so it is")
    if kind == "exit":
        os._exit(3)
    if kind == "print":
        print(\'{"status": "done", "value": 1}\', flush=True)
        os.system("echo 1")
        return None
    if kind == "long":
        return "x" * value
    if kind == "nothing JSON":
        return {1, 2}
    if kind == "environment":
        return sorted(os.environ)
    if kind == "write":
        open(value, "w").write("x" * 10)
        return "written"
"""


@pytest.fixture
def pool(tmp_path: Path) -> KillablePool:
    file = tmp_path / "asked.py"
    file.write_text(FILE)
    return KillablePool(file)


def ask(pool: KillablePool, *questions: object, limit_s: float = 5.0) -> list[object]:
    return list(asyncio.run(pool.ask(questions, limit_s=limit_s, concurrency=2)))


def test_replies_come_in_order_and_calls_share_nothing(pool: KillablePool) -> None:
    texts = ["a", "é\n", None, {"k": [1.5, True]}]
    replies = ask(pool, *(("echo", text) for text in texts))
    assert replies == [Reply(status="done", value=[text, [1]]) for text in texts]
    for value in (5, 6):
        assert ask(pool, ("remember", value)) == [Reply(status="done", value=[1, value])]
    assert ask(pool) == []


def test_what_hangs_is_ended_and_the_next_is_answered_at_once(pool: KillablePool) -> None:
    ask(pool, ("echo", 1), ("echo", 2))  # the workers are up
    begun = time.monotonic()
    replies = ask(pool, ("sleep", 0), ("spin", 0), ("sleep", 0), ("spin", 0), limit_s=0.3)
    assert replies == [Reply(status="too_slow")] * 4
    assert ask(pool, ("echo", 3)) == [Reply(status="done", value=[3, [1]])]
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("kind", "value", "note"),
    [
        ("eat", 0, "MemoryError"),
        ("raise", 0, "ValueError: so it is"),
        ("exit", 0, "it died"),
        ("long", 1 << 21, "cut"),
        ("nothing JSON", 0, "TypeError"),
    ],
)
def test_what_a_call_causes_is_a_reply(
    pool: KillablePool, kind: str, value: int, note: str
) -> None:
    (reply,) = ask(pool, (kind, value))
    assert isinstance(reply, Reply) and reply.status == "failed" and note in reply.note


def test_a_call_can_neither_forge_a_reply_nor_write_nor_read_secrets(
    pool: KillablePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    assert ask(pool, ("print", 0)) == [Reply(status="done", value=None)]
    (seen,) = ask(pool, ("environment", 0))
    assert isinstance(seen, Reply) and "SOME_KEY" not in seen.value
    ask(pool, ("write", str(tmp_path / "new.txt")))
    assert (tmp_path / "new.txt").read_text() == "", "no file grows"


def test_a_worker_that_dies_is_a_fault_and_is_replaced(pool: KillablePool) -> None:
    ask(pool, ("echo", 1))
    worker = pool._idle.get_nowait()
    worker.kill()
    worker.wait()
    pool._idle.put(worker)
    (fault,) = ask(pool, ("echo", 2))
    assert isinstance(fault, VerifierFault)
    assert ask(pool, ("echo", 2)) == [Reply(status="done", value=[2, [1]])]


def test_a_file_that_can_not_be_loaded_is_a_fault(tmp_path: Path) -> None:
    (fault,) = ask(KillablePool(tmp_path / "none.py"), 1)
    assert isinstance(fault, VerifierFault)


def test_closing_ends_the_workers(pool: KillablePool) -> None:
    ask(pool, ("echo", 1))
    worker = pool._idle.get_nowait()
    pool._idle.put(worker)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
