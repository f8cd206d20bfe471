"""What flooding costs on every edge, counted: a graph of clients in one process, whole runs of it, payload bytes only.

A batch is what a client says after `flush` steps: origin, first sequence, and the scalars, as variable-length integers
(the step and the directions follow from the sequence). Signatures and transport are not in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Edge = tuple[int, int]


@dataclass(slots=True)
class Flooded:
    """Bytes over each edge, both ways together; the messages that each client has at the end."""

    edges: dict[Edge, int] = field(default_factory=dict)
    known: list[int] = field(default_factory=list)


def varint(number: int) -> bytes:
    """Seven bits a byte, the low ones first; number from 0."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def zigzag(number: int) -> int:
    """0, -1, 1, -2 … to 0, 1, 2, 3 …"""
    return number * 2 if number >= 0 else -number * 2 - 1


def encode(origin: int, first: int, scalars: Sequence[int]) -> bytes:
    """One batch."""
    return b"".join(map(varint, (origin, first, len(scalars), *map(zigzag, scalars))))


def ring(clients: int) -> list[list[int]]:
    """Neighbours of each client."""
    return [[(client - 1) % clients, (client + 1) % clients] for client in range(clients)]


def complete(clients: int) -> list[list[int]]:
    """Neighbours of each client."""
    return [[other for other in range(clients) if other != client] for client in range(clients)]


def flood(
    neighbours: Sequence[Sequence[int]], steps: int, flush: int, scalar: Callable[[random.Random], int], seed: int = 0
) -> Flooded:
    """Every client floods its batch; at each hop everybody forwards what is new to all but those it came from."""
    chance = random.Random(seed)
    found = Flooded(known=[0] * len(neighbours))
    for first in range(0, steps, flush):
        batches = [
            encode(client, first, [scalar(chance) for _ in range(flush)]) for client in range(len(neighbours))
        ]
        for origin, payload in enumerate(batches):
            for client in _spread(neighbours, origin, len(payload), found):
                found.known[client] += flush
    return found


def _spread(neighbours: Sequence[Sequence[int]], origin: int, size: int, found: Flooded) -> set[int]:
    """Counts one batch's way and returns whom it reached."""
    seen = {origin}
    senders: dict[int, set[int]] = {origin: set()}  # who got it at this hop, and from whom
    while senders:
        arrived: dict[int, set[int]] = {}
        for client, came_from in senders.items():
            for other in set(neighbours[client]) - came_from:
                edge = (min(client, other), max(client, other))
                found.edges[edge] = found.edges.get(edge, 0) + size
                arrived.setdefault(other, set()).add(client)
        senders = {client: came_from for client, came_from in arrived.items() if client not in seen}
        seen |= senders.keys()
    return seen


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's, for what other methods send: matrices of rank-r adapters on q and v, as the paper counts them."""

    name: str
    parameters: float
    layers: int
    width: int
    kv_width: int

    def lora(self, rank: int = 8) -> float:
        """Parameters of the adapters."""
        return rank * self.layers * ((self.width + self.width) + (self.width + self.kv_width))


OPT_1_3B = Sizes("OPT-1.3B", 1.315e9, 24, 2048, 2048)
SMOLLM2 = Sizes("SmolLM2-135M", 134.5e6, 30, 576, 192)


def first_order_bytes(sizes: Sizes, rounds: int) -> dict[str, float]:
    """Bytes an edge over a run: fp32 models; Choco sends 1 % of them, 4 bytes a value and 8 an index."""
    whole, choco = rounds * 4.0, rounds * 0.01 * 12.0
    return {
        "DSGD": whole * sizes.parameters,
        "ChocoSGD": choco * sizes.parameters,
        "DSGD-LoRA": whole * sizes.lora(),
        "ChocoSGD-LoRA": choco * sizes.lora(),
    }
