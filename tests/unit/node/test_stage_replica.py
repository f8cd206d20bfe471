from __future__ import annotations

import pytest
import torch

from peerloom.node.worker.exchanges import Pieces
from peerloom.node.worker.stage_replica import StageReplica
from peerloom.protocol.replicas import replica_spec
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerId

NUMEL, DRIFT = 1000, 0.01


@pytest.mark.parametrize("gap", [0.0, 1.0, 100.0])
def test_two_hosts_come_together_however_far_apart_they_began(gap: float) -> None:
    spec, rng = replica_spec(RunSpec(method="pipeline")), torch.Generator().manual_seed(0)
    pieces = Pieces(NUMEL, spec.gasloc)
    weights = [torch.zeros(NUMEL), torch.full((NUMEL,), gap)]
    boxes = [[torch.zeros(sum(pieces.sizes), dtype=torch.uint8) for _ in range(2)] for _ in weights]
    hosts = [StageReplica(w, spec, PeerId(f"p{i}"), pieces, *boxes[i]) for i, w in enumerate(weights)]
    for round in range(20):
        for host in hosts:
            host.take("propose", round)
        for w in weights:
            w.add_(torch.randn(NUMEL, generator=rng), alpha=DRIFT)  # the updates go on meanwhile
        for (_, partner), (proposal, _) in zip(boxes, reversed(boxes), strict=True):
            partner.copy_(proposal)
        assert all(host.take("mix", round).share == 1.0 for host in hosts)
        apart = float((weights[0] - weights[1]).square().mean().sqrt())
        assert apart < 4 * DRIFT, f"round {round}"
