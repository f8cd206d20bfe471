"""The digest taken beside the event loop: the one of all bytes in order, and no thread left behind."""

from __future__ import annotations

import random
import threading

import pytest
from blake3 import blake3

from peerloom.node.digest import ASIDE_BYTES, Digest


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("digest")]


@pytest.mark.parametrize("sizes", [[], [5, 7], [ASIDE_BYTES] * 9, [64, ASIDE_BYTES, 0, 3, 8 * ASIDE_BYTES, 1]])
def test_it_is_the_digest_of_the_parts_in_order(sizes: list[int]) -> None:
    parts = [random.Random(index).randbytes(size) for index, size in enumerate(sizes)]
    digest = Digest()
    for part in parts:
        digest.update(memoryview(part))
    assert bool(threads()) == (max(sizes, default=0) >= ASIDE_BYTES)
    assert digest.value() == blake3(b"".join(parts)).digest()
    assert not threads()


def test_one_left_unfinished_lets_go_of_its_parts() -> None:
    part = bytearray(8 * ASIDE_BYTES)
    digest = Digest()
    digest.update(memoryview(part))
    digest.close()
    digest.close()
    part.append(0)  # BufferError while a view of it is held
    assert not threads()
