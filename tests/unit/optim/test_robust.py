"""The clip: how far a liar moves a node, and that honest peers are let through."""

from __future__ import annotations

import math

import pytest
import torch

from peerloom.optim.gasloc import GASLoC
from peerloom.optim.robust import MedianClip, distance

from .conftest import Draw


def test_a_far_neighbour_counts_as_radius_times_the_median() -> None:
    clip = MedianClip(3.0)
    assert [clip.update(d) for d in (1.0, 2.0, 1.5, 1.0, 2.0)] == [1.0] * 5
    assert clip.median() == 1.5
    assert clip.update(1e9) == pytest.approx(4.5e-9)
    assert clip.update(4.4) == 1.0 and clip.state() == [1.0, 2.0, 1.5, 1.0, 2.0, 4.5, 4.4]


def test_before_five_distances_are_known_the_nearest_is_the_measure() -> None:
    clip = MedianClip(2.0)
    assert clip.median() is None and clip.update(100.0, expected=1.0) == 1.0  # nothing to compare with
    assert clip.update(1.0) == 1.0 and clip.update(100.0) == pytest.approx(0.02)
    assert clip.state() == [100.0, 1.0, 2.0]


def test_what_two_drifts_as_long_as_the_own_would_be_apart_is_usual() -> None:
    clip = MedianClip(2.0)
    assert [clip.update(0.001) for _ in range(20)] == [1.0] * 20
    assert clip.update(2.0, expected=1.0) == 1.0
    assert clip.update(8.0, expected=1.0) == 0.25
    assert clip.update(8.0) == pytest.approx(0.002 / 8)


def test_drifts_that_grow_do_not_cut_honest_partners_for_good() -> None:
    """A warm-up of few steps a round: lengths grow by half a round, then stay; the partner is 2.5 lengths away."""
    lengths = [0.01 * 1.5 ** min(k, 12) for k in range(40)]
    clip, alone = MedianClip(2.0), MedianClip(2.0)
    assert [clip.update(2.5 * length, math.sqrt(2) * length) for length in lengths] == [1.0] * 40
    assert min(alone.update(2.5 * length) for length in lengths) < 0.5  # by the median alone


def test_equal_peers_do_not_lock_a_node_up() -> None:
    clip = MedianClip(2.0)
    assert [clip.update(0.0) for _ in range(10)] == [1.0] * 10
    assert clip.update(5.0) == 1.0


def test_a_minority_of_liars_does_not_shift_the_median_beyond_honest_ones() -> None:
    clip = MedianClip(4.0, window=32)
    honest = [1.0 + 0.1 * (k % 5) for k in range(200)]
    for k, d in enumerate(honest):
        if k % 3 == 0:
            assert clip.update(1e6) <= 4.0 * 1.4 / 1e6 or k < 5
        assert clip.update(d) == 1.0
    median = clip.median()
    assert median is not None and 1.0 <= median <= 1.5


def test_the_state_goes_on_where_it_was() -> None:
    clip = MedianClip(2.0, window=4)
    for d in (1.0, 3.0, 2.0, 5.0, 1.0, 1.0):
        clip.update(d)
    again = MedianClip(2.0, 4, clip.state())
    assert len(clip.state()) == 4 and again.state() == clip.state()
    assert again.update(50.0) == clip.update(50.0) and again.median() == clip.median()


def test_growing_distances_are_followed() -> None:
    clip = MedianClip(3.0, window=8)
    assert all(clip.update(1.1**k) == 1.0 for k in range(60))


@pytest.mark.parametrize("lie", ["flipped", "huge", "frozen"])
def test_seven_honest_workers_reach_the_optimum_beside_a_liar(lie: str, draw: Draw) -> None:
    """Quadratic losses around one point; a node in no round moves by more than radius / 2 medians through its peer."""
    n, d, radius = 8, 40, 3.0
    target, noise = 5 * draw(1, d, dtype=torch.float32), draw(200, n, d, dtype=torch.float32)
    params = torch.zeros(n, d)
    workers = [GASLoC(row, eta=1.0, alpha=1.0, gamma=0.3, momentum="post") for row in params]
    clips = [MedianClip(radius) for _ in range(n)]
    for t in range(200):
        for worker in workers:
            worker.start_round()
        params += 0.2 * (target - params) + 0.05 * noise[t]
        drifts = [distance(row, worker.theta) for row, worker in zip(params, workers, strict=True)]
        ys = torch.stack([worker.proposal() for worker in workers])
        sent = ys.clone()
        sent[0] = {"flipped": -ys[0], "huge": 1e6 * ys[0], "frozen": torch.zeros(d)}[lie]
        shift = 1 + t % 7
        for i, worker in enumerate(workers):
            j = _partner(i, shift)
            scale = clips[i].update(distance(ys[i], sent[j]), expected=math.sqrt(2) * drifts[i])
            worker.mix([(scale, sent[j])])
            moved, median = distance(worker.previous, ys[i]), clips[i].median()
            usual = max(median or 0.0, math.sqrt(2) * drifts[i])
            assert moved <= radius / 2 * 1.5 * usual + 1e-4 or t < 10
    error = (params[1:] - target).norm(dim=1).max().item()
    assert error < 0.15 * float(target.norm())


def _partner(i: int, shift: int) -> int:
    return i ^ shift


def test_distances(draw: Draw) -> None:
    a, b = draw(2, 1000, dtype=torch.float32)
    assert distance(a, b) == pytest.approx(float((a.double() - b.double()).norm()), rel=1e-6)
    assert distance(a, a) == 0 and math.isnan(distance(a, torch.full((1000,), math.nan)))
    assert math.isinf(distance(a, torch.full((1000,), math.inf)))


def test_refusals() -> None:
    cases = [
        (lambda: MedianClip(0.5), "finite radius"),
        (lambda: MedianClip(math.inf), "finite radius"),
        (lambda: MedianClip(2.0, 0), "window of at least 1"),
        (lambda: MedianClip(2.0).update(math.nan), "is nan; it must be finite"),
        (lambda: MedianClip(2.0).update(math.inf), "is inf; it must be finite"),
        (lambda: MedianClip(2.0, 4, [-1.0]), "is -1.0"),
        (lambda: distance(torch.zeros(2), torch.zeros(3)), "two flat tensors"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
