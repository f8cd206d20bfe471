"""Plain values to and from protobuf bytes: the only file of protocol/ that sees protobuf.

Every `decode_*` takes bytes from a peer, checks each field, and raises MalformedMessage or LimitExceeded and nothing
else. Every `encode_*` takes our own values and raises LimitExceeded when they are too large to send.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar, cast

from google.protobuf.message import DecodeError, Message

from peerloom.proto import common_pb2, gossip_pb2, peer_pb2, state_pb2
from peerloom.protocol import checks, limits
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.handshake import Hello, HelloReply, Prove, RunClaim
from peerloom.protocol.messages import (
    Accept,
    Ack,
    Chunk,
    Commit,
    Decline,
    DeclineReason,
    DialBack,
    ExchangeMessage,
    FetchRequest,
    Hold,
    Offer,
    PayloadEnd,
    StateKind,
    StateManifest,
    StateMessage,
    StatePiece,
    StreamEnd,
    Withdraw,
)
from peerloom.protocol.types import Encoding, NodeState, NodeStatus, PeerId, PeerRecord, Reach, Role, RunId, StageRole

M = TypeVar("M", bound=Message)

# what precedes the fields of a chunk in its envelope: (field number << 3) | wire type
_CHUNK, _OFFSET, _DATA = (bytes([number << 3 | kind]) for number, kind in ((5, 2), (1, 0), (2, 2)))
_VARINT_BYTES = 9  # that hold 63 bits


def encode_exchange(message: ExchangeMessage | StreamEnd) -> bytes:
    """One envelope of Gossip.Exchange."""
    if isinstance(message, Chunk):
        return written_chunk(message)
    return serialize(_exchange_envelope(message))


def decode_exchange(data: bytes) -> ExchangeMessage | StreamEnd:
    """The message in an envelope of Gossip.Exchange; a chunk's data may be a view of `data`."""
    if (chunk := read_chunk(data)) is not None:
        return chunk
    envelope = parse(gossip_pb2.ExchangeEnvelope, data)
    match envelope.WhichOneof("message"):
        case "offer":
            return _offer(envelope.offer)
        case "hold":
            return Hold()
        case "accept":
            wish = checks.whole("largest chunk", envelope.accept.max_chunk_bytes, limits.CHUNK_BYTES)
            return Accept(checks.position("round", envelope.accept.round), wish)
        case "decline":
            reason = checks.one_of("reason to decline", envelope.decline.reason, DeclineReason)
            detail = checks.text("detail", envelope.decline.detail, limits.MAX_TEXT_CHARS)
            return Decline(cast(DeclineReason, reason), detail)
        case "chunk":
            return checked_chunk(envelope.chunk.offset, envelope.chunk.data)
        case "payload_end":
            return PayloadEnd(checks.octets("digest", envelope.payload_end.digest, limits.LINK_DIGEST_BYTES))
        case "commit":
            return Commit()
        case "ack":
            return Ack()
        case "withdraw":
            return Withdraw(checks.text("reason to withdraw", envelope.withdraw.reason, limits.MAX_TEXT_CHARS))
        case "end":
            error = checks.text("error", envelope.end.error, limits.MAX_NAME_CHARS)
            return StreamEnd(error, checks.text("detail", envelope.end.detail, limits.MAX_ERROR_CHARS))
    raise MalformedMessage("an exchange envelope holds no message known here")


def encode_state(message: StateMessage) -> bytes:
    """One envelope of State.Fetch's answer."""
    if isinstance(message, StatePiece):
        limits.check_size("state piece", len(message.data), limits.CHUNK_BYTES)
        piece = state_pb2.StatePiece(index=message.index, data=message.data)
        return serialize(state_pb2.StateEnvelope(piece=piece))
    limits.check_number_of("pieces", len(message.piece_digests), limits.MAX_PIECES)
    manifest = state_pb2.StateManifest(
        snapshot=message.snapshot,
        round=message.round,
        step=message.step,
        layout=message.layout,
        total_bytes=message.total_bytes,
        piece_bytes=message.piece_bytes,
        piece_digests=b"".join(message.piece_digests),
        held_out_loss=_finite_or_none(message.held_out_loss),
    )
    return serialize(state_pb2.StateEnvelope(manifest=manifest))


def decode_state(data: bytes) -> StateMessage:
    """The message in an envelope of State.Fetch's answer."""
    envelope = parse(state_pb2.StateEnvelope, data)
    match envelope.WhichOneof("message"):
        case "manifest":
            return _manifest(envelope.manifest)
        case "piece":
            index = checks.whole("piece index", envelope.piece.index, limits.MAX_PIECES - 1)
            return StatePiece(index, checks.bounded("state piece", envelope.piece.data, limits.CHUNK_BYTES))
    raise MalformedMessage("a state envelope holds no message known here")


def encode_fetch_request(request: FetchRequest) -> bytes:
    """The request of State.Fetch."""
    return serialize(
        state_pb2.FetchRequest(
            layout=request.layout,
            snapshot=request.snapshot,
            start_piece=request.start_piece,
            max_piece_bytes=request.max_piece_bytes,
            kind="" if request.kind == "theta" else request.kind,
        )
    )


def decode_fetch_request(data: bytes) -> FetchRequest:
    """The request of State.Fetch."""
    request = parse(state_pb2.FetchRequest, data)
    return FetchRequest(
        checks.hex_text("layout digest", request.layout, limits.MAX_DIGEST_CHARS),
        checks.text("snapshot", request.snapshot, limits.MAX_SNAPSHOT_CHARS),
        checks.whole("start piece", request.start_piece, limits.MAX_PIECES),
        checks.whole("largest piece", request.max_piece_bytes, limits.CHUNK_BYTES),
        cast(StateKind, checks.one_of("kind of state", request.kind or "theta", StateKind)),
    )


def encode_record(record: PeerRecord) -> bytes:
    """A peer record; a loss that is not finite is left out, a reason is cut to one line."""
    return serialize(_record_message(record))


def decode_record(data: bytes) -> PeerRecord:
    """A peer record; its signature is the caller's business."""
    return _record(parse(common_pb2.PeerRecord, data))


def encode_status(status: NodeStatus) -> bytes:
    """The reply of Peer.Status; counters that are not finite are left out."""
    limits.check_number_of("partners", len(status.partners), limits.MAX_PARTNERS)
    limits.check_number_of("counters", len(status.counters), limits.MAX_COUNTERS)
    counters = {name: value for name, value in status.counters.items() if math.isfinite(value)}
    partners: dict[str, int] = dict(status.partners.items())
    return serialize(peer_pb2.NodeStatus(record=_record_message(status.record), partners=partners, counters=counters))


def decode_status(data: bytes) -> NodeStatus:
    """The reply of Peer.Status."""
    status = parse(peer_pb2.NodeStatus, data)
    limits.check_number_of("partners", len(status.partners), limits.MAX_PARTNERS)
    limits.check_number_of("counters", len(status.counters), limits.MAX_COUNTERS)
    return NodeStatus(
        record=_record(status.record),
        partners={
            PeerId(checks.peer_id("partner", peer)): checks.whole("exchanges with a partner", count)
            for peer, count in status.partners.items()
        },
        counters={
            checks.text("counter", name, limits.MAX_METRIC_CHARS, empty=False): checks.finite("counter", value)
            for name, value in status.counters.items()
        },
    )


def encode_hello(hello: Hello) -> bytes:
    """The request of Peer.Hello."""
    request = peer_pb2.HelloRequest(wall_time=hello.wall_s, challenge=hello.challenge)
    _put_claim(request, hello.claim)
    return serialize(request)


def decode_hello(data: bytes) -> Hello:
    """The request of Peer.Hello."""
    request = parse(peer_pb2.HelloRequest, data, limits.MAX_HELLO_BYTES)
    return Hello(
        claim=_claim(request),
        wall_s=checks.wall_time("wall time", request.wall_time),
        challenge=checks.octets("challenge", request.challenge, limits.CHALLENGE_BYTES),
    )


def encode_hello_reply(reply: HelloReply) -> bytes:
    """The reply of Peer.Hello."""
    message = peer_pb2.HelloReply(wall_time=reply.wall_s, nonce=reply.nonce, signature=reply.signature)
    _put_claim(message, reply.claim)
    return serialize(message)


def decode_hello_reply(data: bytes) -> HelloReply:
    """The reply of Peer.Hello."""
    reply = parse(peer_pb2.HelloReply, data, limits.MAX_HELLO_BYTES)
    return HelloReply(
        claim=_claim(reply),
        wall_s=checks.wall_time("wall time", reply.wall_time),
        nonce=checks.bounded("nonce", reply.nonce, limits.MAX_NONCE_BYTES),
        signature=checks.octets("signature", reply.signature, limits.SIGNATURE_BYTES),
    )


def encode_prove(prove: Prove) -> bytes:
    """The request of Peer.Prove."""
    return serialize(peer_pb2.ProveRequest(peer_id=prove.peer_id, nonce=prove.nonce, signature=prove.signature))


def decode_prove(data: bytes) -> Prove:
    """The request of Peer.Prove."""
    request = parse(peer_pb2.ProveRequest, data, limits.MAX_HELLO_BYTES)
    return Prove(
        peer_id=PeerId(checks.peer_id("peer id", request.peer_id)),
        nonce=checks.bounded("nonce", request.nonce, limits.MAX_NONCE_BYTES),
        signature=checks.octets("signature", request.signature, limits.SIGNATURE_BYTES),
    )


def encode_token(token: bytes) -> bytes:
    """The reply of Peer.Prove."""
    return serialize(peer_pb2.ProveReply(token=token))


def decode_token(data: bytes) -> bytes:
    """The reply of Peer.Prove."""
    reply = parse(peer_pb2.ProveReply, data, limits.MAX_HELLO_BYTES)
    return checks.octets("session token", reply.token, limits.TOKEN_BYTES)


def encode_status_request() -> bytes:
    """The request of Peer.Status."""
    return serialize(peer_pb2.StatusRequest())


def decode_status_request(data: bytes) -> None:
    """The request of Peer.Status."""
    parse(peer_pb2.StatusRequest, data, limits.MAX_HELLO_BYTES)


def encode_dial_back(request: DialBack) -> bytes:
    """The request of Peer.DialBack."""
    return serialize(peer_pb2.DialBackRequest(addresses=request.addresses, cert_der=request.cert_der))


def decode_dial_back(data: bytes) -> DialBack:
    """The request of Peer.DialBack."""
    request = parse(peer_pb2.DialBackRequest, data, limits.MAX_HELLO_BYTES)
    return DialBack(
        addresses=_dial_back_addresses(request.addresses),
        cert_der=checks.bounded("certificate", request.cert_der, limits.MAX_CERT_BYTES),
    )


def encode_dialled_back(reached: tuple[str, ...]) -> bytes:
    """The reply of Peer.DialBack."""
    return serialize(peer_pb2.DialBackReply(reached=reached))


def decode_dialled_back(data: bytes) -> tuple[str, ...]:
    """The reply of Peer.DialBack."""
    return _dial_back_addresses(parse(peer_pb2.DialBackReply, data, limits.MAX_HELLO_BYTES).reached)


def _dial_back_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    limits.check_number_of("addresses to dial back", len(addresses), limits.MAX_DIAL_BACK_ADDRESSES)
    return tuple(checks.address(address) for address in addresses)


def parse(kind: type[M], data: bytes, limit: int = limits.MAX_MESSAGE_BYTES) -> M:
    """A message of a peer's; raises LimitExceeded or MalformedMessage."""
    limits.check_size(kind.DESCRIPTOR.name, len(data), limit)
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes that are no {kind.DESCRIPTOR.name}") from None
    return message


def serialize(message: Message) -> bytes:
    """Our own message; raises LimitExceeded."""
    data = message.SerializeToString()
    limits.check_size(message.DESCRIPTOR.name, len(data), limits.MAX_MESSAGE_BYTES)
    return data


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def written_chunk(chunk: Chunk) -> bytes:
    """The envelope as protobuf writes it, byte for byte, with one copy of the data where its classes make four."""
    size = len(chunk.data)
    limits.check_size("chunk", size, limits.CHUNK_BYTES)
    head = _OFFSET + _varint(chunk.offset) if chunk.offset else b""
    if size:
        head += _DATA + _varint(size)
    return b"".join((_CHUNK, _varint(len(head) + size), head, chunk.data))


def read_chunk(data: bytes) -> Chunk | None:
    """The chunk of an envelope laid out as `written_chunk` does, uncopied; None for another, which protobuf reads."""
    if data[:1] != _CHUNK:
        return None
    size, at = _read_varint(data, 1)
    if size != len(data) - at:
        return None
    offset = 0
    if data[at : at + 1] == _OFFSET:
        offset, at = _read_varint(data, at + 1)
    if data[at : at + 1] != _DATA:
        return None
    size, at = _read_varint(data, at + 1)
    return checked_chunk(offset, memoryview(data)[at:]) if size == len(data) - at else None


def checked_chunk(offset: int, data: bytes | memoryview) -> Chunk:
    """A chunk of a peer's, within its limits."""
    offset = checks.whole("chunk offset", offset, limits.MAX_PAYLOAD_BYTES)
    return Chunk(offset, checks.bounded("chunk", data, limits.CHUNK_BYTES))


def _varint(value: int) -> bytes:
    """Protobuf's encoding of a number of at most 63 bits: seven a byte, the lowest first."""
    if not 0 <= value <= limits.MAX_COUNT:
        raise ValueError(f"{value} is not from 0 to {limits.MAX_COUNT}")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends; (-1, at) for one cut short or of more than 63 bits."""
    value = 0
    for index, byte in enumerate(data[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    return -1, at


def _exchange_envelope(
    message: Offer | Hold | Accept | Decline | PayloadEnd | Commit | Ack | Withdraw | StreamEnd,
) -> gossip_pb2.ExchangeEnvelope:
    envelope = gossip_pb2.ExchangeEnvelope
    match message:
        case Offer():
            offer = gossip_pb2.Offer(
                exchange_id=message.exchange_id,
                round=message.round,
                layout=message.layout,
                encoding=message.encoding,
                total_bytes=message.total_bytes,
                max_chunk_bytes=message.max_chunk_bytes,
                fragment=message.fragment,
                leg=message.leg,
                weight=message.weight,
            )
            return envelope(offer=offer)
        case Hold():
            return envelope(hold=gossip_pb2.Hold())
        case Accept(round, wish):
            return envelope(accept=gossip_pb2.Accept(round=round, max_chunk_bytes=wish))
        case Decline(reason, detail):
            return envelope(decline=gossip_pb2.Decline(reason=reason, detail=checks.shown(detail)))
        case PayloadEnd(digest):
            return envelope(payload_end=gossip_pb2.PayloadEnd(digest=digest))
        case Commit():
            return envelope(commit=gossip_pb2.Commit())
        case Ack():
            return envelope(ack=gossip_pb2.Ack())
        case Withdraw(text):
            return envelope(withdraw=gossip_pb2.Withdraw(reason=checks.shown(text)))
        case StreamEnd(error, text):
            return envelope(end=gossip_pb2.End(error=error, detail=checks.shown(text, limits.MAX_ERROR_CHARS)))


def _offer(offer: gossip_pb2.Offer) -> Offer:
    return Offer(
        checks.hex_text("exchange id", offer.exchange_id, limits.EXCHANGE_ID_CHARS, exact=True),
        checks.position("round", offer.round),
        checks.hex_text("layout digest", offer.layout, limits.MAX_DIGEST_CHARS),
        cast(Encoding, checks.one_of("encoding", offer.encoding, Encoding)),
        checks.whole("offered bytes", offer.total_bytes, limits.MAX_PAYLOAD_BYTES),
        checks.whole("largest chunk", offer.max_chunk_bytes, limits.CHUNK_BYTES),
        checks.whole("fragment", offer.fragment, limits.MAX_FRAGMENTS),
        checks.whole("leg", offer.leg, limits.MAX_LEGS),
        checks.finite("weight", offer.weight) if offer.HasField("weight") else 1.0,
    )


def _manifest(manifest: state_pb2.StateManifest) -> StateManifest:
    digests, size = manifest.piece_digests, limits.DIGEST_BYTES
    limits.check_number_of("pieces", len(digests) // size, limits.MAX_PIECES)
    total = checks.whole("state's bytes", manifest.total_bytes, limits.MAX_PAYLOAD_BYTES)
    piece_bytes = checks.whole("piece's bytes", manifest.piece_bytes, limits.CHUNK_BYTES)
    if not piece_bytes or len(digests) != size * limits.pieces_of(total, piece_bytes):
        raise MalformedMessage(f"{len(digests)} bytes of digests for {total} bytes in pieces of {piece_bytes}")
    return StateManifest(
        snapshot=checks.text("snapshot", manifest.snapshot, limits.MAX_SNAPSHOT_CHARS),
        round=checks.position("round", manifest.round),
        step=checks.position("step", manifest.step),
        layout=checks.hex_text("layout digest", manifest.layout, limits.MAX_DIGEST_CHARS),
        total_bytes=total,
        piece_bytes=piece_bytes,
        piece_digests=tuple(digests[at : at + size] for at in range(0, len(digests), size)),
        held_out_loss=_optional_finite("held-out loss", manifest, "held_out_loss"),
    )


def _optional_finite(what: str, message: Message, field: str) -> float | None:
    return checks.finite(what, getattr(message, field)) if message.HasField(field) else None


def _record_message(record: PeerRecord) -> common_pb2.PeerRecord:
    fields = {name: getattr(record, name) for name in PeerRecord.__slots__}
    fields["reason"] = checks.shown(record.reason)
    fields["loss"] = _finite_or_none(record.loss)
    fields["accuracy"] = _finite_or_none(record.accuracy)
    fields["sketch"] = checks.fit_sketch(record.sketch)
    fields["stage"] = record.stage if record.stage >= 0 else None
    return common_pb2.PeerRecord(**fields)


def _record(record: common_pb2.PeerRecord) -> PeerRecord:
    limits.check_number_of("addresses", len(record.addresses), limits.MAX_ADDRESSES)
    limits.check_number_of("relays", len(record.via), limits.MAX_VIA)
    limits.check_number_of("multiaddrs", len(record.libp2p), limits.MAX_LIBP2P)
    _check_versions(record)
    return PeerRecord(
        peer_id=PeerId(checks.peer_id("peer id", record.peer_id)),
        name=checks.text("name", record.name, limits.MAX_NAME_CHARS),
        role=cast(Role, checks.one_of("role", record.role, Role)),
        addresses=tuple(checks.address(address) for address in record.addresses),
        cert_der=checks.bounded("certificate", record.cert_der, limits.MAX_CERT_BYTES),
        version=checks.text("version", record.version, limits.MAX_VERSION_CHARS),
        protocol_min=record.protocol_min,
        protocol_max=record.protocol_max,
        instance=checks.text("instance", record.instance, limits.MAX_INSTANCE_CHARS),
        started_at=checks.wall_time("started_at", record.started_at),
        issued_at=checks.wall_time("issued_at", record.issued_at),
        state=cast(NodeState, checks.one_of("state", record.state, NodeState)),
        reason=checks.text("reason", record.reason, limits.MAX_TEXT_CHARS),
        init_digest=checks.hex_text("init digest", record.init_digest, limits.MAX_DIGEST_CHARS),
        layout_digest=checks.hex_text("layout digest", record.layout_digest, limits.MAX_DIGEST_CHARS),
        round=checks.position("round", record.round),
        step=checks.position("step", record.step),
        tokens=checks.whole("tokens", record.tokens),
        tokens_per_s=checks.finite("tokens per second", record.tokens_per_s),
        loss=_optional_finite("loss", record, "loss"),
        up_bytes=checks.whole("bytes up", record.up_bytes),
        down_bytes=checks.whole("bytes down", record.down_bytes),
        sketch=checks.sketch("sketch", record.sketch),
        reach=cast(Reach, checks.one_of("reach", record.reach or "unknown", Reach)),
        via=tuple(PeerId(checks.peer_id("relay", peer)) for peer in record.via),
        relays=record.relays,
        libp2p=tuple(checks.multiaddr(address) for address in record.libp2p),
        state_hash=checks.hex_text("state hash", record.state_hash, limits.MAX_DIGEST_CHARS),
        messages=checks.whole("messages", record.messages),
        accuracy=_optional_finite("accuracy", record, "accuracy"),
        stage=checks.whole("stage", record.stage, limits.MAX_STAGES - 1) if record.HasField("stage") else -1,
        stage_role=cast(StageRole, checks.one_of("stage role", record.stage_role, StageRole)),
        up_bytes_per_s=checks.finite("bytes up per second", record.up_bytes_per_s),
        down_bytes_per_s=checks.finite("bytes down per second", record.down_bytes_per_s),
        last_partner=checks.peer_id("last partner", record.last_partner) if record.last_partner else "",
        last_met_at=checks.wall_time("last_met_at", record.last_met_at),
    )


def _put_claim(message: peer_pb2.HelloRequest | peer_pb2.HelloReply, claim: RunClaim) -> None:
    for name in RunClaim.__slots__:
        setattr(message, name, getattr(claim, name))


def _claim(message: peer_pb2.HelloRequest | peer_pb2.HelloReply) -> RunClaim:
    _check_versions(message)
    return RunClaim(
        peer_id=PeerId(checks.peer_id("peer id", message.peer_id)),
        run_id=RunId(checks.hex_text("run id", message.run_id, limits.RUN_ID_CHARS, exact=True)),
        spec_hash=checks.hex_text("spec hash", message.spec_hash, limits.MAX_DIGEST_CHARS),
        version=checks.text("version", message.version, limits.MAX_VERSION_CHARS),
        protocol_min=message.protocol_min,
        protocol_max=message.protocol_max,
    )


def _check_versions(message: peer_pb2.HelloRequest | peer_pb2.HelloReply | common_pb2.PeerRecord) -> None:
    checks.whole("newest protocol version", message.protocol_max, limits.MAX_PROTOCOL)
    checks.whole("oldest protocol version", message.protocol_min, message.protocol_max)
