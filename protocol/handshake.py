"""Hello and Prove, as plain values: what is compared, what is signed, and which protocol version two ranges share.

Both signatures cover the fingerprint of the server's certificate, so neither can be carried over to another connection:
the server's shows that the pinned certificate is its own, the client's that it meant this very server.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerloom.protocol.errors import RunMismatch, VersionMismatch
from peerloom.protocol.types import PROTOCOL_MAX, PROTOCOL_MIN, PeerId, RunId

GREET_DOMAIN = b"peerloom-greet-v1\0"
PROVE_DOMAIN = b"peerloom-prove-v1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClaim:
    """What one side says of its run and its software; `spec_hash` is hex."""

    peer_id: PeerId
    run_id: RunId
    spec_hash: str
    version: str
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Opens a connection; `challenge` is what the server has to sign. `wall_s` is the sender's Unix time."""

    claim: RunClaim
    wall_s: float
    challenge: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloReply:
    """The server's claim, signed, and the nonce that the client has to sign."""

    claim: RunClaim
    wall_s: float
    nonce: bytes
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prove:
    """The client's signature over the nonce."""

    peer_id: PeerId
    nonce: bytes
    signature: bytes


def common_version(mine: RunClaim, theirs: RunClaim) -> int:
    """The newest protocol version that both speak; raises VersionMismatch with both ranges."""
    newest = min(mine.protocol_max, theirs.protocol_max)
    if newest < max(mine.protocol_min, theirs.protocol_min):
        raise VersionMismatch(
            f"no protocol version in common: {_speaks(mine)}, {_speaks(theirs)}; update the older of the two"
        )
    return newest


def check_same_run(mine: RunClaim, theirs: RunClaim) -> None:
    """Raises RunMismatch with both sides' values unless run id and spec hash agree."""
    if mine.run_id != theirs.run_id:
        raise RunMismatch(f"another run: {mine.peer_id} is in {mine.run_id}, {theirs.peer_id} in {theirs.run_id}")
    if mine.spec_hash != theirs.spec_hash:
        raise RunMismatch(
            f"run {mine.run_id} with another spec: {mine.peer_id} holds {mine.spec_hash}, "
            f"{theirs.peer_id} holds {theirs.spec_hash}"
        )


def greeting(hello: Hello, reply_claim: RunClaim, nonce: bytes, fingerprint: bytes) -> bytes:
    """What the server signs in its HelloReply; `fingerprint` is of the certificate it is reached under."""
    ours = (reply_claim.peer_id, reply_claim.run_id, reply_claim.spec_hash, reply_claim.version)
    versions = reply_claim.protocol_min.to_bytes(4, "big") + reply_claim.protocol_max.to_bytes(4, "big")
    texts = [text.encode() for text in (*ours, hello.claim.peer_id)]
    return GREET_DOMAIN + _framed(hello.challenge, nonce, fingerprint, versions, *texts)


def proof(peer_id: PeerId, run_id: RunId, nonce: bytes, fingerprint: bytes) -> bytes:
    """What the client signs in its Prove; `fingerprint` is of the server's certificate."""
    return PROVE_DOMAIN + _framed(nonce, fingerprint, run_id.encode(), peer_id.encode())


def _speaks(claim: RunClaim) -> str:
    return f"{claim.peer_id} (peerloom {claim.version}) speaks {claim.protocol_min} to {claim.protocol_max}"


def _framed(*parts: bytes) -> bytes:
    """Each part behind its length, so that no two lists of parts read the same."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
