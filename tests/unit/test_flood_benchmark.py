"""The flood's benchmark at a small size: its rows have their names, and the bytes at the paper's setting hold."""

from __future__ import annotations

import asyncio

import pytest

from tests.benchmarks import seedflow_flood


def test_payload_of_a_ring_keeps_to_the_papers_figure() -> None:
    """Introductions of origins weigh more in a short run than in the paper's."""
    steps = 50
    introductions = 2 * 16 * 34
    payload = seedflow_flood.payload_bytes(steps)
    assert (payload - introductions) * seedflow_flood.STEPS / steps + introductions <= seedflow_flood.PAPER_BYTES


def test_an_edge_over_real_sockets_moves_its_payload_and_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seedflow_flood, "CUTS", 1)
    wire, payload = asyncio.run(seedflow_flood.wire_bytes(25))
    assert payload >= 16 * 25 * 3
    assert payload < wire < 60_000


@pytest.mark.parametrize("merged", [True, False])
def test_throughput_passes_every_message_on(merged: bool) -> None:
    assert all(rate > 0 for rate in asyncio.run(seedflow_flood.throughput(1600, merged=merged)))
