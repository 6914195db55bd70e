"""Each alarm on a run made up to set it off, and on one that must not."""

from typing import Any

import pytest

from agentrl.alarms import WINDOW, Watch, alarms


def step(number: int, **fields: Any) -> dict[str, Any]:
    sound = {
        "kind": "step", "step": number, "entropy": 1.0, "action_tokens": 800, "episodes": 8,
        "reward_mean": 0.5, "groups": 4, "groups_with_signal": 3, "faults": 0, "mismatch_k3": 1e-5,
    }  # fmt: skip
    return {**sound, **fields}


def evaluation(number: int, success: float, stderr: float = 0.02) -> dict[str, Any]:
    return {"kind": "eval", "step": number, "success": success, "stderr": stderr}


def run(first: dict[str, Any], last: dict[str, Any], count: int = 20) -> list[dict[str, Any]]:
    return [step(n, **(first if n < count // 2 else last)) for n in range(count)]


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [name for name, _ in alarms(rows)]


@pytest.mark.parametrize(
    ("last", "name", "said"),
    [
        ({"entropy": 0.1}, "entropy", "from 1 to 0.1 nats"),
        ({"action_tokens": 1600}, "length", "from 100 to 200 action tokens"),
        ({"faults": 2}, "faults", "from 0.0% to 25.0%"),
        ({"mismatch_k3": 0.05}, "mismatch", "0.05 nats apart"),
        ({"groups_with_signal": 0}, "signal", "100% of the groups"),
    ],
)
def test_what_goes_wrong_is_said_in_words(last: dict[str, Any], name: str, said: str) -> None:
    assert names(run({}, {})) == []
    ((found, words),) = alarms(run({}, last))
    assert found == name and said in words and "\n" not in words
    changes = name in ("entropy", "length", "faults")
    assert names(run(last, last)) == ([] if changes else [name])


@pytest.mark.parametrize(
    "last",
    [
        {"entropy": 0.5},
        {"action_tokens": 1600, "reward_mean": 0.6},  # longer, and worth it
        {"action_tokens": 1600, "episodes": 16},  # more episodes, not longer ones
        {"faults": 0.3},
        {"mismatch_k3": float("nan"), "entropy": None},
    ],
)
def test_what_is_sound_is_not_said(last: dict[str, Any]) -> None:
    assert names(run({}, last)) == []


def test_few_steps_say_nothing() -> None:
    assert names([step(n, entropy=1.0 / (n + 1) ** 3) for n in range(2 * WINDOW - 1)]) == []


@pytest.mark.parametrize(
    ("success", "reward", "on"),
    [(0.5, 0.9, True), (0.5, 0.4, False), (0.68, 0.9, False), (0.8, 0.9, False)],
)
def test_reward_up_and_held_out_down(success: float, reward: float, on: bool) -> None:
    rows = [
        evaluation(0, 0.3), *(step(n) for n in range(3)), evaluation(3, 0.7),
        *(step(n, reward_mean=reward) for n in range(3, 9)), evaluation(9, success),
    ]  # fmt: skip
    assert (names(rows) == ["held-out"]) is on


def test_an_alarm_is_said_once_until_it_is_over() -> None:
    watch = Watch()
    rows = [*run({}, {"faults": 4}), *(step(20 + n) for n in range(6)), *run({"faults": 4}, {})]
    said = [number for number, row in enumerate(rows) if watch.see(row)]
    assert len(said) == 2 and said[0] < 20 <= said[1]


def test_a_resumed_run_does_not_say_it_again() -> None:
    rows = run({}, {"entropy": 0.1})
    assert Watch(rows).see(step(20, entropy=0.1)) == []
    assert Watch(rows[:10]).see(step(10)) == []
