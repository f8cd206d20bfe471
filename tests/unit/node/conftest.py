"""What several files of this folder begin with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .tiny import write_text
from .wire import Swarm


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of text to train on."""
    return write_text(tmp_path / "text")


@pytest.fixture
async def no_leaks() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    # grpc's own poller callbacks end within a few turns of the loop
    for _ in range(100):
        if not (left := asyncio.all_tasks() - before - {asyncio.current_task()}):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"tasks left over: {left}")


@pytest.fixture(params=["grpc", "memory"])
def transport(request: pytest.FixtureRequest) -> str:
    """What a swarm talks over; a file that is about one of them has its own."""
    return str(request.param)


@pytest.fixture
async def swarm(transport: str, no_leaks: None) -> AsyncIterator[Swarm]:
    swarm = Swarm(transport)
    yield swarm
    await swarm.stop()
