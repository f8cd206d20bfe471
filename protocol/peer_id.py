"""libp2p peer ids of Ed25519 keys: the id holds the whole public key, so it can be checked and verified against."""

from __future__ import annotations

from functools import lru_cache

import base58

from peerloom.protocol.types import PeerId

KEY_BYTES = 32
# Identity multihash (code 0, 36 bytes) of protobuf PublicKey{Type: Ed25519 (1), Data: 32 bytes}; libp2p peer-ids.md.
_PREFIX = b"\x00\x24\x08\x01\x12\x20"
_MAX_CHARS = 64  # 52 in fact; base58 decoding is quadratic, so length is checked first


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id ("12D3Koo…") of a raw Ed25519 public key, 32 bytes."""
    return PeerId(base58.b58encode(_PREFIX + public_key).decode())


@lru_cache(maxsize=1 << 13)  # base58 is slow, and a swarm's few keys are asked for with each signature
def public_key_of(peer_id: PeerId) -> bytes:
    """The raw public key (32 bytes) inside an Ed25519 peer id; raises ValueError for anything else."""
    if not 0 < len(peer_id) <= _MAX_CHARS:
        raise ValueError(f"it has {len(peer_id)} characters, and a peer id has 52")
    try:
        raw: bytes = base58.b58decode(peer_id)
    except ValueError as error:
        raise ValueError("it is not base58") from error
    if len(raw) != len(_PREFIX) + KEY_BYTES:
        raise ValueError(f"it is cut off or mistyped, {len(raw)} bytes instead of {len(_PREFIX) + KEY_BYTES}")
    if not raw.startswith(_PREFIX):
        raise ValueError("it is not the id of an Ed25519 key (those begin with 12D3Koo)")
    return raw[len(_PREFIX) :]
