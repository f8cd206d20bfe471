"""One swarm of real processes for all tests of this folder: starting a node costs seconds of imports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers import Swarm, swarm_folder, write_run


@pytest.fixture(scope="package")
def swarm() -> Iterator[Swarm]:
    """A bootstrap node; a test asks for the trainers it needs, and may stop or kill them."""
    with swarm_folder() as folder:
        variables = {"TMPDIR": str(folder / "tmp"), "PEER_CHECKPOINT_EVERY_S": "1"}
        swarm = Swarm(folder, write_run(folder / "run"), variables)
        try:
            swarm.start()
            yield swarm
        finally:
            swarm.stop()
