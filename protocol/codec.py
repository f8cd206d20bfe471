"""Plain values to and from protobuf bytes, service by service: only the files codec*.py of protocol/ see protobuf.

Every `decode_*` takes bytes from a peer, checks each field, and raises MalformedMessage or LimitExceeded and nothing
else. Every `encode_*` takes our own values and raises LimitExceeded when they are too large to send.
"""

from __future__ import annotations

from peerloom.protocol.codec_gossip import decode_exchange, encode_exchange
from peerloom.protocol.codec_peer import (
    decode_dial_back,
    decode_dialled_back,
    decode_hello,
    decode_hello_reply,
    decode_prove,
    decode_status_request,
    decode_token,
    encode_dial_back,
    encode_dialled_back,
    encode_hello,
    encode_hello_reply,
    encode_prove,
    encode_status_request,
    encode_token,
)
from peerloom.protocol.codec_record import decode_record, decode_status, encode_record, encode_status
from peerloom.protocol.codec_state import decode_fetch_request, decode_state, encode_fetch_request, encode_state

__all__ = [
    "decode_dial_back",
    "decode_dialled_back",
    "decode_exchange",
    "decode_fetch_request",
    "decode_hello",
    "decode_hello_reply",
    "decode_prove",
    "decode_record",
    "decode_state",
    "decode_status",
    "decode_status_request",
    "decode_token",
    "encode_dial_back",
    "encode_dialled_back",
    "encode_exchange",
    "encode_fetch_request",
    "encode_hello",
    "encode_hello_reply",
    "encode_prove",
    "encode_record",
    "encode_state",
    "encode_status",
    "encode_status_request",
    "encode_token",
]
