"""Seconds to the viewer's pages on a large run, in a real browser.

    python benchmarks/viewer.py --trajectories 10000

Medians of several loads. "cold" is the first load after the server has started, with nothing read
yet; a search looks through every word of the run.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from store import GROUP, Maker

from agentrl.store import ParquetStore

STEP = 256
PAGES = {
    "first page": "#/",
    "groups of one step": "#/?step=0",
    "mixed groups": "#/?outcome=mixed",
    "text in no group": "#/?text=nowhere",
    "a group": "#/group/0/3",
    "a trajectory": "#/episode/0/3/1",
}


def make_run(folder: Path, trajectories: int, tokens: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {}\n")
    maker, store = Maker(tokens, 50_000, seed=0), ParquetStore(folder / "trajectories")
    for step in range(-(-trajectories // STEP)):
        groups = [maker.group(step * STEP // GROUP + n) for n in range(STEP // GROUP)]
        store.append(groups, version=step)


@contextmanager
def served(run: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "agentrl", "view", str(run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.terminate()
    process.wait()


def seconds(page: Any, at: str) -> float:
    page.goto("about:blank")
    begun = time.perf_counter()
    page.goto(at)
    page.wait_for_selector("main h1")
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2000, help="ids in a trajectory")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        run = Path(name) / "run"
        make_run(run, args.trajectories, args.tokens)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page()
        page.set_default_timeout(120_000)
        print(f"{args.trajectories} trajectories of {args.tokens} tokens")
        print(f"{'page':24}{'cold, ms':>10}{'warm, ms':>10}")
        for what, place in PAGES.items():
            with served(run) as at:
                cold, *warm = (seconds(page, at + place) for _ in range(args.repeats + 1))
            print(f"{what:24}{cold * 1000:10.0f}{statistics.median(warm) * 1000:10.0f}")
        browser.close()


if __name__ == "__main__":
    main()
