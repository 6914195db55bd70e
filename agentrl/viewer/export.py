"""Puts a run into one HTML file: the page, its style, and the answers the server would give.

The file needs neither network nor server, and holds nothing that runs but the page's own script,
whose hash it names.
"""

import base64
import gzip
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.atomic import whole_file
from agentrl.errors import AgentRLError, ConfigError, RecordError
from agentrl.metrics import as_line
from agentrl.viewer.details import Details
from agentrl.viewer.rows import Row, Wanted
from agentrl.viewer.server import PAGE


def export(
    details: Details, path: Path, wanted: Wanted, *, groups: int, depths: Sequence[str] = ()
) -> int:
    """Write the newest `groups` groups that are wanted; returns how many there are.

    `depths` are rungs of the replay ladder to run for every episode. Raises OSError, RecordError.
    """
    if wanted.step is not None and wanted.step not in details.rows.steps():
        raise RecordError(f"{details.run} has no step {wanted.step}")
    if depths:
        from agentrl.viewer.replays import DEPTHS

        for depth in depths:
            if depth not in DEPTHS:
                raise ConfigError(f"--depth {depth}: known here are {', '.join(DEPTHS)}")
    rows, _ = details.rows.page(wanted, begin=0, size=groups)
    answers: dict[str, Any] = {"run": details.overview()}
    for row in rows:
        if row["number"] is not None:
            answers |= dict(_answers(details, row, depths))
    page = _page(answers | {"rows": rows})
    with whole_file(path) as file:
        file.write(page.encode(errors="replace"))
    return len(rows)


def _answers(details: Details, row: Row, depths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    step, number = row["step"], row["number"]
    places = [member["place"] for member in row["members"]]
    yield f"group/{step}/{number}", details.group(step, number)
    for place in places:
        at = f"{step}/{number}/{place}"
        yield f"trajectory/{at}", details.trajectory(step, number, place)
        for other in places:
            found = details.difference(step, number, place, other)
            yield f"difference/{at}/{other}", found
        for depth in depths:
            one = details.episode(step, number, place)
            yield f"replay/{depth}/{at}", _replayed(details, depth, one)


def _replayed(details: Details, depth: str, one: Any) -> dict[str, Any]:
    from agentrl.viewer.replays import replay  # loads torch, which looking does not need

    try:
        return replay(details, depth, one)
    except AgentRLError as error:
        return {"same": False, "lines": [str(error)]}


def _page(answers: dict[str, Any]) -> str:
    """The page with everything in it."""
    style, script, html = (
        PAGE.joinpath(name).read_text(encoding="utf-8")
        for name in ("view.css", "view.js", "index.html")
    )
    # Base64: nothing that a model wrote can end the element that holds it.
    data = base64.b64encode(gzip.compress(as_line(answers).encode())).decode()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>'
    embedded = f'<script type="application/gzip" id="data">{data}</script>\n'
    return (
        html.replace("<title>", head)
        .replace('<link rel="stylesheet" href="view.css">', f"<style>{style}</style>")
        .replace('<script src="view.js"></script>', f"{embedded}<script>{script}</script>")
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
