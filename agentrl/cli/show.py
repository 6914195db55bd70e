"""A group in the terminal: who wrote what, turn by turn, and what it was worth."""

from rich.console import Console
from rich.text import Text

from agentrl.types import Group, Message, Trajectory, Verdict

MODEL, WORLD, FACT = "bold green", "cyan", "dim"


def show_group(console: Console, group: Group, *, member: int | None = None) -> None:
    """Print the trajectories of a group; model text and observations differ in colour and mark."""
    console.print(Text(f"task {group.task_id}", style="bold"))
    for trajectory, verdict in zip(group.trajectories, group.verdicts, strict=True):
        if member in (None, trajectory.member):
            _show(console, trajectory, verdict)
    for fault in group.faults:
        console.print(Text(f"  lost: {printable(fault)}", style="red"))


def printable(text: str) -> str:
    """The text with control characters written out: model output can't steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _show(console: Console, trajectory: Trajectory, verdict: Verdict) -> None:
    reward = f"invalid ({verdict.invalid})" if verdict.reward is None else f"{verdict.reward:g}"
    head = (
        f"  member {trajectory.member}: reward {reward}, {trajectory.ending}, "
        f"{trajectory.action_tokens} action tokens of {len(trajectory.token_ids)}"
    )
    console.print(Text(printable(head), style="bold"))
    for message in trajectory.prompt:
        _line(console, "<", message, WORLD)
    for turn in trajectory.turns:
        _line(console, ">", turn.message, MODEL)
        for reply in turn.reply:
            _line(console, "<", reply, WORLD)
    for event in trajectory.events:
        text = f"    {event.name} {event.status}, {event.output_bytes} bytes, {event.seconds:.3f} s"
        console.print(Text(printable(text), style=FACT))


def _line(console: Console, mark: str, message: Message, style: str) -> None:
    calls = [f"{c.name or '?'}({c.arguments})" for c in message.tool_calls]
    body = " ".join(part for part in (message.reasoning, message.content, *calls) if part)
    console.print(Text(f"    {mark} {message.role}: {printable(body)}", style=style))
