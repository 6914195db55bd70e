"""Hidden unit tests in real sandboxes: right code passes, and nothing else does."""

from contextlib import asynccontextmanager
from typing import Any

import pytest
from agentrl_sandboxes.bwrap import BwrapProvider
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import SandboxFault, SandboxLost
from agentrl.testing.environment import CountedSandboxes
from agentrl.testing.fakes import FakeSandboxes
from agentrl.tools import problem
from agentrl.types import (
    ActionTokens,
    Ending,
    Episode,
    Message,
    ObservationTokens,
    SandboxSpec,
    Trajectory,
    Turn,
)
from agentrl.verifiers import Case, Suite, UnitTests, code_of
from agentrl.verifiers.unit_driver import decode, encode

SPEC = SandboxSpec(memory_mb=256)
DOUBLES = Suite(
    answer_as="solution.py",
    cases=tuple(
        Case(call="solution:double", arguments=(n,), expected=2 * n) for n in (3, -7, 0, 41)
    ),
)
RIGHT = "def double(x):\n    return 2 * x\n"
EVERYTHING = """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
"""
HARD = {
    "syntax error": "def double(x) return 2",
    "empty": "",
    "missing function": "def twice(x): return 2 * x",
    "early exit": "import os; os._exit(0)",
    "exit on import": "raise SystemExit(0)",
    "exit in the function": "def double(x):\n    import sys; sys.exit(0)",
    "exit after some": f"{RIGHT}    \nn = 0\nold = double\ndef double(x):\n    import os\n"
    "    global n; n += 1\n    if n > 3: os._exit(0)\n    return old(x)",
    "equals all": f"{EVERYTHING}\ndef double(x): return Any()",
    "patched comparer": "import builtins, json\njson.loads = lambda *a: True\n"
    "builtins.isinstance = lambda *a: True\ndef double(x): return True",
    "marker": "print('PASSED'); print('1 passed in 0.01s')\n"
    "def double(x): print('OK'); return None",
    "reward file": "for p in ('reward.txt', '/tmp/reward.json', 'result.xml'):\n"
    "    open(p, 'w').write('1.0')\ndef double(x): return 0",
    "nan": "def double(x): return float('nan')",
    "infinite": "def double(x): return float('inf')",
    "huge output": "def double(x): return 'x' * 10**7",
    "huge print": "def double(x):\n    print('x' * 10**7); return 0",
    "huge number": "def double(x): return 10**5000",
    "deep": "def double(x):\n    v = 0\n    for _ in range(900): v = [v]\n    return v",
    "memory": "def double(x): return ['a' * 10**10]",
    "killed": "import os, signal\ndef double(x): os.kill(os.getpid(), signal.SIGKILL)",
    "wrong": "def double(x): return x + x if x < 41 else 0",
    "special cased type": "def double(x): return str(2 * x)",
    # It finds nonce and channel: then it can say values, and still has to know which.
    "forged lines": "import sys\ndef double(x):\n"
    "    f = sys._getframe()\n    while 'say' not in f.f_locals: f = f.f_back\n"
    "    l = f.f_locals\n    for n in range(4):\n"
    "        for v in ('true', '{\"value\": true}', '{\"value\": {\"x\": 1}}', '[]'):\n"
    "            l['say'].write(l['asked']['nonce'] + f' {n} {v}\\n')\n    return 2 * x",
}


def episode(answer: str, **artifacts: bytes) -> Episode:
    turn = Turn(
        observation=ObservationTokens(token_ids=(1,)),
        action=ActionTokens(token_ids=(2,), logprobs=None, versions=(0,), finish="stop"),
        message=Message(role="assistant", content=answer),
    )
    trajectory = Trajectory(
        id="t", task_id="t", member=0, seed=0, prompt=(), turns=(turn,), ending=Ending.ANSWERED
    )
    return Episode(trajectory=trajectory, artifacts=artifacts)


async def graded(suite: Any, *answers: str, sandboxes: Any = None, verifier: Any = None) -> Any:
    asked = problem("Double.", suite, id="t", grading=SPEC)
    episodes = [episode(a) for a in answers]
    return await (verifier or UnitTests()).grade(asked, episodes, sandboxes or BwrapProvider())


async def test_right_code_passes_and_hard_cheats_beside_it_do_not() -> None:
    sandboxes = CountedSandboxes(BwrapProvider())
    fenced = f"Here:\n```python\ndef double(x): return 0\n```\nno:\n```python\n{RIGHT}```\n"
    floats = "def double(x): return 2.0 * x"
    noisy = f"print('x' * 10**7)\n{RIGHT}"
    answers = (RIGHT, fenced, floats, noisy, *HARD.values())
    verdicts = await graded(DOUBLES, *answers, sandboxes=sandboxes)
    assert [v.invalid for v in verdicts] == [None] * len(answers)
    assert [v.reward for v in verdicts[:4]] == [1.0] * 4, verdicts[:4]
    passed = [n for n, v in zip(HARD, verdicts[4:], strict=True) if v.passed or v.reward != 0]
    assert passed == []
    assert all(v.note and v.components["tests"] < 1 for v in verdicts[4:])
    notes = dict(zip(HARD, (v.note for v in verdicts[4:]), strict=True))
    assert "SyntaxError" in notes["syntax error"] and "exit code 137" in notes["killed"]
    assert sandboxes.open_now == 0 and sandboxes.opened == len(set(answers)) - 1, "shared runs"


async def test_a_loop_without_end_is_a_failure_of_its_own() -> None:
    verifier = UnitTests(timeout_s=0.5)
    slow, right = await graded(DOUBLES, "while True: pass", RIGHT, verifier=verifier)
    assert (slow.reward, right.reward) == (0.0, 1.0) and "timeout" in slow.note


async def test_what_breaks_by_itself_is_invalid_and_only_there() -> None:
    class Breaks:
        isolation = "none"
        left = 1

        @asynccontextmanager
        async def session(self, spec: SandboxSpec):
            if self.left:
                self.left -= 1
                raise SandboxFault("the engine is gone")
            async with BwrapProvider().session(spec) as sandbox:
                yield sandbox

    broken, right = await graded(DOUBLES, "x = 1", RIGHT, sandboxes=Breaks())
    assert broken.invalid == "SandboxFault: the engine is gone" and right.passed

    def ends(*_: Any) -> Any:
        raise SandboxLost("out of memory")

    (lost,) = await graded(DOUBLES, RIGHT, sandboxes=FakeSandboxes(run=ends))
    assert (lost.reward, lost.invalid) == (0.0, None) and "ended its sandbox" in lost.note


async def test_expected_values_never_enter_the_sandbox() -> None:
    look = (
        "import os, sys, gc\n"
        "def double(x):\n"
        "    seen = open('/proc/self/cmdline').read() + repr(gc.get_objects())\n"
        "    frame, depth = sys._getframe(), 0\n"
        "    while frame: seen += repr(frame.f_locals); frame = frame.f_back\n"
        "    for r, _, fs in os.walk('/workspace'):\n"
        "        for f in fs: seen += open(os.path.join(r, f)).read()\n"
        "    return ''.join(reversed('432177')) in seen if x else 2\n"
    )
    cases = tuple(
        Case(call="solution:double", arguments=(x,), expected=wanted)
        for x, wanted in ((1, False), (0, 771234))
    )
    (verdict,) = await graded(Suite(cases=cases, answer_as="solution.py"), look)
    assert verdict.components == {"tests": 0.5}, "it looked, and found nothing"
    assert verdict.note == "1 of 2 tests fail, first number 1: wrong value"


async def test_artifacts_go_over_the_files_of_the_grading_sandbox() -> None:
    suite = Suite(cases=(Case(call="pkg.a:f", arguments=(), expected=3),))
    files = {"pkg/a.py": b"from pkg.b import g\ndef f(): return g()", "pkg/b.py": b"def g(): ..."}
    asked = problem("q", suite, id="t", grading=SandboxSpec(files=files))
    members = [
        episode("", **{"pkg/b.py": b"def g(): return 3"}),
        episode(""),
        episode("", **{"../escape.py": b""}),
        episode("", **{"pkg/b.py": b"def g(): return 3\n#" + b"x" * (1 << 20)}),
    ]
    verdicts = await UnitTests().grade(asked, members, BwrapProvider())
    assert [v.reward for v in verdicts] == [1.0, 0.0, 0.0, 0.0]


async def test_a_reference_that_is_no_suite_is_invalid() -> None:
    (verdict,) = await graded("gold", RIGHT)
    assert verdict.invalid and verdict.reward is None
    with pytest.raises(ValueError, match="at least one case"):
        Suite(cases=())
    with pytest.raises(TypeError, match="bytes"):
        Suite(cases=(Case(call="a:b", arguments=(), expected=b"x"),))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.sets(st.integers())
    ),
)


@given(PLAIN)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode(encode(value))
    assert back == value and type(back) is type(value)


def test_the_code_of_an_answer() -> None:
    assert code_of("x = 1") == "x = 1"
    assert code_of("a\n```\nx = 1\n```\nb\n```py\ny = 2\n```") == "y = 2\n"
    assert code_of("```python\nx = 1") == "```python\nx = 1", "a fence without an end is no block"
