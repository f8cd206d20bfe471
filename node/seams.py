"""The seams to the outside, as Protocols: clock, transport, discovery; worker_seams.py has the worker's.

Each has a real implementation and an in-memory one (grpc_transport/memory_transport, discovery/memory_discovery), and
one conformance suite run on both. The rest of node/ sees these alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, TypeAlias, TypeVar

from peerloom.protocol.messages import ExchangeMessage, FetchRequest, StateMessage
from peerloom.protocol.services import Service
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord, SignedSpec

M = TypeVar("M")


class Clock(Protocol):
    """Two readings of time, in seconds; sleeping is asyncio's, whose loop runs on the same clock."""

    def monotonic(self) -> float:
        """Never jumps: timers and durations."""
        ...

    def wall(self) -> float:
        """Unix time: what records and expirations carry; may jump."""
        ...


class MessageStream(Protocol[M]):
    """One call of a service, seen from either end."""

    @property
    def peer(self) -> PeerId:
        """The authenticated peer at the other end."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk to send on it: smaller under a cap of either end, once Offer and Accept have passed."""
        ...

    async def send(self, message: M) -> None:
        """Waits while the peer takes no more; raises LinkError when the stream is over."""
        ...

    async def receive(self) -> M | None:
        """The next message, None at a clean end; raises LinkError or ProtocolError."""
        ...

    async def close(self) -> None:
        """Ends the stream; safe to call twice."""
        ...


ExchangeStream: TypeAlias = MessageStream[ExchangeMessage]


class PeerHandler(Protocol):
    """What a node serves to its peers."""

    async def serve(self, service: Service[M], stream: MessageStream[M]) -> None:
        """Runs a stream that a peer opened; it ends when this returns. Raises LinkError for a service not served."""
        ...

    async def status(self) -> NodeStatus:
        """This node's own state."""
        ...

    def fetch(self, peer: PeerId, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """A manifest, then its pieces from `start_piece` on."""
        ...


class Transport(Protocol):
    """Calls between nodes: authenticated both ways, every call with a deadline, messages limited in size."""

    async def start(self, handler: PeerHandler) -> tuple[str, ...]:
        """Listens; returns the addresses bound, as peers should dial them."""
        ...

    async def open(self, peer: PeerRecord, service: Service[M]) -> MessageStream[M]:
        """Opens a stream; raises LinkError, VersionMismatch, RunMismatch or ProtocolError."""
        ...

    async def status(self, peer: PeerRecord) -> NodeStatus:
        """Asks one node for its state; the same errors."""
        ...

    async def dial_back(self, peer: PeerRecord, dialled: tuple[str, ...]) -> tuple[str, ...]:
        """Has a peer dial this node at these addresses; returns those that it reached; the same errors."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Where peers should dial this node, as of now; empty before start()."""
        ...

    def fetch(self, peer: PeerRecord, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """Streams a donor's state; the same errors, raised while iterating."""
        ...

    def bytes_moved(self) -> tuple[int, int]:
        """(sent, received) over all calls so far, payloads included."""
        ...

    async def stop(self) -> None:
        """Stops listening, ends all calls, frees every socket."""
        ...


class Discovery(Protocol):
    """Who is in the run: records published, found and verified."""

    async def publish(self, record: PeerRecord) -> bool:
        """Signs and stores this node's record for 30 s; False when no other node took it."""
        ...

    async def peers(self) -> list[PeerRecord]:
        """All live records of the run, verified, this node's own left out."""
        ...

    def left(self) -> dict[PeerId, float]:
        """Who has withdrawn its record, and when (Unix seconds), as far as is known."""
        ...

    async def own_record(self) -> PeerRecord | None:
        """The live record under this node's own id, if there is one."""
        ...

    async def publish_spec(self, spec: SignedSpec) -> bool:
        """Stores the run's spec, for a day; any node that holds it renews it."""
        ...

    async def withdraw(self) -> None:
        """Takes this node's record away (a tombstone that outranks it)."""
        ...

    async def stop(self) -> None:
        """Leaves the DHT and ends its processes."""
        ...
