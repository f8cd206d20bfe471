"""The checksum of bytes on their way from one worker to another."""

from __future__ import annotations

from xxhash import xxh3_128


def link_digest() -> xxh3_128:
    """XXH3 of 128 bits, to be updated part by part.

    It finds what memory, disks and our own faults do to a payload. It need not withstand a forger: on the link TLS
    does, and the peer itself says both the bytes and their digest. At 9 GB/s it costs an exchange nothing, where
    BLAKE3, at 2, took a fourth of its time. What is checked against another's word (a state, its manifest) has BLAKE3.
    """
    return xxh3_128()
