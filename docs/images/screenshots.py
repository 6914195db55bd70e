"""Take the pictures of docs/replay.md: python docs/images/screenshots.py runs/quickstart"""

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
PICTURES = {
    "viewer-run": ("#/?step=20&outcome=mixed", "main h1", ""),
    "viewer-group": ("#/group/20/0?left=0&right=5", "text=They part", ""),
    "viewer-episode": ("#/episode/20/0/5", "section.turn", "c"),
}
"""For each: the page, what to wait for, and the keys to press then."""

run = sys.argv[1]
command = [sys.executable, "-m", "agentrl", "view", run, "--port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    assert server.stdout is not None
    at = server.stdout.readline().split()[-1]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (place, ready, keys) in PICTURES.items():
            page = browser.new_page(viewport={"width": 1000, "height": 760})
            page.goto(at + place)
            page.wait_for_selector(ready)
            for key in keys:
                page.keyboard.press(key)
            page.screenshot(path=HERE / f"{name}.png")
    server.terminate()
