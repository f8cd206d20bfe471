"""The flood's benchmark at a small size: its rows have their names, and the bytes at the paper's setting hold."""

from __future__ import annotations

import asyncio

import pytest
import torch

from peerloom.node.identity import Identity
from peerloom.optim.subcge import SubCGE
from peerloom.protocol.codec_flood import FloodWriter
from peerloom.protocol.flood import FloodMachine
from peerloom.protocol.flood_events import LinkUp, Send, StepsDone
from peerloom.protocol.runspec import RunSpec
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


def test_bytes_do_not_depend_on_the_models_size() -> None:
    """Real slopes of two models, one with 500 times the parameters: the spec alone says what they can take."""
    spec = seedflow_flood.spec_of()
    limit = spec.seedflow.scalar_limit()
    small, large = (flush_of(model, limit) for model in (network(4), network(96)))
    assert payload_of(spec, small[1]) <= payload_of(spec, (limit,) * len(small[1]))
    assert payload_of(spec, large[1]) <= payload_of(spec, (limit,) * len(large[1]))
    assert large[0] > 300 * small[0]
    clipped = [flush_of(model, 1)[1] for model in (network(4), network(96))]
    assert {abs(scalar) for scalars in clipped for scalar in scalars} == {1}
    assert payload_of(spec, clipped[0]) == payload_of(spec, clipped[1])


def network(width: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(width)
        inner = torch.nn.Linear(width, 8 * width)
        return torch.nn.Sequential(inner, torch.nn.Tanh(), torch.nn.Linear(8 * width, width))


def flush_of(model: torch.nn.Module, bound: int) -> tuple[int, tuple[int, ...]]:
    """(parameters, the scalars of a flush's steps)."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    inputs = torch.ones(2, next(model.parameters()).shape[1])
    flow = SubCGE(model, rank=4, period=100, eps=1e-3, lr=1e-4, run_seed=1, bound=bound)
    scalars = []
    for step in range(seedflow_flood.FLUSH):
        with torch.no_grad():
            scalars.append(flow.estimate(lambda: model(inputs).square().sum(), flow.seed_of(1, step)))
    return numel, tuple(scalars)


def payload_of(spec: RunSpec, scalars: tuple[int, ...]) -> int:
    """Bytes to a neighbour for these steps."""
    own, other = (Identity.generate().peer_id for _ in range(2))
    machine = FloodMachine(
        own, spec.seedflow, spec.run_id, 1, sign=lambda data: bytes(64), verify=lambda peer, data, signature: True
    )
    machine.handle(LinkUp(other), 0.0)
    writer = FloodWriter()
    for effect in machine.handle(StepsDone(0, 0, scalars), 0.0):
        if isinstance(effect, Send):
            writer.write(effect.body)
    return writer.payload


@pytest.mark.parametrize("merged", [True, False])
def test_throughput_passes_every_message_on_and_drops_its_copies(merged: bool) -> None:
    assert all(rate > 0 for rate in seedflow_flood.throughput(1600, merged=merged))


def test_the_pings_of_the_papers_run_are_counted() -> None:
    """17,500 s, two sides, 39 bytes a ping and as many its answer."""
    assert seedflow_flood.ping_bytes(5000) == 2 * 1750 * 78
