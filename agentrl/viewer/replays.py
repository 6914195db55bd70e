"""Rungs of the replay ladder, for one episode, asked for by the page."""

from collections.abc import Iterable
from typing import Any

from agentrl.cli import replay_text as text
from agentrl.errors import ConfigError, RecordError
from agentrl.rebuild import Replay
from agentrl.replay.check import check_trajectory
from agentrl.replay.records import Recorded, Records
from agentrl.viewer.details import Details

DEPTHS = ("check", "regrade", "reexecute", "reforward")


def replay(details: Details, depth: str, one: Recorded) -> dict[str, Any]:
    """What a rung says of a recorded episode. Raises what the rung raises, ConfigError without one.

    `same` is whether it is as recorded, `lines` say more, `drift` has d of each sampled token.
    """
    ladder = Replay(Records(details.rows.store.path(one.step).parent, step=one.step))
    match depth:
        case "check":
            language, notes = ladder.language(one.step)
            found = [*notes, *check_trajectory(one.trajectory, language)]
            same = all(finding.level == "note" for finding in found)
            return _told(same, text.findings(found))
        case "regrade":
            again = ladder.regrade_group(one.group)[one.place]
            return _told(not again.changed, text.regraded(again))
        case "reexecute":
            (done,) = ladder.reexecute([one])
            return _told(done.divergence is None, text.reexecution(done))
        case "reforward":
            for drift in ladder.reforward([one]):
                told = _told(True, [f"weights: {ladder.weights(one)}", *text.drift(drift)])
                return told | {"drift": drift.tokens}
            raise RecordError("it has no sampled tokens to compare")
        case _:
            raise ConfigError(f"replay {depth}: known here are {', '.join(DEPTHS)}")


def _told(same: bool, lines: Iterable[str]) -> dict[str, Any]:
    return {"same": same, "lines": list(lines)}
