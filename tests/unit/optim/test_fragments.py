"""Fragments: contiguous, aligned, balanced, and staggered over the round."""

from __future__ import annotations

import pytest
import torch

from peerloom.optim.fragments import due_after, fragments, offset, own_round
from peerloom.optim.gasloc import GASLoC

from .conftest import Draw


@pytest.mark.parametrize(("numel", "count", "alignment"), [(67824, 4, 256), (1000, 3, 1), (10, 1, 256), (513, 3, 256)])
def test_slices_cover_everything_once(numel: int, count: int, alignment: int) -> None:
    parts = fragments(numel, count, alignment)
    assert len(parts) == count and (parts[0].start, parts[-1].stop) == (0, numel)
    assert all(a.stop == b.start for a, b in zip(parts, parts[1:], strict=False))
    assert all(part.start % alignment == 0 for part in parts)
    sizes = [part.stop - part.start for part in parts]
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= 2 * alignment


@pytest.mark.parametrize(("h", "count"), [(16, 4), (24, 4), (16, 1), (1, 1), (5, 3), (3, 5), (10, 10)])
def test_each_fragment_is_due_once_a_round_evenly_spread(h: int, count: int) -> None:
    seen = [0] * count
    for step in range(1, 4 * h + 1):
        due = due_after(step, h, count)
        assert len(due) <= -(-count // h)
        for f in due:
            assert own_round(step, h, count, f) == seen[f]
            seen[f] += 1
    assert seen == [4] * count
    assert offset(count - 1, h, count) == h and due_after(0, h, count) == []
    assert [due_after(step, 4, 2) for step in range(1, 6)] == [[], [0], [], [1], []]


def test_a_fragment_is_a_gasloc_over_a_slice(draw: Draw) -> None:
    """Mixing every fragment at the end of the round is mixing the whole."""
    whole = draw(600, dtype=torch.float32)
    cut, peer, step = whole.clone(), draw(600, dtype=torch.float32), draw(600, dtype=torch.float32)
    hyper = {"eta": 0.9, "alpha": 1.0, "gamma": 0.3}
    one = GASLoC(whole, **hyper)
    parts = fragments(600, 3, 8)
    several = [GASLoC(cut[part], **hyper) for part in parts]
    for worker in [one, *several]:
        worker.start_round()
    whole += step
    cut += step
    one.proposal()
    one.mix([(1.0, peer)])
    for worker, part in zip(several, parts, strict=True):
        worker.proposal()
        worker.mix([(1.0, peer[part])])
    assert torch.equal(whole, cut)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="make at most 2 fragments of 256, not 3"):
        fragments(512, 3)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        fragments(512, 0)
    with pytest.raises(ValueError, match="at least 1, got 0 and 2"):
        due_after(1, 0, 2)
