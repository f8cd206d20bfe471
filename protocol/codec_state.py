"""The State service to and from protobuf: what a late joiner asks for and is given."""

from __future__ import annotations

from typing import cast

from peerloom.proto import state_pb2
from peerloom.protocol import checks, limits
from peerloom.protocol.codec_base import finite_or_none, optional_finite, parse, serialize
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.messages import FetchRequest, StateKind, StateManifest, StateMessage, StatePiece


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
        held_out_loss=finite_or_none(message.held_out_loss),
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
        held_out_loss=optional_finite("held-out loss", manifest, "held_out_loss"),
    )
