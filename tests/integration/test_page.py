"""The page in a real browser: loads, lives, survives its node's restart, and everybody can read it.

Needs Chromium (Debian: apt-get install chromium); Playwright drives it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from peerloom.node.http_endpoint import Endpoint
from tests import screenshots
from tests.unit.node.page_swarm import FakeSwarm, served

CHROMIUM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium runs these"),
]
SERIOUS = {"serious", "critical"}


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield launched
        finally:
            await launched.close()


@asynccontextmanager
async def opened(launched: Any, url: str, **options: Any) -> AsyncIterator[tuple[Any, list[str]]]:
    """A page at `url`, its rows drawn, and a list of what goes wrong on it."""
    context = await launched.new_context(**options)
    page, wrong = await context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else wrong.append(request.url))
    await page.goto(url)
    await page.wait_for_selector("#nodes tbody tr")
    try:
        yield page, wrong
    finally:
        await context.close()


def expecting(page: Any, selector: str) -> Any:
    """Playwright's assertions on it, which wait."""
    from playwright.async_api import expect

    return expect(page.locator(selector))


def rows(page: Any) -> Any:
    return expecting(page, "#nodes tbody tr")


def swarm_of(count: int) -> FakeSwarm:
    swarm = FakeSwarm(count, now=time.time() - 600)
    for _ in range(30):
        swarm.step()
        swarm.feed.look()
    return swarm


async def test_200_nodes_live_and_by_keyboard() -> None:
    swarm = swarm_of(200)
    async with served(swarm) as server, browser() as launched, opened(launched, server.url) as (page, wrong):
        assert await page.locator("#nodes tbody tr").count() == 201
        assert await page.locator("#loss path.curve").count() == 200
        assert await page.locator("#graph circle").count() == 201
        assert await page.inner_text("#health") == "healthy"
        swarm.step()
        swarm.change("node-007", name="<img src=x onerror=alert(1)>", state="stalled", reason="no step for 90 s")
        swarm.leave("node-008")
        swarm.feed.look()
        await page.wait_for_selector("#health.degraded")
        assert "no step for 90 s" in await page.inner_text("#problems")
        assert "node-008 has left" in await page.inner_text("#events")
        assert await page.locator("#nodes tbody tr").count() == 200
        await page.keyboard.press("/")
        await page.keyboard.type("stalled")
        await rows(page).to_have_count(1)
        assert "<img src=x" in await page.inner_text("#nodes tbody tr")
        await page.keyboard.press("Escape")
        await rows(page).to_have_count(200)
        await page.locator("#nodes tbody tr").first.focus()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        assert await page.locator("#nodes tr[aria-selected=true]").count() == 1
        assert await page.locator("#loss path.marked").count() == 1
        await page.get_by_role("button", name="Loss").click()
        first = await page.locator("th[aria-sort=ascending]").inner_text()
        assert first.startswith("Loss")
        assert not wrong


async def test_it_comes_back_when_its_node_does() -> None:
    swarm = swarm_of(5)
    async with browser() as launched:
        async with served(swarm) as server:
            port = int(server.url.split(":")[-1].strip("/"))
            context = await launched.new_context()
            page = await context.new_page()
            await page.goto(server.url)
            await page.wait_for_selector("#nodes tbody tr")
        await expecting(page, "#link").to_contain_text("does not answer")
        again = swarm_of(6)
        async with served(again, Endpoint("127.0.0.1", port, moves=False)):
            await rows(page).to_have_count(7, timeout=30_000)
            assert await page.inner_text("#link") == ""
            await context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_is_accessible_and_fits_a_phone(scheme: str) -> None:
    from axe_playwright_python.async_playwright import Axe

    swarm = swarm_of(12)
    swarm.change("node-003", state="stalled", reason="no step for 90 s")
    swarm.feed.look()
    phone = {"viewport": {"width": 360, "height": 640}, "color_scheme": scheme, "bypass_csp": True}
    async with served(swarm) as server, browser() as launched, opened(launched, server.url, **phone) as (page, wrong):
        await page.locator("#nodes tbody tr").nth(1).click()
        found = (await Axe().run(page)).response["violations"]
        assert not [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SERIOUS]
        widths = await page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert widths[0] <= widths[1], "the page itself does not scroll sideways"
        assert not wrong


async def test_the_script_makes_the_picture_of_the_readme(tmp_path: Path) -> None:
    await screenshots.page(screenshots.swarm(), tmp_path)
    made, kept = ((folder / "page.png").read_bytes() for folder in (tmp_path, screenshots.FOLDER))
    assert made[:24] == kept[:24], "a PNG of the same size"
