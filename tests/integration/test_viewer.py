"""The viewer in a real browser: hostile text, long output, unfinished runs, keys, one file."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import small_run

from agentrl.cli.entry import run as cli
from agentrl.lesson import Lesson
from agentrl.store import ParquetStore
from agentrl.types import (
    ActionTokens,
    Ending,
    Group,
    Message,
    ObservationTokens,
    SandboxSpec,
    Task,
    ToolCall,
    ToolEvent,
    Trajectory,
    Turn,
    Verdict,
    user,
)

api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
    "</script></style></pre>{{7*7}}&lt;b&gt;\"'`javascript:window.hacked=1"
)
ODD = (
    "emoji 👩‍🔬 ❤️ 1️⃣ and עברית \u202eright to left\u202c \x1b[31mred\x00 half \udc80 "
    "so\u00adft ze\u200bro jo\u200din \U000e0068\U000e0069 va\ufe01ry fil\u3164ler end"
)
LONG = "long output " * 90_000


def a_group(*, said: str, reply: str, rewards: Sequence[float | None], task: str = "t") -> Group:
    """Members that call a tool, see its reply and answer; a reward of None has no verdict."""
    members = [_trajectory(task, number, said, reply) for number in range(len(rewards))]
    return Group(
        task_id=task,
        trajectories=tuple(members),
        verdicts=tuple(
            Verdict(invalid="VerifierFault: late")
            if reward is None
            else Verdict(
                reward=reward, passed=reward > 0.5, components={"right": reward}, note=said
            )
            for reward in rewards
        ),
        task=Task(id=task, prompt=(user(said),), sandbox=SandboxSpec(files={"data.txt": b"12"})),
        artifacts=tuple({"out/<b>.txt": b"\xff\xfe"} for _ in members),
    )


def _trajectory(task: str, member: int, said: str, reply: str) -> Trajectory:
    call = ToolCall(id="c", name="python", arguments=json.dumps({"code": said}))
    acts = [
        ActionTokens(
            token_ids=(5 + member, n), logprobs=(-0.5, -4.0), versions=(2, 3), finish="stop"
        )
        for n in (7, 8)
    ]
    turns = (
        Turn(
            observation=ObservationTokens(token_ids=(1, 2, 3)),
            action=acts[0],
            message=Message(role="assistant", content="", tool_calls=(call,)),
            reply=(Message(role="tool", content=reply, tool_call_id="c"),),
        ),
        Turn(
            observation=ObservationTokens(token_ids=(4,)),
            action=acts[1],
            message=Message(role="assistant", content=f"{said} {member}"),
        ),
    )
    event = ToolEvent(
        turn=0,
        call_id="c",
        name="python",
        status="error",
        at_s=0.1,
        seconds=0.2,
        output_bytes=len(reply),
        exit_code=1,
    )
    return Trajectory(
        id=f"{task}/{member}",
        task_id=task,
        member=member,
        seed=9,
        prompt=(user(said),),
        turns=turns,
        ending=Ending.ANSWERED if member else Ending.CUT_OFF,
        events=(event,),
    )


def a_run(folder: Path, *groups: Group, steps: int = 1) -> Path:
    """A run directory with these groups in its last step."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {}\n")
    store = ParquetStore(folder / "trajectories", secrets=())
    plain = a_group(said="plain words", reply="42", rewards=(0.0, 1.0), task="plain")
    for step in range(steps):
        store.append([plain, *groups] if step == steps - 1 else [plain], version=step)
        learn(folder, step)
    lessons = [
        Lesson(
            group=0, trajectory_id="plain/0", member=0, advantages=(-1.0, -1.0), trained_tokens=4
        ),
        Lesson(
            group=0,
            trajectory_id="plain/1",
            member=1,
            advantages=(),
            trained_tokens=0,
            silent="it earned the baseline",
        ),
    ]
    store.append_lessons(lessons, {"loss": 0.0}, version=steps - 1)
    return folder


def learn(folder: Path, step: int) -> None:
    row = {"kind": "step", "step": step, "success_rate": 0.25 * step, "reward_mean": 0.5}
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong that it does not show."""
    opened, wrong = browser.new_page(), []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    opened.set_default_timeout(45_000)
    yield opened
    opened.close()
    assert wrong == []


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Starts the verb in a process of its own; returns its address."""
    running: list[subprocess.Popen[str]] = []

    def start(run: Path) -> str:
        command = [sys.executable, "-m", "agentrl", "view", str(run), "--port", "0", "--json"]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout is not None
        return json.loads(running[-1].stdout.readline())["url"]

    yield start
    for process in running:
        process.terminate()
        process.wait(timeout=20)


Serve = Callable[[Path], str]


def text(page: Any) -> str:
    return page.inner_text("main")


def test_what_a_model_wrote_is_shown_and_never_runs(
    page: Any, serve: Serve, tmp_path: Path
) -> None:
    run = a_run(
        tmp_path / "run", a_group(said=HOSTILE, reply=HOSTILE, rewards=(1.0, 0.0), task=HOSTILE)
    )
    at = serve(run)
    assert HOSTILE in goto(page, at, "#/", "Groups")
    assert text(page).count("✗ 0") == 2 and text(page).count("✓ 1") == 2, "not by colour alone"
    shown = goto(page, at, "#/group/0/1", "Side by side")
    assert shown.count(HOSTILE) >= 5
    page.goto(f"{at}#/episode/0/1/1")
    page.wait_for_selector("section.turn")
    page.click("text=what the verifier saw of its files")
    assert "out/<b>.txt, 2 bytes" in text(page) and "\\xff\\xfe" in text(page)
    assert HOSTILE in text(page) and "! python: error, exit 1" in text(page)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('main img, main script, main b b').length") == 0


def goto(page: Any, at: str, place: str, until: str) -> str:
    page.goto(at + place)
    page.wait_for_selector(f"text={until}")
    return text(page)


def test_odd_text_is_whole_and_control_characters_are_seen(
    page: Any, serve: Serve, tmp_path: Path
) -> None:
    at = serve(a_run(tmp_path / "run", a_group(said=ODD, reply=ODD, rewards=(1.0, 0.0))))
    shown = goto(page, at, "#/episode/0/1/0", "turn 0")
    assert "👩‍🔬" in shown and "עברית" in shown
    assert "␛[31mred␀" in shown, "as pictures"
    assert "⟨202e⟩right to left⟨202c⟩" in shown, "in the order in which it was written"
    assert "half" in shown and "end" in shown
    assert "❤️ 1️⃣" in shown and "so⟨00ad⟩ft ze⟨200b⟩ro jo⟨200d⟩in ⟨e0068⟩⟨e0069⟩" in shown
    assert "va⟨fe01⟩ry fil⟨3164⟩ler" in shown, "what has no shape is seen"


def test_names_of_any_length_are_clipped(page: Any, serve: Serve, tmp_path: Path) -> None:
    group = a_group(said="x", reply="y", rewards=(1.0, None))
    name = "n" * 300_000
    call = ToolCall(id="c", name=name, arguments="{}", error=name)
    first, second = group.trajectories
    turn = replace(
        first.turns[0], message=Message(role="assistant", content="", tool_calls=(call,))
    )
    event = replace(first.events[0], name=name)
    first = replace(first, turns=(turn, first.turns[1]), events=(event,))
    verdicts = (replace(group.verdicts[0], note=name), Verdict(invalid=name))
    odd = replace(group, trajectories=(first, second), verdicts=verdicts)
    at = serve(a_run(tmp_path / "run", odd))
    assert "n… (300000 characters)" in goto(page, at, "#/", "Groups") and len(text(page)) < 30_000
    assert len(goto(page, at, "#/group/0/1", "Side by side")) < 60_000
    assert len(goto(page, at, "#/episode/0/1/0", "turn 0")) < 90_000


def test_curves_of_a_long_run_are_drawn(page: Any, serve: Serve, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    row = {"kind": "step", "success_rate": 0.5, "reward_mean": 0.5}
    with (run / "metrics.jsonl").open("w") as lines:
        lines.writelines(json.dumps({**row, "step": n}) + "\n" for n in range(20_000))
    at = serve(run)
    assert "success: training 0.5" in goto(page, at, "#/", "success: training")
    steps = [row["step"] for row in httpx.get(f"{at}api/run").json()["metrics"]]
    assert len(steps) == 1000 and steps[-1] == 19_999


def test_a_megabyte_is_shown_in_part_until_it_is_asked_for(
    page: Any, serve: Serve, tmp_path: Path
) -> None:
    at = serve(a_run(tmp_path / "run", a_group(said="x", reply=LONG, rewards=(1.0, 0.0))))
    shown = goto(page, at, "#/episode/0/1/0", "turn 0")
    assert len(shown) < 60_000
    page.click(f"text=show all {len(LONG)} characters")
    assert len(text(page)) > 1_000_000


def test_groups_are_found_by_what_they_were(page: Any, serve: Serve, tmp_path: Path) -> None:
    others = [
        a_group(said="needle in words", reply="r", rewards=(1.0, 1.0), task="solved"),
        a_group(said="y", reply="r", rewards=(0.0, None), task="lost"),
    ]
    at = serve(a_run(tmp_path / "run", *others, steps=3))
    wanted = {
        "": {"plain", "solved", "lost"},
        "outcome=solved": {"solved"},
        "outcome=faulted": {"lost"},
        "outcome=silent": {"plain"},
        "text=NEEDLE": {"solved"},
        "tool=error&step=2": {"plain", "solved", "lost"},
        "ending=cut_off&low=0.9": {"plain", "solved"},
        "high=-1": set(),
    }
    for query, tasks in wanted.items():
        page.goto(f"{at}#/?{query}")
        page.reload()
        page.wait_for_selector("form")
        found = {cell.inner_text() for cell in page.query_selector_all("td:nth-child(2)")}
        assert found == tasks, query
    page.goto(f"{at}#/")
    page.wait_for_selector("td:text-is('lost')")
    page.fill("input[name=text]", "needle")
    page.press("input[name=text]", "Enter")
    page.wait_for_selector("tbody tr:only-child")


def test_everything_can_be_reached_by_keys(page: Any, serve: Serve, tmp_path: Path) -> None:
    at = serve(a_run(tmp_path / "run"))
    goto(page, at, "#/", "Groups")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Side by side")
    assert "none: it earned the baseline" in text(page), "why no gradient"
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=member 0", state="visible")
    page.wait_for_selector("section.turn")
    for colouring in ("logprob", "advantage", "drift", "author"):
        page.keyboard.press("c")
        assert page.input_value("select[aria-label='colour tokens by']") == colouring
    page.keyboard.press("n")
    page.wait_for_selector("h1:has-text('member 1')")
    page.keyboard.press("u")
    page.wait_for_selector("text=Side by side")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open] >> text=next colouring")


def test_every_part_of_a_forked_talk_can_be_opened(page: Any, serve: Serve, tmp_path: Path) -> None:
    forked = a_group(said="s", reply="r", rewards=(1.0, 1.0, 0.0), task="forked")
    first, second, other = forked.trajectories
    parts = (first, replace(second, member=0), replace(other, member=1))
    at = serve(a_run(tmp_path / "run", replace(forked, trajectories=parts)))
    shown = goto(page, at, "#/group/0/1", "Side by side")
    assert "member 0, part 1" in shown and "member 0, part 2" in shown and "member 1" in shown
    page.click("a:text-is('member 0, part 2')")
    page.wait_for_selector("section.turn")
    sampled = [token.inner_text().strip() for token in page.query_selector_all("span.model")]
    assert sampled == ["6", "7", "6", "8"], "the second part's own ids"
    page.keyboard.press("n")
    page.wait_for_selector("h1:has-text('member 1')")


def test_the_strip_tells_each_tokens_author_and_numbers(
    page: Any, serve: Serve, tmp_path: Path
) -> None:
    at = serve(a_run(tmp_path / "run"))
    goto(page, at, "#/episode/0/0/1", "turn 0")
    tokens = page.query_selector_all(".strip span.model")
    assert [token.inner_text().strip() for token in tokens] == ["6", "7", "6", "8"], (
        "ids: no tokenizer"
    )
    tokens[1].hover()
    assert "id 7 · model · logprob -4" in page.inner_text("footer")
    page.keyboard.press("c")
    dark, light = (
        page.query_selector_all(".strip span.model")[n].get_attribute("class") for n in (1, 0)
    )
    assert (dark, light) == ("model dark", "model light")


def test_tokens_are_gone_through_by_keys(page: Any, serve: Serve, tmp_path: Path) -> None:
    goto(page, serve(a_run(tmp_path / "run")), "#/episode/0/0/1", "turn 0")
    page.focus("details + .strip")
    for key, told in (("ArrowRight", "id 6"), ("ArrowRight", "id 7"), ("ArrowRight", "id 7"),
                      ("ArrowLeft", "id 6")):  # fmt: skip
        page.keyboard.press(key)
        assert told in page.inner_text("footer")
    assert page.query_selector(".here").inner_text().strip() == "6"


def test_an_unfinished_run_is_shown_and_followed(page: Any, serve: Serve, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("run: {}\n")
    at = serve(run)
    assert "no step has been taken yet" in goto(page, at, "#/", "Groups")
    shutil.copytree(a_run(tmp_path / "other", steps=2), run, dirs_exist_ok=True)
    (run / "trajectories" / "step-00000002.parquet.tmp").write_bytes(b"PAR1half")
    (run / "trajectories" / "step-00000003.parquet").write_bytes(b"PAR1cut short")
    metrics = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(f'{metrics}{{"kind": "step", "st')
    page.reload()
    shown = goto(page, at, "#/", "success: training")
    assert "step-00000003.parquet is cut or damaged" in shown and "plain" in shown
    (run / "metrics.jsonl").write_text(metrics)
    learn(run, 7)
    fresh = a_group(said="fresh", reply="1", rewards=(1.0,), task="fresh words")
    ParquetStore(run / "trajectories", secrets=()).append([fresh], version=8)
    page.wait_for_selector("text=success: training 1.75", timeout=12_000)
    page.wait_for_selector("text=fresh words", timeout=12_000)


def test_one_file_shows_the_same_without_server_or_network(
    page: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(
        tmp_path / "run", a_group(said=HOSTILE, reply=ODD, rewards=(1.0, 0.0), task=HOSTILE)
    )
    out = tmp_path / "run.html"
    assert cli(["view", str(run), "--export", str(out)]) == 0
    assert "<script>window" not in out.read_text()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    shown = goto(page, out.as_uri(), "#/", "Groups")
    assert HOSTILE in shown and "plain" in shown
    page.goto(f"{out.as_uri()}#/?text=PLAIN")
    page.wait_for_selector("tbody tr:only-child")
    goto(page, out.as_uri(), "#/group/0/1", "They part at turn 0")
    assert HOSTILE in goto(page, out.as_uri(), "#/episode/0/1/1", "turn 0")
    assert page.evaluate("window.hacked") is None
    assert {url.split("#")[0] for url in asked} == {out.as_uri()}


def test_one_file_names_a_step_that_is_damaged_and_stays_small(page: Any, tmp_path: Path) -> None:
    """The output is in the file a few times, whatever the number of pairs of members."""
    members = a_group(said="x", reply=LONG, rewards=(1.0, 0.0) * 4, task="long")
    run, out = a_run(tmp_path / "run", members), tmp_path / "run.html"
    (run / "trajectories" / "step-00000003.parquet").write_bytes(b"PAR1cut short")
    assert cli(["view", str(run), "--export", str(out)]) == 0
    assert out.stat().st_size < 500_000
    shown = goto(page, out.as_uri(), "#/", "Groups")
    assert "step-00000003.parquet is cut or damaged" in shown and "long" in shown
    goto(page, out.as_uri(), "#/group/0/1?left=0&right=7", "They part at turn 0")


def test_replays_are_run_from_the_page(page: Any, serve: Serve, tmp_path: Path) -> None:
    own = ("warm_start.steps=0", "run.steps=1", f"run.dir={tmp_path / 'run'}")
    command = [sys.executable, "-m", "agentrl", "train", str(small_run.QUICKSTART), "--quiet"]
    # In a process of its own: the browser's driver has an event loop here.
    settings = [part for one in (*small_run.SMALL, *own) for part in ("--set", one)]
    subprocess.run([*command, *settings], check=True)
    at = serve(tmp_path / "run")
    goto(page, at, "#/episode/0/0/0", "turn 0")
    for depth in ("check", "regrade", "reexecute"):
        page.click(f"button:text-is('{depth}')")
        page.wait_for_selector(f"text=✓ {depth}: as recorded")
    page.click("button:text-is('reforward')")
    page.wait_for_selector("text=✓ reforward")
    assert page.input_value("select[aria-label='colour tokens by']") == "drift"


def test_nobody_else_is_answered(serve: Serve, tmp_path: Path) -> None:
    at = serve(a_run(tmp_path / "run"))
    good = httpx.get(f"{at}api/run")
    assert (
        good.status_code == 200 and "script-src 'self'" in good.headers["content-security-policy"]
    )
    assert httpx.get(f"{at}api/run", headers={"Host": "evil.example"}).status_code == 400
    assert httpx.post(f"{at}api/replay/check/0/0/0").json() == {
        "error": "a replay is asked for by the page itself"
    }
    for place in ("..%2f..%2fconfig.yaml", "config.yaml", "__init__.py"):
        assert httpx.get(f"{at}{place}").status_code == 404
    wrong = {
        "api/groups?outcome=x": "outcome",
        "api/groups?begin=a": "begin",
        "api/groups?foo=1": "foo",
        f"api/groups?step={'9' * 400}": "step",
        f"api/groups?begin={'9' * 5000}": "begin",
        "api/groups?begin=²": "begin",
        f"api/group/{'9' * 5000}/0": "nothing at that address",
        f"api/group/0/{'9' * 30}": "nothing at that address",
        "api/group/0": "nothing at that address",
        "api/group/0/9": "no group 9",
        "api/group/7/0": "does not exist",
        "api/trajectory/0/0/9": "no trajectory 9",
        "api/difference/0/0/0/9": "no trajectory 9",
    }
    for place, named in wrong.items():
        answer = httpx.get(at + place)
        assert answer.status_code == 400 and named in answer.json()["error"], place


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda at: None, "neither a run"),
        (lambda at: at.mkdir(), "neither a run"),
        (lambda at: at.write_text("x"), "neither a run"),
    ],
)
def test_what_is_no_run_is_one_line(
    make: Callable[[Path], object], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "nothing")
    assert cli(["view", str(tmp_path / "nothing")]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and named in err


def test_a_step_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.html"
    assert cli(["view", str(a_run(tmp_path / "run")), "--export", str(out), "--step", "9"]) == 2
    assert "has no step 9" in capsys.readouterr().err and not out.exists()
