"""Proof that an origin signed two histories: what contradicts what, and whether a proof convicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from peerloom.protocol.flood_history import History
from peerloom.protocol.flood_messages import Batch, Proof, Segment, fold, signed_bytes
from peerloom.protocol.types import PeerId, RunId

Verify = Callable[[PeerId, bytes, bytes], bool]  # (peer, data, signature): did the owner of the id sign the data?


def is_signed(segment: Segment, run_id: RunId, verify: Verify) -> bool:
    """Whether the origin signed the chain that begins at `segment.prev` and ends with the batch."""
    batch = segment.batch
    chain = fold(segment.prev, batch)
    signed = signed_bytes(run_id, batch.origin, batch.end, batch.end_step, chain)
    return verify(batch.origin, signed, segment.signature)


def convicts(proof: Proof, run_id: RunId, verify: Verify) -> bool:
    """Whether one origin signed both branches and they part: other chains at the last place that both reach."""
    one, other = proof.one.batch, proof.other.batch
    if one.origin != other.origin or one.sequence != other.sequence:
        return False
    both = min(len(one.scalars), len(other.scalars))
    if fold(proof.one.prev, _first(one, both)) == fold(proof.other.prev, _first(other, both)):
        return False
    return is_signed(proof.one, run_id, verify) and is_signed(proof.other, run_id, verify)


def contradiction(history: History, segment: Segment) -> Proof | None:
    """The proof that lies in a signed segment, its `prev` given, against what is held; None where they agree.

    Also None where nothing is held of that place any more.
    """
    batch = segment.batch
    if not history.base <= batch.sequence <= history.next:
        return None
    at = batch.sequence if segment.prev != history.chain_at(batch.sequence) else history.differs(batch)
    if at is None:
        return None
    own = history.branch(at)
    skipped = _first(batch, at - batch.sequence)
    theirs = replace(segment, batch=batch.since(at), prev=fold(segment.prev, skipped))
    return None if own is None else Proof(own, theirs)


def _first(batch: Batch, count: int) -> Batch:
    return replace(batch, scalars=batch.scalars[:count])
