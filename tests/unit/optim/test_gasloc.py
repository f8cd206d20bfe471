"""One GASLoC worker: bit equality with the stacked reference, memory, state and refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peerloom.optim import gasloc as module
from peerloom.optim.encode import decode, encode
from peerloom.optim.flat import FlatParameters
from peerloom.optim.gasloc import Buffers, GASLoC, Momentum, simulate_gossip
from peerloom.optim.topology import Graph, random_matching
from tests.unit.optim.memory import shared

from .conftest import Draw

ODD: dict[str, Any] = {"eta": 0.7, "alpha": 0.83, "gamma": 0.3}  # none a power of two
BOTH = pytest.mark.parametrize("momentum", ["pre", "post"])


def run_workers(
    theta0: Tensor, graphs: list[Graph], steps: Tensor, momentum: Momentum, lossy: bool = False
) -> tuple[Tensor, Tensor]:
    """n GASLoC objects over all rounds: (theta (T + 1, n, d), the drifts that they measured (T, n, d))."""
    params = [row.clone() for row in theta0]
    workers = [GASLoC(row, momentum=momentum, **ODD) for row in params]
    thetas, drifts = [theta0], []
    for graph, step in zip(graphs, steps, strict=True):
        for worker in workers:
            worker.start_round()
        for row, change in zip(params, step, strict=True):
            row.add_(change)
        drifts.append(torch.stack(params) - torch.stack([worker.theta for worker in workers]))
        sent = [worker.proposal().clone() for worker in workers]
        if lossy:
            sent = [through_bf16(y) for y in sent]
        for i, worker in enumerate(workers):
            neighbors = [(weight, sent[j]) for j, weight in graph.neighbors(i)]
            worker.mix(neighbors, own=sent[i] if lossy else None)
        thetas.append(torch.stack(params))
        assert all(torch.equal(worker.theta, row) for worker, row in zip(workers, params, strict=True))
    return torch.stack(thetas), torch.stack(drifts)


def through_bf16(y: Tensor) -> Tensor:
    return decode(encode(y.reshape(-1), "bf16"), "bf16").view(y.shape)


def matchings(n: int, rounds: int, weight: float) -> list[Graph]:
    return [Graph.from_pairs(n, random_matching(n, seed=11, round=t), weight) for t in range(rounds)]


@BOTH
@pytest.mark.parametrize("n", [2, 5])  # 5: one idles every round
@pytest.mark.parametrize("scale", [1.0, 1e-39, 1e30])  # subnormal differences too
def test_matched_workers_equal_the_stacked_reference_bit_for_bit(
    momentum: Momentum, n: int, scale: float, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", 37)  # the chunks must not show
    theta0 = (draw(1, 101).expand(n, -1) * scale).float()
    graphs = matchings(n, 6, weight=0.77)
    thetas, drifts = run_workers(theta0, graphs, (draw(6, n, 101) * scale).float(), momentum)
    reference = simulate_gossip(theta0, [g.laplacian() for g in graphs], drifts, momentum=momentum, **ODD)
    assert reference.dtype == torch.float32 and torch.equal(thetas, reference)
    assert bool((thetas[-1] != thetas[0]).all())


@BOTH
@pytest.mark.parametrize("graph", [Graph.ring(6).metropolis(), Graph.complete(5), Graph.torus(2, 3)])
def test_several_neighbours_equal_the_reference_bit_for_bit(momentum: Momentum, graph: Graph, draw: Draw) -> None:
    theta0 = draw(graph.n, 33, dtype=torch.float32)
    thetas, drifts = run_workers(theta0, [graph] * 4, draw(4, graph.n, 33, dtype=torch.float32), momentum)
    assert torch.equal(thetas, simulate_gossip(theta0, graph.laplacian(), drifts, momentum=momentum, **ODD))


@BOTH
def test_lossy_proposals_equal_the_reference_and_keep_the_mean(momentum: Momentum, draw: Draw) -> None:
    theta0, graphs = draw(4, 50, dtype=torch.float32), matchings(4, 5, weight=0.9)
    thetas, drifts = run_workers(theta0, graphs, draw(5, 4, 50, dtype=torch.float32), momentum, lossy=True)
    laplacians = [graph.laplacian() for graph in graphs]
    assert torch.equal(
        thetas, simulate_gossip(theta0, laplacians, drifts, momentum=momentum, lossy=through_bf16, **ODD)
    )
    exact = simulate_gossip(theta0, laplacians, drifts, momentum=momentum, **ODD)
    assert torch.allclose(thetas.mean(1), exact.mean(1), atol=2e-6)
    assert not torch.allclose(thetas, exact, atol=2e-4)


def test_without_own_a_lossy_exchange_would_move_the_mean(draw: Draw) -> None:
    """Why `own` exists: the pair's sum must not change in mixing."""
    values = draw(2, 400, dtype=torch.float32)
    sums = []
    for give_own in (True, False):
        workers = [GASLoC(row.clone(), eta=1.0, alpha=1.0, gamma=0.0) for row in values]
        for worker in workers:
            worker.start_round()
        sent = [through_bf16(worker.proposal()) for worker in workers]
        for worker, mine, other in zip(workers, sent, reversed(sent), strict=True):
            worker.mix([(1.0, other)], own=mine if give_own else None)
        sums.append((workers[0].theta + workers[1].theta - values.sum(0)).abs().max().item())
    assert sums[0] < 1e-6 < 1e-3 < sums[1]


@BOTH
def test_two_workers_average_exactly(momentum: Momentum) -> None:
    """Dyadic numbers, on which fp32 makes no error: alpha = lambda = 1 is the average at both ends."""
    values = torch.tensor([[1.0, -2.5, 0.75], [3.0, 4.0, -8.25]])
    workers = [GASLoC(row.clone(), eta=1.0, alpha=1.0, gamma=0.0, momentum=momentum) for row in values]
    for worker in workers:
        worker.start_round()
    sent = [worker.proposal().clone() for worker in workers]
    workers[0].mix([(1.0, sent[1])])
    workers[1].mix([(1.0, sent[0])])
    assert workers[0].theta.tolist() == workers[1].theta.tolist() == [2.0, 0.75, -3.75]


@BOTH
def test_one_round_by_hand(momentum: Momentum) -> None:
    params = torch.tensor([4.0])
    worker = GASLoC(params, eta=0.5, alpha=0.5, gamma=0.25, momentum=momentum)
    worker.start_round()
    params += 8.0
    assert worker.proposal().tolist() == [8.0]  # 4 + 0.5 * 8
    worker.mix([(1.0, torch.tensor([16.0]))])  # mix = 8 - 0.25 * (8 - 16) = 10
    assert params.tolist() == worker.theta.tolist()
    assert (params.item(), worker.previous.item()) == ((11.0, 8.0) if momentum == "pre" else (11.5, 10.0))


@BOTH
def test_a_dropped_edge_leaves_the_local_step_with_its_momentum(momentum: Momentum) -> None:
    params = torch.tensor([1.0, 2.0])
    worker = GASLoC(params, eta=1.0, alpha=1.0, gamma=0.5, momentum=momentum)
    worker.start_round()
    params += 2.0
    worker.proposal()
    worker.mix([])
    assert params.tolist() == [4.0, 5.0]


def test_a_model_of_views_is_mixed_in_place_in_given_shared_memory() -> None:
    model = nn.Linear(3, 2)
    flat = FlatParameters(model.named_parameters())
    buffers = Buffers(shared(8), shared(8))
    worker = GASLoC(flat.flat, eta=1.0, alpha=1.0, gamma=0.0, buffers=buffers)
    assert torch.equal(buffers.theta, flat.flat) and torch.equal(buffers.previous, flat.flat)
    worker.start_round()
    y = worker.proposal()
    assert y.data_ptr() == flat.flat.data_ptr()
    start = y.clone()
    worker.mix([(1.0, torch.zeros(8))])
    flat.check()
    assert torch.equal(model.weight, start[:6].view(2, 3) / 2) and torch.equal(buffers.theta, start / 2)
    assert torch.equal(buffers.previous, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_separate_tensors_of_any_float_dtype_are_computed_in_fp32(dtype: torch.dtype, draw: Draw) -> None:
    tensors = [nn.Parameter(draw(2, 3, dtype=dtype)), nn.Parameter(draw(4, dtype=dtype).expand(2, 4).t().clone())]
    flat = torch.cat([t.detach().float().reshape(-1) for t in tensors])
    expected = GASLoC(flat, **ODD)
    worker = GASLoC(tensors, **ODD)
    assert worker.numel == 14
    other = draw(14, dtype=torch.bfloat16)
    for one in (expected, worker):
        one.start_round()
    with torch.no_grad():
        flat.mul_(2)
        for tensor in tensors:
            tensor.mul_(2)
    for one in (expected, worker):
        assert one.proposal().dtype == torch.float32
        one.mix([(0.6, other)])
    assert torch.equal(worker.theta, expected.theta)
    assert torch.equal(tensors[0].detach(), expected.theta[:6].view(2, 3).to(dtype))
    assert torch.equal(tensors[1].detach(), expected.theta[6:].view(4, 2).to(dtype))


def test_mixing_takes_little_memory_beyond_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what torch allocates on the CPU during a whole round over 16 MiB of parameters."""
    numel = 1 << 22
    params, other, own = torch.ones(numel), torch.zeros(numel), torch.ones(numel, dtype=torch.bfloat16)
    worker = GASLoC(params, **ODD)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        worker.start_round()
        worker.proposal()
        worker.mix([(1.0, other), (0.5, other)], own)
    assert profile.profiler is not None
    changes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    assert 0 < peak <= 1.3 * 2**20


@BOTH
def test_state_round_trips_and_goes_on_identically(momentum: Momentum, draw: Draw) -> None:
    def go_on(worker: GASLoC, params: Tensor, rounds: Tensor) -> Tensor:
        for step in rounds:
            worker.start_round()
            params.add_(step)
            worker.proposal()
            worker.mix([(0.9, torch.ones(7))])
        return params.clone()

    steps = draw(5, 7, dtype=torch.float32)
    first = torch.zeros(7)
    worker = GASLoC(first, momentum=momentum, **ODD)
    go_on(worker, first, steps[:2])
    worker.start_round()
    first.add_(100.0)  # a round under way is not part of the state
    saved = {key: value.clone() if isinstance(value, Tensor) else value for key, value in worker.state_dict().items()}
    second = torch.full((7,), 5.0)
    resumed = GASLoC(second, momentum=momentum, **ODD)
    resumed.load_state_dict(saved)
    worker.load_state_dict(saved)
    assert torch.equal(second, saved["theta"])
    assert torch.equal(go_on(resumed, second, steps[2:]), go_on(worker, first, steps[2:]))


def test_adopting_sets_everything_and_forgets_momentum() -> None:
    params = torch.zeros(3)
    worker = GASLoC(params, eta=1.0, alpha=1.0, gamma=0.5)
    worker.start_round()
    params += 1
    worker.proposal()
    worker.adopt(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert params.tolist() == worker.theta.tolist() == worker.previous.tolist() == [1, 2, 3]
    worker.start_round()
    worker.proposal()
    worker.mix([])
    assert params.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eta": 0.0}, "eta must be a finite number greater than 0, got 0.0"),
        ({"eta": float("nan")}, "eta must be"),
        ({"alpha": -1.0}, "alpha must be a finite number greater than 0, got -1.0"),
        ({"alpha": float("inf")}, "alpha must be"),
        ({"gamma": 1.0}, "gamma must be at least 0 and less than 1, got 1.0"),
        ({"gamma": -0.1}, "gamma must be"),
        ({"gamma": float("nan")}, "gamma must be"),
        ({"momentum": "nesterov"}, 'momentum must be "pre" or "post", got \'nesterov\''),
        ({"params": []}, "params is empty"),
        ({"params": torch.zeros(3, dtype=torch.int64)}, "params must be floating point, got torch.int64"),
        ({"buffers": (torch.zeros(3), torch.zeros(2))}, "buffer previous must be flat floating point with 3 elements"),
        ({"buffers": (torch.zeros(3).double(), torch.zeros(3))}, "buffer theta must be float32 on cpu"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"params": torch.zeros(3), **ODD, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        GASLoC(arguments.pop("params"), **arguments)


def test_bad_proposals_and_states_are_refused_and_change_nothing() -> None:
    params = torch.ones(3)
    worker = GASLoC(params, **ODD)
    worker.start_round()
    worker.proposal()
    good = torch.zeros(3)
    cases = [
        (lambda: worker.mix([(1.0, good), (1.0, torch.zeros(4))]), "a neighbour's proposal must be flat"),
        (lambda: worker.mix([(1.0, torch.zeros(3, dtype=torch.uint8))]), "not torch.uint8 of shape (3,)"),
        (lambda: worker.mix([(0.0, good)]), "a neighbour's weight is 0.0"),
        (lambda: worker.mix([(float("nan"), good)]), "a neighbour's weight is nan"),
        (lambda: worker.mix([(1.0, good)], own=torch.zeros(3, 1)), "own must be flat"),
        (lambda: worker.adopt(torch.zeros(2)), "theta must be flat"),
        (lambda: worker.load_state_dict({"theta": good}), "the state has no momentum, previous"),
        (lambda: worker.load_state_dict({"theta": good, "previous": good, "momentum": "post"}), 'momentum "post"'),
        (lambda: worker.load_state_dict({"theta": good, "previous": good[:2], "momentum": "pre"}), "state's previous"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert params.tolist() == worker.theta.tolist() == worker.previous.tolist() == [1, 1, 1]
    worker.mix([(1.0, good)])


def test_calls_out_of_order_are_refused() -> None:
    worker = GASLoC(torch.ones(3), **ODD)
    for call in (worker.proposal, lambda: worker.mix([])):
        with pytest.raises(RuntimeError, match="this one is between rounds"):
            call()
    worker.start_round()
    with pytest.raises(RuntimeError, match=re.escape("start_round() is for a worker between rounds")):
        worker.start_round()
    worker.proposal()
    with pytest.raises(RuntimeError, match="this one is at the exchange"):
        worker.proposal()


def test_the_reference_refuses_shapes_that_do_not_fit() -> None:
    theta0, laplacian = torch.zeros(2, 3), Graph.ring(2).laplacian()
    with pytest.raises(ValueError, match="1 Laplacians for 2 rounds"):
        simulate_gossip(theta0, [laplacian], torch.zeros(2, 2, 3), **ODD)
    with pytest.raises(ValueError, match=re.escape("must be (2, 2), not (3, 3)")):
        simulate_gossip(theta0, Graph.ring(3).laplacian(), torch.zeros(1, 2, 3), **ODD)
    with pytest.raises(ValueError, match=re.escape("not (2, 4)")):
        simulate_gossip(theta0, laplacian, torch.zeros(1, 2, 4), **ODD)
