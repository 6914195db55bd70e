"""What each rung of the replay ladder found, as lines for a terminal."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from agentrl.replay.check import Finding
from agentrl.replay.diff import Diff
from agentrl.replay.reexecute import Reexecution
from agentrl.replay.regrade import Regraded
from agentrl.types import Verdict

if TYPE_CHECKING:
    from agentrl.learning.reforward import Drift
    from agentrl.learning.relearn import Relearned, Share


def findings(found: Sequence[Finding]) -> Iterator[str]:
    """The lines of `check`: every problem, and each kind of note once."""
    notes: dict[str, list[Finding]] = {}
    for one in found:
        if one.level == "problem":
            yield from finding(one)
        else:
            notes.setdefault(one.what, []).append(one)
    for what, same in notes.items():
        if len(same) == 1:
            yield from finding(same[0])
        else:
            episodes = len({one.trajectory_id for one in same})
            yield f"note: {len(same)} turns of {episodes} episodes: {what}"


def finding(found: Finding) -> Iterator[str]:
    """A line of `check`."""
    where = found.trajectory_id + ("" if found.turn is None else f", turn {found.turn}")
    yield f"{found.level}: {where + ': ' if where else ''}{found.what}"


def regraded(found: Regraded) -> Iterator[str]:
    """A changed verdict."""
    if found.changed:
        yield f"{found.trajectory_id}: {_worth(found.before)} -> {_worth(found.after)}"


def reexecution(found: Reexecution) -> Iterator[str]:
    """Where an episode departed from its record."""
    at = found.divergence
    if at is None:
        return
    turn = "at the reset" if at.turn is None else f"turn {at.turn}"
    tool = f", tool {at.tool}" if at.tool else ""
    where = f", bytes {at.begin} to {at.end}" if at.what in ("reply", "prompt") else ""
    yield f"{found.trajectory_id}: departs {turn}{tool}: {at.what}{where}"
    yield f"  then: {at.recorded}"
    yield f"  now:  {at.seen}"
    if at.cause:
        yield f"  likely cause: {at.cause}"


def drift(found: "Drift") -> Iterator[str]:
    """The drift of each action."""
    yield f"{found.trajectory_id}: |drift| mean {found.mean_abs:.2e}, max {found.max_abs:.2e} nats"
    for span in found.spans:
        yield (
            f"  turn {span.turn}: {span.tokens} tokens, mean {span.mean:+.2e}, "
            f"max {span.max_abs:.2e} at token {span.worst}, k3 {span.k3:.2e}"
        )


def relearned(found: "Relearned", *, same_algorithm: bool) -> Iterator[str]:
    """Loss and gradient norm then and now, and who carries the gradient."""
    names = ("loss", "grad_norm", "entropy", "clip_share", "ratio_max", "mismatch_k3")
    yield f"step {found.version}"
    for name in names:
        then = f"{found.recorded[name]:.8g}" if name in found.recorded else "not recorded"
        yield f"  {name}: {then} -> {found.stats.get(name, 0.0):.8g}"
    if same_algorithm and found.recorded:
        differ = ", ".join(found.differences())
        yield f"  not as recorded: {differ}" if differ else "  as recorded"
    for share in sorted(found.shares, key=lambda share: -share.share):
        yield from _share(share)


def diffed(found: Diff) -> Iterator[str]:
    """Two trajectories, turn by turn."""
    yield f"< {found.left_id} ({found.endings[0]})"
    yield f"> {found.right_id} ({found.endings[1]})"
    for turn in found.turns:
        if turn.token is None and turn.same_observation:
            yield f"turn {turn.turn}: the same"
        elif turn.token is None:
            yield f"turn {turn.turn}: the same action after another observation"
        else:
            left, right = (_number(p) for p in turn.logprobs)
            yield (
                f"turn {turn.turn}: the action differs from token {turn.token} on "
                f"(logprob {left} and {right})"
            )
        for mark, said, reply in (
            ("<", turn.left, turn.left_reply),
            (">", turn.right, turn.right_reply),
        ):
            yield from (f"  {mark} {line}" for line in said.splitlines())
            yield from (f"  {mark}   [{line}]" for line in reply.splitlines())
    at = found.parts_at
    yield "they are the same" if at is None else f"they part at turn {at}"


def _share(share: "Share") -> Iterator[str]:
    lesson = share.lesson
    where = f"  {lesson.trajectory_id}"
    if lesson.silent is not None:
        yield f"{where}: no gradient: {lesson.silent}"
        return
    advantages = ", ".join(f"{a:+.3f}" for a in dict.fromkeys(lesson.advantages))
    yield f"{where}: {share.share:.1%} of the pull, advantage {advantages}"
    for pull in share.hardest:
        yield f"    turn {pull.turn}, token {pull.token} (id {pull.id}): {pull.value:+.2e}"


def _worth(verdict: Verdict) -> str:
    if verdict.reward is None:
        return f"invalid ({verdict.invalid})"
    parts = "".join(f", {name} {value:g}" for name, value in verdict.components.items())
    return f"reward {verdict.reward:g}, {'passed' if verdict.passed else 'not passed'}{parts}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
