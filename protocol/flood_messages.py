"""What SeedFlow floods, as plain values; `codec_flood.py` turns them to and from protobuf.

A message is (origin, sequence, step, scalar): the origin's local step number `step`, the `sequence`-th of all messages
it ever made, from 0, and its scalar in fixed point. Its seed is derived from (run seed, origin key, sequence).

An origin's messages form a hash chain, and what it signs is a place in the chain: one signature covers all before it.
So a run of messages travels with the signature of its last one alone, in whatever pieces, and two signatures over
different chains at one place convict the origin by themselves. State counts, of each origin, an unbroken prefix. (The
chain is BLAKE2b of 16 bytes: two histories under one value take some 2^64 hashes.)
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from peerloom.protocol.limits import CHAIN_BYTES
from peerloom.protocol.types import PeerId, RunId

_DOMAIN = b"peerloom-flood-v1\0"
_MESSAGE = struct.Struct("<qi")
_PLACE = struct.Struct("<qq")


class FloodMessage(NamedTuple):
    """One local step of one node: `scalar` in units of 2^-fraction_bits."""

    origin: PeerId
    sequence: int
    step: int
    scalar: int


def origin_key(origin: PeerId) -> int:
    """The 64 bits that stand for an origin in seeds: SHA-256 of the peer id, its first 8 bytes, big-endian."""
    return int.from_bytes(hashlib.sha256(origin.encode()).digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages in a row: message j has sequence `sequence + j`, step `step + j` and `scalars[j]`."""

    origin: PeerId
    sequence: int
    step: int
    scalars: tuple[int, ...]

    @property
    def end(self) -> int:
        """The sequence past the last one."""
        return self.sequence + len(self.scalars)

    @property
    def end_step(self) -> int:
        """The step past the last one."""
        return self.step + len(self.scalars)

    def messages(self) -> Iterator[FloodMessage]:
        """The messages one by one."""
        for index, scalar in enumerate(self.scalars):
            yield FloodMessage(self.origin, self.sequence + index, self.step + index, scalar)

    def since(self, sequence: int) -> Batch:
        """The part from `sequence` on, which lies within the batch or at its end."""
        skip = sequence - self.sequence
        return Batch(self.origin, sequence, self.step + skip, self.scalars[skip:]) if skip else self


@dataclass(frozen=True, slots=True)
class Segment:
    """A batch with the origin's signature over the chain at its end.

    `prev` is the chain before it as the sender holds it; empty: the end of the last segment of this origin on the same
    link, or what the receiver holds itself.
    """

    batch: Batch
    signature: bytes
    prev: bytes = b""


@dataclass(frozen=True, slots=True)
class Head:
    """How far a node is with one origin: all messages below `next`, under `chain`; it can serve from `base`."""

    origin: PeerId
    next: int
    chain: bytes
    base: int = 0


@dataclass(frozen=True, slots=True)
class Versions:
    """A version vector, and which origins were cut off."""

    heads: tuple[Head, ...]
    cut: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class Want:
    """Asks for an origin's messages from `sequence` on, a page of them."""

    origin: PeerId
    sequence: int


@dataclass(frozen=True, slots=True)
class Wants:
    """Asks for several origins at once."""

    wants: tuple[Want, ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """New messages, pushed or asked for."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Two segments that one origin signed and that cannot both be its history: they begin at one sequence.

    Either may be empty: then its signature is over `prev` itself.
    """

    one: Segment
    other: Segment

    @property
    def origin(self) -> PeerId:
        """The liar."""
        return self.one.batch.origin


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a state is with one origin, as the origin signed it; the next message's step is `step` or more."""

    origin: PeerId
    next: int
    step: int
    chain: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which messages a state counts, and whose it does not count any more."""

    marks: tuple[Mark, ...]
    proofs: tuple[Proof, ...] = ()


@dataclass(frozen=True, slots=True)
class HashQuery:
    """Asks for the state hash at exactly these heads."""

    number: int
    heads: tuple[Head, ...]


@dataclass(frozen=True, slots=True)
class HashReply:
    """The state hash (32 bytes); empty when this node is not as far, or cannot go back so far."""

    number: int
    digest: bytes


FrameBody = Segments | Versions | Wants | Proof | HashQuery | HashReply


def first_chain(run_id: RunId, origin: PeerId) -> bytes:
    """The chain before an origin's first message."""
    return hashlib.blake2b(_DOMAIN + run_id.encode() + b"\0" + origin.encode(), digest_size=CHAIN_BYTES).digest()


def fold(chain: bytes, batch: Batch) -> bytes:
    """The chain after a batch that begins at `chain`: of each message BLAKE2b(chain, step, scalar)."""
    hashed, pack, step = hashlib.blake2b, _MESSAGE.pack, batch.step
    for scalar in batch.scalars:
        chain = hashed(chain + pack(step, scalar), digest_size=CHAIN_BYTES).digest()
        step += 1
    return chain


def signed_bytes(run_id: RunId, origin: PeerId, end: int, step: int, chain: bytes) -> bytes:
    """What an origin signs: the chain below `end`, and the step past the last one there.

    The chain has the steps too, but who is told of a place alone (a Mark) could not tell the step from it.
    """
    return _DOMAIN + run_id.encode() + b"\0" + origin.encode() + b"\0" + _PLACE.pack(end, step) + chain
