"""The Gossip service to and from protobuf: one exchange's messages."""

from __future__ import annotations

from typing import cast

from peerloom.proto import gossip_pb2
from peerloom.protocol import checks, limits
from peerloom.protocol.codec_base import parse, serialize
from peerloom.protocol.codec_chunk import checked_chunk, read_chunk, written_chunk
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.messages import (
    Accept,
    Ack,
    Chunk,
    Commit,
    Decline,
    DeclineReason,
    ExchangeMessage,
    Hold,
    Offer,
    PayloadEnd,
    StreamEnd,
    Withdraw,
)
from peerloom.protocol.types import Encoding


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
