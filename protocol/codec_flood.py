"""SeedFlow's stream to and from protobuf: numbered origins and differences, so each direction of a stream has a state.

`FloodWriter` and `FloodReader` are the two ends of one direction. Like `codec.py`, a reader raises MalformedMessage or
LimitExceeded and nothing else; after either the stream is of no more use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from google.protobuf.message import DecodeError

from peerloom.proto import flood_pb2, gossip_pb2
from peerloom.protocol import checks, limits
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.flood_messages import (
    Batch,
    FrameBody,
    HashQuery,
    HashReply,
    Head,
    Mark,
    Proof,
    Segment,
    Segments,
    Snapshot,
    Versions,
    Want,
    Wants,
)
from peerloom.protocol.messages import StreamEnd
from peerloom.protocol.peer_id import KEY_BYTES, peer_id_of, public_key_of
from peerloom.protocol.types import PeerId

_END_TAG = b"\x7a"  # field 15, length-delimited
_key_of = lru_cache(2 * limits.MAX_FLOOD_ORIGINS)(public_key_of)  # base58 of an id takes longer than all else
_peer_of = lru_cache(2 * limits.MAX_FLOOD_ORIGINS)(peer_id_of)


@dataclass(frozen=True, slots=True)
class FloodFrame:
    """One encoded message of Flood.Push; what it says depends on those before it on the same stream."""

    data: bytes


def encode_frame(message: FloodFrame | StreamEnd) -> bytes:
    """The bytes of a frame; raises LimitExceeded."""
    if isinstance(message, FloodFrame):
        limits.check_size("flood frame", len(message.data), limits.MAX_FRAME_BYTES)
        return message.data
    end = gossip_pb2.End(error=message.error, detail=message.detail)
    return flood_pb2.FloodEnvelope(end=end).SerializeToString()


def decode_frame(data: bytes) -> FloodFrame | StreamEnd:
    """A frame, unread; or the end of the stream."""
    limits.check_size("flood frame", len(data), limits.MAX_FRAME_BYTES)
    if not data.startswith(_END_TAG):
        return FloodFrame(data)
    end = _parse(data).end
    error = checks.text("error", end.error, limits.MAX_NAME_CHARS)
    return StreamEnd(error, checks.text("detail", end.detail, limits.MAX_ERROR_CHARS))


class FloodWriter:
    """The sending end of one direction; `payload` counts the bytes of batches without signatures and chains."""

    def __init__(self) -> None:
        self._numbers: dict[PeerId, int] = {}
        self._ends: dict[PeerId, tuple[int, int]] = {}
        self.payload = 0

    def write(self, body: FrameBody) -> FloodFrame:
        """Encodes one message; raises LimitExceeded when it is too large to send."""
        envelope = flood_pb2.FloodEnvelope()
        match body:
            case Segments(segments):
                envelope.batches.extend([self._batch(segment) for segment in segments])
            case Versions(heads, cut):
                envelope.versions.heads.extend([self._head(head) for head in heads])
                envelope.versions.cut.extend([_key_of(origin) for origin in cut])
                envelope.versions.SetInParent()
            case Wants(wants):
                envelope.wants.extend([self._want(want) for want in wants])
            case Proof():
                envelope.proof.CopyFrom(proof_message(body))
            case HashQuery(number, heads):
                envelope.hash_query.number = number
                envelope.hash_query.heads.extend([self._head(head) for head in heads])
                envelope.hash_query.SetInParent()
            case HashReply(number, digest):
                envelope.hash_reply.number, envelope.hash_reply.digest = number, digest
                envelope.hash_reply.SetInParent()
        data = envelope.SerializeToString()
        limits.check_size("flood frame", len(data), limits.MAX_FRAME_BYTES)
        return FloodFrame(data)

    def _number(self, origin: PeerId) -> tuple[int, bytes]:
        """The origin's number, and its key when it is named for the first time."""
        number = self._numbers.get(origin)
        if number is not None:
            return number, b""
        limits.check_number_of("origins on a stream", len(self._numbers) + 1, limits.MAX_FLOOD_ORIGINS)
        number = self._numbers[origin] = len(self._numbers)
        return number, _key_of(origin)

    def _batch(self, segment: Segment) -> flood_pb2.FloodBatch:
        batch = segment.batch
        number, key = self._number(batch.origin)
        end, end_step = self._ends.get(batch.origin, (0, 0))
        self._ends[batch.origin] = (batch.end, batch.end_step)
        message = flood_pb2.FloodBatch(
            origin=number, sequence=batch.sequence - end, step=batch.step - end_step, scalars=batch.scalars, key=key
        )
        size = message.ByteSize()
        self.payload += size + (2 if size < 128 else 3)
        message.signature, message.prev = segment.signature, segment.prev
        return message

    def _head(self, head: Head) -> flood_pb2.FloodHead:
        number, key = self._number(head.origin)
        return flood_pb2.FloodHead(origin=number, next=head.next, chain=head.chain, base=head.base, key=key)

    def _want(self, want: Want) -> flood_pb2.FloodWant:
        number, key = self._number(want.origin)
        return flood_pb2.FloodWant(origin=number, sequence=want.sequence, key=key)


class FloodReader:
    """The receiving end of one direction."""

    def __init__(self) -> None:
        self._origins: list[PeerId] = []
        self._ends: dict[PeerId, tuple[int, int]] = {}

    def read(self, frame: FloodFrame) -> FrameBody:
        """Decodes the next message."""
        envelope = _parse(frame.data)
        named = [field.name for field, _ in envelope.ListFields()]
        if len(named) != 1:
            raise MalformedMessage(f"a flood frame holds {len(named)} messages instead of one")
        match named[0]:
            case "batches":
                return Segments(self._segments(envelope.batches))
            case "versions":
                return self._versions(envelope.versions)
            case "wants":
                limits.check_number_of("wants", len(envelope.wants), limits.MAX_WANTS)
                return Wants(tuple([self._want(want) for want in envelope.wants]))
            case "proof":
                return read_proof(envelope.proof)
            case "hash_query":
                query = envelope.hash_query
                return HashQuery(query.number, self._heads(query.heads))
            case "hash_reply":
                reply = envelope.hash_reply
                if reply.digest:
                    checks.octets("state hash", reply.digest, limits.DIGEST_BYTES)
                return HashReply(reply.number, reply.digest)
        raise MalformedMessage("a flood frame holds no message known here")

    def _origin(self, number: int, key: bytes) -> PeerId:
        if not key:
            if number >= len(self._origins):
                raise MalformedMessage(f"origin {number} was not introduced on this stream")
            return self._origins[number]
        if number != len(self._origins):
            raise MalformedMessage(f"origin {number} is introduced while {len(self._origins)} is next")
        limits.check_number_of("origins on a stream", number + 1, limits.MAX_FLOOD_ORIGINS)
        origin = _peer_of(checks.octets("origin key", key, KEY_BYTES))
        self._origins.append(origin)
        return origin

    def _segments(self, batches: Iterable[flood_pb2.FloodBatch]) -> tuple[Segment, ...]:
        segments, total = [], 0
        for message in batches:
            scalars = tuple(message.scalars)
            total += len(scalars)
            limits.check_number_of("messages in a frame", total, limits.MAX_PAGE)
            if not 1 <= len(scalars) <= limits.MAX_SEGMENT:
                raise MalformedMessage(f"a batch holds {len(scalars)} messages, outside 1 to {limits.MAX_SEGMENT}")
            origin = self._origin(message.origin, message.key)
            end, end_step = self._ends.get(origin, (0, 0))
            sequence = checks.whole("sequence", end + message.sequence, limits.MAX_FLOOD_STEP)
            step = checks.whole("step", end_step + message.step, limits.MAX_FLOOD_STEP)
            batch = Batch(origin, sequence, step, scalars)
            self._ends[origin] = (batch.end, batch.end_step)
            segments.append(Segment(batch, _signature(message.signature), _chain(message.prev)))
        return tuple(segments)

    def _heads(self, heads: Iterable[flood_pb2.FloodHead]) -> tuple[Head, ...]:
        found = []
        for head in heads:
            origin = self._origin(head.origin, head.key)
            after = checks.whole("version", head.next, limits.MAX_FLOOD_STEP)
            base = checks.whole("base", head.base, after)
            found.append(Head(origin, after, checks.octets("chain", head.chain, limits.CHAIN_BYTES), base))
        return tuple(found)

    def _versions(self, versions: flood_pb2.FloodVersions) -> Versions:
        limits.check_number_of("origins cut off", len(versions.cut), limits.MAX_FLOOD_CUT)
        cut = tuple([_peer_of(checks.octets("origin key", key, KEY_BYTES)) for key in versions.cut])
        return Versions(self._heads(versions.heads), cut)

    def _want(self, want: flood_pb2.FloodWant) -> Want:
        return Want(
            self._origin(want.origin, want.key), checks.whole("sequence", want.sequence, limits.MAX_FLOOD_STEP)
        )


def proof_message(proof: Proof) -> flood_pb2.FloodProof:
    """A proof as it travels and as it is kept."""
    return flood_pb2.FloodProof(
        key=_key_of(proof.origin), one=_branch_message(proof.one), other=_branch_message(proof.other)
    )


def encode_proof(proof: Proof) -> bytes:
    """A proof that stands alone."""
    return proof_message(proof).SerializeToString()


def decode_proof(data: bytes) -> Proof:
    """A proof that stands alone; whether it convicts is `flood_proof`'s business."""
    limits.check_size("proof", len(data), limits.MAX_FRAME_BYTES)
    message = flood_pb2.FloodProof()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes that are no proof") from None
    return read_proof(message)


def encode_snapshot(snapshot: Snapshot, state_digest: bytes) -> bytes:
    """A snapshot that stands alone; `state_digest` is BLAKE3 of the state that counts these messages."""
    marks = [
        flood_pb2.FloodMark(
            key=_key_of(mark.origin), next=mark.next, step=mark.step, chain=mark.chain, signature=mark.signature
        )
        for mark in snapshot.marks
    ]
    proofs = [proof_message(proof) for proof in snapshot.proofs]
    return flood_pb2.FloodSnapshot(marks=marks, proofs=proofs, state_digest=state_digest).SerializeToString()


def decode_snapshot(data: bytes) -> tuple[Snapshot, bytes]:
    """A snapshot and the digest of its state; whether it is true is `FloodMachine.check`'s business."""
    message = flood_pb2.FloodSnapshot()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes that are no snapshot") from None
    limits.check_number_of("origins in a snapshot", len(message.marks), limits.MAX_FLOOD_ORIGINS)
    limits.check_number_of("proofs in a snapshot", len(message.proofs), limits.MAX_FLOOD_CUT)
    marks = tuple([_mark(mark) for mark in message.marks])
    proofs = tuple([read_proof(proof) for proof in message.proofs])
    return Snapshot(marks, proofs), checks.octets("state digest", message.state_digest, limits.DIGEST_BYTES)


def _mark(mark: flood_pb2.FloodMark) -> Mark:
    return Mark(
        _peer_of(checks.octets("origin key", mark.key, KEY_BYTES)),
        checks.whole("version", mark.next, limits.MAX_FLOOD_STEP),
        checks.whole("step", mark.step, limits.MAX_FLOOD_STEP),
        checks.octets("chain", mark.chain, limits.CHAIN_BYTES),
        _signature(mark.signature),
    )


def encode_segment(segment: Segment) -> bytes:
    """A segment that stands alone, as logs keep it."""
    return FloodWriter()._batch(segment).SerializeToString()


def decode_segment(data: bytes) -> Segment:
    """A segment that stands alone."""
    message = flood_pb2.FloodBatch()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes that are no batch") from None
    return FloodReader()._segments([message])[0]


def read_proof(message: flood_pb2.FloodProof) -> Proof:
    """The proof in a message."""
    origin = _peer_of(checks.octets("origin key", message.key, KEY_BYTES))
    return Proof(_branch(origin, message.one), _branch(origin, message.other))


def _branch_message(segment: Segment) -> flood_pb2.FloodBranch:
    batch = segment.batch
    return flood_pb2.FloodBranch(
        sequence=batch.sequence, step=batch.step, scalars=batch.scalars, prev=segment.prev, signature=segment.signature
    )


def _branch(origin: PeerId, message: flood_pb2.FloodBranch) -> Segment:
    scalars = tuple(message.scalars)
    limits.check_number_of("messages in a branch", len(scalars), limits.MAX_SEGMENT)
    batch = Batch(
        origin,
        checks.whole("sequence", message.sequence, limits.MAX_FLOOD_STEP),
        checks.whole("step", message.step, limits.MAX_FLOOD_STEP),
        scalars,
    )
    prev = checks.octets("chain", message.prev, limits.CHAIN_BYTES)
    return Segment(batch, _signature(message.signature), prev)


def _signature(value: bytes) -> bytes:
    return checks.octets("signature", value, limits.SIGNATURE_BYTES)


def _chain(value: bytes) -> bytes:
    return checks.octets("chain", value, limits.CHAIN_BYTES) if value else b""


def _parse(data: bytes) -> flood_pb2.FloodEnvelope:
    envelope = flood_pb2.FloodEnvelope()
    try:
        envelope.ParseFromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes that are no flood frame") from None
    return envelope
