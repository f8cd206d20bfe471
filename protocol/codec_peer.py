"""The Peer service to and from protobuf: the handshake, and dialling back."""

from __future__ import annotations

from collections.abc import Sequence

from peerloom.proto import peer_pb2
from peerloom.protocol import checks, limits
from peerloom.protocol.codec_base import parse, serialize
from peerloom.protocol.codec_record import check_versions
from peerloom.protocol.handshake import Hello, HelloReply, Prove, RunClaim
from peerloom.protocol.messages import DialBack
from peerloom.protocol.types import PeerId, RunId


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


def _put_claim(message: peer_pb2.HelloRequest | peer_pb2.HelloReply, claim: RunClaim) -> None:
    for name in RunClaim.__slots__:
        setattr(message, name, getattr(claim, name))


def _claim(message: peer_pb2.HelloRequest | peer_pb2.HelloReply) -> RunClaim:
    check_versions(message)
    return RunClaim(
        peer_id=PeerId(checks.peer_id("peer id", message.peer_id)),
        run_id=RunId(checks.hex_text("run id", message.run_id, limits.RUN_ID_CHARS, exact=True)),
        spec_hash=checks.hex_text("spec hash", message.spec_hash, limits.MAX_DIGEST_CHARS),
        version=checks.text("version", message.version, limits.MAX_VERSION_CHARS),
        protocol_min=message.protocol_min,
        protocol_max=message.protocol_max,
    )
