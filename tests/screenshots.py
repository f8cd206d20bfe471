"""Makes the pictures of README from a swarm that is made up: `python -m tests.screenshots`; needs chromium."""

from __future__ import annotations

import asyncio
import io
import shutil
import time
from pathlib import Path

from rich.console import Console

from peerloom.node.status import rows_of
from peerloom.node.status_screen import View, frame
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus
from tests.unit.node.page_swarm import FakeSwarm, served

FOLDER = Path(__file__).resolve().parents[1] / "deploy/images"
SIZE = {"width": 1200, "height": 1250}


def swarm() -> FakeSwarm:
    """Twenty trainers after half an hour; one is stalled, one has fallen silent."""
    made = FakeSwarm(20, now=time.time() - 1800)
    for step in range(180):
        if step == 176:
            made.frozen.add(made.peer("node-011"))
        made.step()
        made.feed.look()
    reason = "no step for 95 s (usually one takes 0.21 s): the training process is frozen, starved or swapped out"
    made.change("node-004", state="stalled", reason=reason)
    made.feed.look()
    return made


def terminal(made: FakeSwarm, folder: Path = FOLDER) -> None:
    """status.svg: `peer status --watch` at 80 columns."""
    rows = rows_of([made.status(), *(NodeStatus(record=record) for record in made.records.values())], made.now)
    console = Console(width=80, height=28, record=True, file=io.StringIO(), force_terminal=True)
    console.print(frame(View(marked=3), RunSpec(), RunSpec().run_id, rows, 80, 28))
    (folder / "status.svg").write_text(console.export_svg(title="peer status --watch"))


async def page(made: FakeSwarm, folder: Path = FOLDER) -> None:
    """page.png: the page of a node."""
    from playwright.async_api import async_playwright

    async with served(made) as server, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = await browser.new_page(viewport=SIZE)
        await opened.goto(server.url)
        await opened.locator("#nodes tbody tr").nth(2).click()
        await opened.screenshot(path=folder / "page.png")
        await browser.close()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    shown = swarm()
    terminal(shown)
    asyncio.run(page(shown))
