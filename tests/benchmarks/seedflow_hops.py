"""How many hops a round flooding needs: clients with models of their own, which differ by what has reached them.

16 clients on a ring take `FLUSH` local steps and then pass on what is new to them, k hops: with 8, the diameter, all
know all, as on the complete graph, and their states have one hash; with fewer, messages come late and estimates are
taken at different weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerloom.optim.subcge import SubCGE
from tests.benchmarks.seedflow_flooded import complete, ring

CLIENTS, FLUSH, BATCH = 16, 5, 16
FEATURES, HIDDEN, CLASSES = 32, 32, 8
Message = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """One run."""

    graph: str
    hops: int
    steps: int
    lr: float = 0.03
    seed: int = 0


def task(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and the classes that a random network gives them: enough for training and the loss at the end."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(4096, FEATURES, generator=draw)
    first = torch.randn(FEATURES, 16, generator=draw) / FEATURES**0.5
    return x, (torch.tanh(2 * x @ first) @ torch.randn(16, CLASSES, generator=draw)).argmax(1)


def model(seed: int) -> nn.Module:
    """Two layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).eval()


def perform(run: Delayed) -> dict[str, Any]:
    """`loss`: the mean client's, on data not trained on; `hashes`: different states at the end; `curve` of losses."""
    x, y = task(run.seed)
    held_out = slice(3072, None)
    models = [model(run.seed) for _ in range(CLIENTS)]
    flows = [
        SubCGE(one, rank=16, period=1000, eps=1e-3, lr=run.lr / CLIENTS, run_seed=run.seed + 1) for one in models
    ]
    draw = torch.Generator().manual_seed(run.seed)
    neighbours = (ring if run.graph == "ring" else complete)(CLIENTS)
    known: list[set[Message]] = [set() for _ in range(CLIENTS)]
    news: list[set[Message]] = [set() for _ in range(CLIENTS)]  # not yet passed on
    curve = []
    for start in range(0, run.steps, FLUSH):
        fresh: list[set[Message]] = [set() for _ in range(CLIENTS)]
        for client, flow in enumerate(flows):
            for step in range(start, start + FLUSH):
                rows = torch.randint(3072 // CLIENTS, (BATCH,), generator=draw) * CLIENTS + client
                fresh[client].add(_step(flow, models[client], x[rows], y[rows], client, step))
        for client in range(CLIENTS):
            news[client] |= fresh[client]
            known[client] |= fresh[client]
        for _ in range(run.hops):
            news = _hop(neighbours, known, news, fresh)
        for flow, messages in zip(flows, fresh, strict=True):
            flow.apply(messages)
        if (start // FLUSH) % 20 == 0:
            curve.append([start + FLUSH, _loss(models, x[held_out], y[held_out])])
    hashes = len({flow.state_hash() for flow in flows})
    return {"loss": _loss(models, x[held_out], y[held_out]), "hashes": hashes, "curve": curve}


def _step(flow: SubCGE, net: nn.Module, x: Tensor, y: Tensor, client: int, step: int) -> Message:
    flow.advance(step)
    scalar = flow.estimate(lambda: F.cross_entropy(net(x), y), flow.seed_of(client, step))
    return client, step, step, scalar


def _hop(
    neighbours: list[list[int]], known: list[set[Message]], news: list[set[Message]], fresh: list[set[Message]]
) -> list[set[Message]]:
    """Everybody passes its news to all neighbours at once; returns what is news to each now."""
    arrived = []
    for client, others in enumerate(neighbours):
        arrived.append(set().union(*(news[other] for other in others)) - known[client])
    for client, messages in enumerate(arrived):
        known[client] |= messages
        fresh[client] |= messages
    return arrived


def _loss(models: list[nn.Module], x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return sum(float(F.cross_entropy(one(x), y)) for one in models) / len(models)
