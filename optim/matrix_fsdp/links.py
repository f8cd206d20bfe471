"""Bytes between owners and the other ranks of a shard group: fan-out of segments, fan-in of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from peerloom.optim.matrix_fsdp.deadline import Deadline
from peerloom.optim.matrix_fsdp.errors import RankLost
from peerloom.optim.matrix_fsdp.layout import Extent, Parcel
from peerloom.optim.matrix_fsdp.lifeline import Lifeline
from peerloom.optim.matrix_fsdp.wires import Wires

FanOut = Literal["p2p", "broadcast"]
FAN_OUTS: dict[str, FanOut] = {"gloo": "p2p", "nccl": "p2p"}

_EXCHANGE_TAG = 1
_FIRST_TAG = 16  # of a unit's
_TAGS_A_UNIT = 1 << 12  # more than a unit has extents
_ROLL_CALL_SHARE = 6  # the part of a timeout in which whoever lives is to answer
_LEAST_ROLL_CALL = timedelta(seconds=2)


@dataclass(slots=True)
class Traffic:
    """Payload this rank has sent and received, in bytes, and the messages it took; `scalars` are all-reduces of one."""

    gather_sent: int = 0
    gather_received: int = 0
    reduce_sent: int = 0
    reduce_received: int = 0
    replicate_reduced: int = 0
    messages: int = 0
    scalars: int = 0


class Pending:
    """Transfers under way, each with the rank at its other end, None for a collective's; the first `incoming` bring."""

    def __init__(self, links: Links, what: str, works: list[tuple[int | None, Any]], incoming: int = 0) -> None:
        self._links = links
        self._what = what
        self._works, self._incoming = works, incoming

    def wait(self) -> None:
        """Returns when all are done; raises RankLost, naming who does not answer any more."""
        self._wait(len(self._works))

    def wait_for_incoming(self) -> None:
        """Returns when all is here that others send, though they may not have what is sent to them; as `wait`."""
        self._wait(self._incoming)

    def _wait(self, count: int) -> None:
        works, self._works, self._incoming = self._works[:count], self._works[count:], 0
        deadline = self._links.deadline()
        for peer, work in works:
            try:
                self._links.wait(work, deadline)
            except RuntimeError as error:
                raise self._links.loss([peer], self._what, error) from error


class Links:
    """The links of one shard group; ranks are ranks in the group, but those that errors name: as `ranks` has them.

    Everything is point to point, where every byte is counted; with `fan_out="broadcast"` segments travel in one
    broadcast an owner instead. Transfers of a group are started in the same order on all its ranks. `wires`, once there
    are any, carry what goes from point to point. `timeout`, which may be changed, bounds each wait on gloo, to the
    sentence that names who is lost; NCCL's own watchdog applies the group's.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta, fan_out: FanOut) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.traffic = Traffic()
        self.group = group
        self.wires: Wires | None = None
        self.on_gloo = dist.get_backend(group) != "nccl"  # on NCCL a wait only orders the streams
        self.timeout = timeout
        self._broadcasts = fan_out == "broadcast"
        self._lifeline: Lifeline | None = None
        self._severing: Sequence[Callable[[], None]] = ()

    def watch_over(self, lifeline: Lifeline, severing: Sequence[Callable[[], None]]) -> None:
        """From now on a failure calls `severing`, so that others notice it; who is silent on `lifeline` then is lost.

        They close whatever ranks wait for each other in.
        """
        self._lifeline, self._severing = lifeline, severing

    def deadline(self) -> Deadline:
        """Of one wait; what is left of `timeout` is for the roll call."""
        return Deadline(self.timeout - self.timeout / _ROLL_CALL_SHARE)

    def loss(self, peers: Sequence[int | None], what: str, error: RuntimeError) -> RankLost:
        """What to raise after a failure: before there is a lifeline, the peers of what failed are named."""
        lost = tuple(sorted(self.ranks[peer] for peer in peers if peer is not None))
        if self._lifeline is not None:
            for sever in self._severing:
                sever()
            lost = self._lifeline.call(max(self.timeout / _ROLL_CALL_SHARE, _LEAST_ROLL_CALL))
        return RankLost(lost, what, str(error).strip().split("\n")[0])

    def fan_out(self, extents: Sequence[Extent], full: Tensor, tag: int, what: str) -> Pending:
        """Sends each extent of `full` from its owner to all others."""
        if self._broadcasts:
            return self.begun(what, lambda: [self._broadcast(extent, full) for extent in extents])
        ops: list[_Op] = []
        for distance in range(1, self.world_size):
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            for at, extent in enumerate(extents):
                part = full[extent.full_start : extent.full_start + extent.numel]
                if extent.owner == self.rank:
                    ops.append(_Op("send", part, to, tag + at))
                    self.traffic.gather_sent += part.nbytes
                elif extent.owner == source:
                    ops.append(_Op("recv", part, source, tag + at))
                    self.traffic.gather_received += part.nbytes
        return self._start(ops, what)

    def fan_in(
        self, parcels: Sequence[Parcel], parts: Sequence[Tensor], inbox: Sequence[Tensor], tag: int, what: str
    ) -> Pending:
        """Sends each of `parts`, the content of a parcel, to its owner.

        `inbox`, W - 1 times (owned,), is from rank + 1, rank + 2, ...
        """
        ops: list[_Op] = []
        for distance in range(1, self.world_size):
            to, source = (self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size
            for at, (parcel, part) in enumerate(zip(parcels, parts, strict=True)):
                if parcel.owner == to:
                    ops.append(_Op("send", part, to, tag + at))
                    self.traffic.reduce_sent += part.nbytes
                elif parcel.owner == self.rank:
                    place = inbox[distance - 1][parcel.owned_start : parcel.owned_start + parcel.numel]
                    ops.append(_Op("recv", place, source, tag + at))
                    self.traffic.reduce_received += place.nbytes
        return self._start(ops, what)

    def sum_scalar(self, value: Tensor) -> None:
        """Adds up `value`, of one element, over the group, in place."""
        self.traffic.scalars += 1
        self.begun("a sum over all ranks", lambda: [dist.all_reduce(value, group=self.group, async_op=True)]).wait()

    def exchange(self, record: Tensor, what: str) -> list[Tensor]:
        """The record of every rank, in rank order; all records have one size."""
        everyone = [torch.empty_like(record) for _ in range(self.world_size)]
        everyone[self.rank].copy_(record)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        ops = [_Op("send", record, rank, _EXCHANGE_TAG) for rank in others]
        ops += [_Op("recv", everyone[rank], rank, _EXCHANGE_TAG) for rank in others]
        self._start(ops, what).wait()
        return everyone

    def bring_rows(self, mine: Tensor, counts: Sequence[int], to: int, what: str) -> Tensor:
        """The rows of all ranks, `counts[rank]` from each, on rank `to`; elsewhere `mine`. Ranks with none stay out."""
        if self.rank != to:
            self._start([_Op("send", mine.contiguous(), to, _EXCHANGE_TAG)], what).wait()
            return mine
        whole = mine.new_empty((sum(counts), *mine.shape[1:]))
        parts = list(torch.split(whole, list(counts)))
        parts[to].copy_(mine)
        others = [rank for rank, count in enumerate(counts) if count and rank != to]
        ops = [_Op("recv", parts[rank], rank, _EXCHANGE_TAG) for rank in others]
        self._start(ops, what).wait()
        return whole

    def wait(self, work: Any, deadline: Deadline) -> None:
        """Waits for one transfer; raises RuntimeError when it failed or took too long."""
        if self.on_gloo:
            work.wait(deadline.left)
        else:
            work.wait()

    def begun(self, what: str, collectives: Callable[[], list[Any]]) -> Pending:
        """What `collectives` starts; raises RankLost."""
        try:
            works: list[tuple[int | None, Any]] = [(None, work) for work in collectives()]
            return Pending(self, what, works, len(works))
        except RuntimeError as error:
            raise self.loss([], what, error) from error

    def _broadcast(self, extent: Extent, full: Tensor) -> Any:
        part = full[extent.full_start : extent.full_start + extent.numel]
        if extent.owner == self.rank:
            self.traffic.gather_sent += part.nbytes * (self.world_size - 1)
        else:
            self.traffic.gather_received += part.nbytes
        self.traffic.messages += 1
        return dist.broadcast(part, group=self.group, async_op=True, group_src=extent.owner)

    def _begin(self, op: _Op) -> Any:
        """Past torch.distributed's functions, whose checks take longer than a small transfer."""
        if self.wires is not None:
            return self.wires.begin(op.kind, op.part, op.peer, op.tag)
        return (self.group.send if op.kind == "send" else self.group.recv)([op.part], op.peer, op.tag)

    def _start(self, ops: list[_Op], what: str) -> Pending:
        if not ops:
            return Pending(self, what, [])
        self.traffic.messages += len(ops)
        ops.sort(key=_receives_first)  # what is awaited is sent without asking
        try:
            works = [self._begin(op) for op in ops] if self.on_gloo else _begin_as_one(ops, self.group)
        except RuntimeError as error:
            raise self.loss(sorted({op.peer for op in ops}), what, error) from error
        if len(works) == len(ops):
            incoming = sum(op.kind == "recv" for op in ops)
            return Pending(self, what, [(op.peer, work) for op, work in zip(ops, works, strict=True)], incoming)
        return Pending(self, what, [(None, work) for work in works], len(works))  # NCCL: one for the whole batch


@dataclass(slots=True)
class _Op:
    """One transfer that has not begun."""

    kind: Literal["send", "recv"]
    part: Tensor
    peer: int
    tag: int


def _receives_first(op: _Op) -> bool:
    return op.kind == "send"


def _begin_as_one(ops: Sequence[_Op], group: dist.ProcessGroup) -> list[Any]:
    kinds = {"send": dist.isend, "recv": dist.irecv}
    return dist.batch_isend_irecv(
        [dist.P2POp(kinds[op.kind], op.part, group=group, group_peer=op.peer) for op in ops]
    )  # fmt: skip


class ReplicaLinks:
    """Sums an owner's gradients over the replicas of its shard: the outer dimension of a 2-D mesh."""

    def __init__(self, group: dist.ProcessGroup, links: Links) -> None:
        self.world_size = dist.get_world_size(group)
        self._group = group
        self._links = links

    def start_sum(self, gradients: Tensor, what: str) -> Pending:
        self._links.traffic.replicate_reduced += gradients.nbytes
        return self._links.begun(
            f"{what} over the replicas", lambda: [dist.all_reduce(gradients, group=self._group, async_op=True)]
        )


def gather_tag(index: int) -> int:
    """The first of those of a unit's gathers."""
    return _FIRST_TAG + index * 2 * _TAGS_A_UNIT


def reduce_tag(index: int) -> int:
    """The first of those of a unit's reductions."""
    return gather_tag(index) + _TAGS_A_UNIT
