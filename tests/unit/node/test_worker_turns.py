"""The worker's rounds in several exchanges: fragments and legs through shared memory, and checkpoints between."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerloom.node.worker.port import WorkerProcess
from peerloom.node.worker.tasks.gasloc import GaslocTask
from peerloom.optim.encode import Encoding, decode, encode
from peerloom.optim.groups import group_mean
from peerloom.optim.int8 import Dither, split
from peerloom.optim.robust import MedianClip, distance
from peerloom.protocol import plan
from peerloom.protocol.errors import SpecError
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import Span

from .tiny import never, setup, task, tiny_spec, write_text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "texts")


def run(source: Path, **gasloc: Any) -> RunSpec:
    return replace(tiny_spec(source), gasloc=GaslocSpec(local_steps=6, gamma=0.3, momentum="post", **gasloc))


def inbox(worker: GaslocTask, pieces: Span) -> Tensor:
    return worker._inbox[worker.layout.pieces(pieces)]


def outbox(worker: GaslocTask, pieces: Span) -> Tensor:
    return worker._outbox[worker.layout.pieces(pieces)]


def meet(group: list[GaslocTask], spec: RunSpec, fragment: int) -> None:
    """All legs of a fragment: each takes in what its partner has sent."""
    n = len(group)
    for index, leg in enumerate(plan.legs(spec.gasloc, spec.seed, 0, fragment, n)):
        swaps = [plan.swap(spec.gasloc, spec.seed, 0, fragment, index, n, node) for node in range(n)]
        sent = [outbox(worker, swap.send).clone() for worker, swap in zip(group, swaps, strict=True)]
        for i, j, _ in leg:
            for me, other in ((i, j), (j, i)):
                inbox(group[me], swaps[me].receive).copy_(sent[other])
                group[me].take(fragment, 1.0, swaps[me].receive, swaps[me].halved >= 0)


@pytest.mark.parametrize("encoding", ["fp32", "bf16", "int8"])
def test_a_group_in_fragments_takes_its_mean_one_after_the_other(source: Path, tmp_path: Path, encoding: str) -> None:
    spec = run(source, pairing="hypercube", group_size=4, fragments=2, encoding=encoding)
    four = [task(spec, tmp_path, f"peer-{name}") for name in "abcd"]
    ready = four[0].ready()
    assert len(ready.piece_bytes) == 8
    assert sum(ready.piece_bytes) == ready.payload_bytes
    for fragment in range(2):
        for worker in four:
            trained = worker.train(0, never, fragment)
            assert (trained.batches, trained.step) == (3, 3 * (fragment + 1))
        ys = torch.stack([worker._method.parts[fragment]._y.clone() for worker in four])
        meet(four, spec, fragment)
        xs = [worker._method.parts[fragment]._y.clone() for worker in four]
        assert all(torch.equal(x, xs[0]) for x in xs)
        assert torch.equal(xs[0], group_mean(ys)[0]) if encoding == "fp32" else torch.allclose(
            xs[0], ys.mean(0), atol=0.03
        )
        for worker in four if fragment == 0 else []:
            worker.settle(fragment)
    assert [worker.finish(mix=False).round for worker in four] == [1] * 4
    thetas = [worker._method.theta for worker in four]
    if encoding == "fp32":
        assert all(torch.equal(theta, thetas[0]) for theta in thetas)
        assert not torch.equal(four[0]._flat.flat, four[1]._flat.flat)  # the first fragment has trained on since
    else:
        assert torch.allclose(thetas[0], thetas[1], atol=0.03)


@pytest.mark.parametrize("encoding", ["fp32", "bf16", "int8"])
def test_what_replaces_a_part_is_passed_on_as_it_came(source: Path, tmp_path: Path, encoding: Encoding) -> None:
    spec = run(source, pairing="hypercube", group_size=4, fragments=2, encoding=encoding, clip_radius=0.0)
    worker = task(spec, tmp_path)
    worker.train(0, never, 0)
    worker._exchanges.send(0)
    pieces = (1, 2)
    part = worker._exchanges._layout.elements(pieces)
    theirs, numel = inbox(worker, pieces), part.stop - part.start
    encode(torch.randn(numel, generator=torch.Generator().manual_seed(0)), encoding, theirs, Dither(1, 0, "peer-b"))
    if encoding == "int8":
        split(theirs, numel)[1].div_(2, rounding_mode="floor")  # encoded anew, the blocks would get other scales
    worker.take(0, 1.0, pieces, True)
    assert torch.equal(outbox(worker, pieces), theirs)
    assert torch.equal(worker._method.parts[0]._y[part], decode(theirs, encoding))


def test_a_group_with_a_liar_moves_a_node_only_so_far(source: Path, tmp_path: Path) -> None:
    spec = run(source, pairing="scheduled", group_size=4)
    worker = task(spec, tmp_path)
    whole = worker._exchanges._layout.whole(0)

    def group(round: int, apart: float) -> tuple[float, float, bool]:
        """A member so many ways of this node's own in the round away."""
        worker.train(round, never)
        y = worker._flat.flat.detach().clone()
        way = distance(y, worker._method.theta)
        theirs = y + apart * way / math.sqrt(len(y))
        inbox(worker, whole).view(torch.float32).copy_(theirs)
        taken = worker.take(0, 1.0, whole, False)
        worker.finish(mix=False)
        return taken.share, distance(worker._method.previous, y) / way, taken.far_off

    for round in range(MedianClip.LEAST):
        assert group(round, 1.5) == (1.0, pytest.approx(0.75, rel=1e-3), False)
    share, moved, blamed = group(MedianClip.LEAST, 1500.0)
    assert share == pytest.approx(2e-3, rel=1e-3)
    assert moved <= 1.5 and not blamed


def test_two_legs_add_up_as_two_neighbours(source: Path, tmp_path: Path) -> None:
    spec = run(source, pairing="ring", alpha=0.9)
    worker, twin = (task(spec, tmp_path / name, "peer-a") for name in ("one", "two"))
    for one in (worker, twin):
        one.train(0, never)
    others = [torch.randn(worker.layout.numel) for _ in range(2)]
    for y_j in others:
        inbox(worker, (0, 1)).view(torch.float32).copy_(y_j)
        worker.take(0, 2 / 3, (0, 1), False)
    worker.finish(mix=False)
    twin._method.parts[0].mix([(2 / 3, y_j) for y_j in others])
    assert torch.equal(worker._method.theta, twin._method.theta)


def test_a_checkpoint_in_fragments_goes_on_where_it_was(source: Path, tmp_path: Path) -> None:
    spec = run(source, pairing="rendezvous", fragments=2)

    def rounds(worker: GaslocTask, first: int, last: int) -> None:
        for round in range(first, last):
            for fragment in range(2):
                worker.train(round, never, fragment)
                if fragment == 0:
                    worker.settle(0)
            worker.finish(mix=False)

    whole = task(spec, tmp_path / "whole")
    rounds(whole, 0, 3)
    first = task(spec, tmp_path / "parts")
    rounds(first, 0, 1)
    first.save()
    second = task(spec, tmp_path / "parts")
    assert second.ready().resumed
    assert second.ready().held_out_loss is not None
    rounds(second, 1, 3)
    assert torch.equal(whole._flat.flat, second._flat.flat)
    assert torch.equal(whole._method.theta, second._method.theta)
    assert torch.equal(whole._method.previous, second._method.previous)


def test_what_a_stop_cuts_off_is_proposed_to_nobody(source: Path, tmp_path: Path) -> None:
    worker = task(run(source, pairing="rendezvous", fragments=3), tmp_path)
    assert worker.train(0, lambda: True, 0).batches == 1
    with pytest.raises(ValueError, match="asked to train fragment 2 while fragment 0 is next"):
        worker.train(0, never, 2)
    assert worker.finish(mix=False).round == 1
    assert worker.train(1, never, 0).batches == 2
    worker.settle(0)
    with pytest.raises(RuntimeError, match=r"finish\(\) before save\(\)"):
        worker.save()
    worker.finish(mix=False)
    worker.save()


def test_a_model_too_small_for_its_fragments_is_the_specs_fault(source: Path, tmp_path: Path) -> None:
    spec = replace(run(source), gasloc=GaslocSpec(local_steps=64, fragments=64))
    with pytest.raises(SpecError, match=r"gasloc\.fragments: \d+ parameters make at most"):
        task(spec, tmp_path)


@pytest.mark.slow
async def test_a_process_takes_settles_and_finishes(source: Path, tmp_path: Path) -> None:
    worker = WorkerProcess()
    try:
        ready = await worker.start(
            setup(run(source, pairing="two_peer", fragments=2), tmp_path), lambda what, share: None
        )
        assert [len(worker.outbox((f, f + 1))) for f in range(2)] == list(ready.piece_bytes)
        for fragment in range(2):
            await worker.train(0, fragment)
            theta = bytes(worker.theta())
            for _ in range(2):
                span = (fragment, fragment + 1)
                worker.inbox(span)[:] = worker.outbox(span)
                await worker.take(fragment, 0.5, span, False)
            if fragment == 0:
                await worker.settle(0)
        assert bytes(worker.theta()) == theta
        assert (await worker.finish(mix=False)).round == 1
        assert bytes(worker.theta()) != theta
    finally:
        await worker.stop()
