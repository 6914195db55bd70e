"""What goes wrong slowly, in plain words: read off the lines of metrics as they come.

Each alarm compares the last `WINDOW` steps with the first ones of the run, so it needs no threshold
of the problem's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan
from statistics import fmean
from typing import Any

WINDOW = 5
"""Steps that are averaged."""
COLLAPSED = 0.2
"""Share of the first steps' entropy below which the policy has stopped exploring."""
GROWN = 1.5
"""Growth of an episode's action tokens that needs an explanation."""
FAULTY = 0.05
"""Share of faulty episodes below which their rise is not worth a word."""
APART = 0.01
"""mismatch_k3 (nats) above which engine and learner are different policies."""
SPENT = 0.9
"""Share of groups without signal above which most sampling is wasted."""

Rows = Sequence[Mapping[str, Any]]


class Watch:
    """Sees every line of metrics, and says each alarm once until it is over."""

    def __init__(self, rows: Rows = ()) -> None:
        """`rows` are what the run wrote before it was resumed; nothing is said of them."""
        self._rows = list(rows)
        self._on = {name for name, _ in alarms(self._rows)}

    def see(self, row: Mapping[str, Any]) -> list[str]:
        """Take one more line; the words of the alarms that it sets off."""
        self._rows.append(row)
        found = dict(alarms(self._rows))
        new = [words for name, words in found.items() if name not in self._on]
        self._on = set(found)
        return new


def alarms(rows: Rows) -> Iterator[tuple[str, str]]:
    """Name and words of each alarm that is on after these lines of metrics."""
    steps = [row for row in rows if row.get("kind") == "step"]
    if len(steps) >= 2 * WINDOW:
        first, last = steps[:WINDOW], steps[-WINDOW:]
        yield from _of_the_policy(first, last)
        yield from _of_the_machinery(first, last)
    yield from _of_held_out(rows)


def _of_the_policy(first: Rows, last: Rows) -> Iterator[tuple[str, str]]:
    was, now = _mean(first, "entropy"), _mean(last, "entropy")
    if now < COLLAPSED * was:
        yield (
            "entropy",
            f"entropy fell from {was:.3g} to {now:.3g} nats: the policy hardly explores any more. "
            "Lower learner.lr, raise algorithm.clip_high or entropy_coef, or take harder problems",
        )
    was, now = _mean(first, "action_tokens", "episodes"), _mean(last, "action_tokens", "episodes")
    better = _mean(last, "reward_mean") > _mean(first, "reward_mean")
    if now > GROWN * was and not better:
        yield (
            "length",
            f"episodes grew from {was:.0f} to {now:.0f} action tokens and earn no more: a length "
            "bias. Set algorithm.aggregation token_mean or constant, or length_tokens",
        )
    silent = 1 - _mean(last, "groups_with_signal", "groups")
    if silent > SPENT:
        yield (
            "signal",
            f"{silent:.0%} of the groups have equal rewards and teach nothing: mean reward "
            f"{_mean(last, 'reward_mean'):.3g}. Take easier or harder problems, or raise "
            "rollout.group_size",
        )


def _of_the_machinery(first: Rows, last: Rows) -> Iterator[tuple[str, str]]:
    was, now = _mean(first, "faults", "episodes"), _mean(last, "faults", "episodes")
    if now > max(FAULTY, 2 * was):
        yield (
            "faults",
            f"faults rose from {was:.1%} to {now:.1%} of the episodes: see fault_example in "
            "metrics.jsonl. If it comes with the policy's versions, the policy causes it",
        )
    if (apart := _mean(last, "mismatch_k3")) > APART:
        yield (
            "mismatch",
            f"engine and learner are {apart:.3g} nats apart (mismatch_k3): lower rollout.max_lag "
            "or epochs, compare their dtypes, or set algorithm.mismatch mask",
        )


def _of_held_out(rows: Rows) -> Iterator[tuple[str, str]]:
    """Reward goes up in training and success down where the policy was not trained."""
    evals = [(place, row) for place, row in enumerate(rows) if row.get("kind") == "eval"]
    if len(evals) < 2:
        return
    best_at, best = max(evals, key=lambda found: found[1]["success"])
    last_at, last = evals[-1]
    margin = 2 * (best["stderr"] ** 2 + last["stderr"] ** 2) ** 0.5
    steps = [
        [r for r in rows[:at] if r.get("kind") == "step"][-WINDOW:] for at in (best_at, last_at)
    ]
    was, now = (_mean(before, "reward_mean") for before in steps)
    if best["success"] - last["success"] > margin and now > was:
        yield (
            "held-out",
            f"success on held-out problems fell from {best['success']:.3f} (step {best['step']}) "
            f"to {last['success']:.3f} while the training reward rose from {was:.3g} to {now:.3g}: "
            "the policy learns the training set or cheats the verifier. Look at what it does "
            "(agentrl show), and keep the earlier checkpoint",
        )


def _mean(rows: Rows, name: str, per: str | None = None) -> float:
    """The mean of a number, or of its quotient by another; NaN of nothing: no alarm."""
    values = [
        float(row[name]) / (max(1.0, float(row[per])) if per else 1.0)
        for row in rows
        if _number(row.get(name)) and (per is None or _number(row.get(per)))
    ]
    return fmean(values) if values else nan


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)
