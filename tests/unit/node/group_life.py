"""A few rounds of one node, with any number of devices, over the real port: what the daemon and its peers would see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from peerloom.node.seams import WorkerSetup
from peerloom.node.worker.port import WorkerProcess
from peerloom.protocol.runspec import RunSpec
from tests.unit.node.tiny import setup

Told = list[tuple[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """y and theta of each round, fp32, and the losses."""

    proposals: list[torch.Tensor]
    thetas: list[torch.Tensor]
    losses: list[float]
    digests: tuple[str, str]
    first_round: int


def devices(given: WorkerSetup, count: int) -> WorkerSetup:
    """The same node on so many CPU processes; none: as a node without the setting."""
    return replace(given, devices=("cpu",) * count) if count > 1 else given


def numbers(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(view), dtype=torch.float32)


async def live(spec: RunSpec, home: Path, count: int, rounds: int, *, save: bool = False) -> Life:
    """Rounds with a partner whose proposal is this node's, a little off; saved at the end, if at all."""
    worker = WorkerProcess(count)
    try:
        ready = await worker.start(devices(setup(spec, home), count), lambda what, share: None)
        proposals, thetas, losses = [], [], [ready.held_out_loss or 0.0]
        for number in range(ready.round, ready.round + rounds):
            trained = await worker.train(number)
            proposals.append(numbers(worker.outbox()))
            partner = proposals[-1] + 0.01 * torch.linspace(-1, 1, len(proposals[-1]))
            worker.inbox()[:] = partner.numpy().tobytes()
            finished = await worker.finish(mix=True)
            thetas.append(numbers(worker.theta()))
            losses += [trained.train_loss, finished.held_out_loss or 0.0]
        if save:
            await worker.save()
    finally:
        await worker.stop()
    digests = (ready.init_digest, ready.layout_digest)
    return Life(proposals=proposals, thetas=thetas, losses=losses, digests=digests, first_round=ready.round)
