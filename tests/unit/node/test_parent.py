"""What a killed `peer demo` started ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from peerloom.node.parent import ENDS_WITH

CHILD = (
    "import time; from peerloom.node.parent import heed_parent; heed_parent();"
    "print('up', flush=True); time.sleep(600)"
)
DEMO = f"""
import asyncio, sys
from pathlib import Path
from peerloom.node.children import Children

async def main():
    child = await Children(Path(sys.argv[1]), stop_within_s=5.0).start("child", (sys.executable, "-c", {CHILD!r}))
    await child.first_line()
    print(child.process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux does")
def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", DEMO, str(tmp_path)], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        child = psutil.Process(int(demo.stdout.readline()))
        demo.kill()
        child.wait(timeout=30)


@pytest.mark.parametrize(("parent", "says"), [(os.getpid(), True), (1, False)], ids=["alive", "gone"])
def test_a_command_heeds_the_parent_that_it_is_told(parent: int, says: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "peerloom.node", "--version"],
        env={**os.environ, ENDS_WITH: str(parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert bool(done.stdout) == says
