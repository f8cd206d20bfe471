"""Two nodes over real gRPC compute, bit for bit, what the stacked reference computes from the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerloom.node import checkpoint
from peerloom.node.checkpoint import Checkpoint
from peerloom.node.identity import load_or_create
from peerloom.node.worker.data import Batches, prepare
from peerloom.node.worker.inner import InnerLoop
from peerloom.node.worker.model import build_model
from peerloom.node.worker.schedule import learning_rate
from peerloom.node.worker.tokenizer import load_tokenizer
from peerloom.optim.flat import FlatParameters
from peerloom.optim.gasloc import gossip_round
from peerloom.optim.topology import Graph
from peerloom.protocol.runspec import RunSpec
from tests.helpers import Node, Swarm, swarm_folder, write_run

pytestmark = pytest.mark.slow

TOGETHER = 8  # committed rounds to see before the nodes are stopped


class Replay:
    """One node's local steps, done again from one of its checkpoints."""

    def __init__(self, node: Node, spec: RunSpec, cache: Path, start: Checkpoint) -> None:
        self._spec = spec
        peer_id = load_or_create(node.home / "identity.key").peer_id
        data = spec.data
        shards = prepare(data, load_tokenizer(data.tokenizer), cache, lambda what, share: None)
        self._batches = Batches(shards.train, spec.seed, peer_id, spec.train.batch_size, data.sequence_length)
        model = build_model(spec)
        self._flat = FlatParameters(model.named_parameters())
        self._inner = InnerLoop(model, spec.train)
        self._inner.load_state(start.optimizer)
        meta = start.meta
        self._step, self._adam_steps, self._adopted_at = meta.step, meta.adam_steps, meta.adopted_at

    def drift(self, theta: Tensor, event: dict[str, Any]) -> Tensor:
        """What the local steps of the round that `event` tells of add to `theta`."""
        self._flat.copy_in(theta)
        for index in range(event["first_batch"], event["first_batch"] + event["batches"]):
            rate = learning_rate(self._step, self._spec.train, adopted_at=self._adopted_at)
            self._inner.step(torch.from_numpy(self._batches[index]), rate)
            self._step += 1
            self._adam_steps += 1
        if self._adopted_at is not None and self._adam_steps >= self._spec.train.warmup_steps:
            self._adopted_at = None
        return self._flat.flat.detach() - theta


@pytest.fixture
def pair(swarm: Swarm) -> Iterator[tuple[RunSpec, list[Node]]]:
    """Two nodes that have met in some rounds running, by the schedule, and are stopped; every checkpoint is kept."""
    swarm.rest("seed")
    with swarm_folder() as folder:
        run_file = write_run(folder / "run", pairing="scheduled", local_steps=3, clip_radius=0.0)
        variables = {
            "TMPDIR": str(folder / "tmp"),
            "PEER_CHECKPOINT_EVERY_S": "0.001",
            "PEER_KEEP_CHECKPOINTS": "1000",
        }
        scheduled = Swarm(folder, run_file, variables)
        try:
            scheduled.start()
            a, b = nodes = scheduled.trainers("a", "b")
            b.wait_for("company", lambda: sum(event["partner"] is not None for event in b.rounds()) > TOGETHER)
        finally:
            scheduled.stop()
        yield RunSpec.from_toml(run_file.read_text()), nodes


def saved(node: Node) -> dict[int, Checkpoint]:
    """All checkpoints by the round they are the start of."""
    return {found.meta.round: found for found in map(checkpoint.load, node.checkpoints())}


def test_a_swarm_over_grpc_is_the_stacked_reference(
    pair: tuple[RunSpec, list[Node]], tmp_path: Path, one_thread: None
) -> None:
    spec, nodes = pair
    checkpoints = [saved(node) for node in nodes]
    events = [{event["round"]: event for event in node.rounds()} for node in nodes]
    ids = [load_or_create(node.home / "identity.key").peer_id for node in nodes]
    known = events[0].keys() & events[1].keys() & checkpoints[0].keys() & checkpoints[1].keys()
    first = min(round for round in known if events[0][round]["partner"] and events[1][round]["partner"])
    replays = [Replay(node, spec, tmp_path, found[first]) for node, found in zip(nodes, checkpoints, strict=True)]
    theta = torch.stack([found[first].theta for found in checkpoints])
    previous = torch.stack([found[first].previous for found in checkpoints])
    gasloc, met = spec.gasloc, 0
    settings: dict[str, Any] = {"eta": gasloc.eta, "alpha": gasloc.alpha, "gamma": gasloc.gamma}
    round = first
    while round in known:
        mine, theirs = (found[round] for found in events)
        together = mine["partner"] == ids[1]
        assert together == (theirs["partner"] == ids[0]), f"round {round} was committed on one side only"
        assert not together or mine["partner_round"] == theirs["partner_round"] == round
        met += together
        rows = zip(replays, theta, events, strict=True)
        drifts = torch.stack([replay.drift(row, found[round]) for replay, row, found in rows])
        laplacian = Graph.from_pairs(2, [(0, 1)] if together else []).laplacian()
        theta, previous = gossip_round(theta, previous, laplacian, drifts, momentum=gasloc.momentum, **settings)
        round += 1
        for row, carried, found in zip(theta, previous, checkpoints, strict=True):
            if round in found:
                assert torch.equal(row, found[round].theta), f"theta differs at the start of round {round}"
                assert torch.equal(carried, found[round].previous)
    assert met >= TOGETHER
    assert torch.isfinite(theta).all()
