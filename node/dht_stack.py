"""One life of p2pd with hivemind's DHTNode on it: stores and finds with deadlines, and dialling of single peers.

Caches of hivemind are all off: a find asks the nearest nodes each time, as many as `dht_looks` says, and merges what
they hold. hivemind's own store begins with a find of the key, which brings all that stands under it from twenty nodes;
ours asks who is near, and that seldom. With sixteen nodes, that and finds of all twenty nearest were 114 KB/s a node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from peerloom.node.dht_looks import Looks
from peerloom.node.dht_records import RecordValidator
from peerloom.node.p2pd import CALL_TIMEOUT_S, P2pDaemon, P2pdOptions
from peerloom.node.seeds import PROBE_TIMEOUT_S, ProbeReply, reach, serve_probe
from peerloom.protocol.errors import LinkError
from peerloom.protocol.invite import Invite
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

RPC_TIMEOUT_S: Final = 2.5  # of one DHT call; a dead node costs two of them once, then it is forgotten
STORE_TIMEOUT_S: Final = 6.0
FIND_TIMEOUT_S: Final = 6.0
REPLICAS: Final = 5  # nodes that a record is stored at, the nearest to its key
HOMES_S: Final = 30.0  # between looks at who they are

Room = Callable[[int], Awaitable[None]]


async def no_wait(size: int) -> None:
    """There is room for any number of bytes."""


class DhtStack:
    """Started by `start`, in the DHT after `join`."""

    def __init__(self, daemon: P2pDaemon) -> None:
        self.daemon = daemon
        self._dht: Any = None  # hivemind.dht.DHTNode
        self._client_only = False
        self._looks: dict[bytes, Looks] = {}
        self._answers: dict[bytes, int] = {}  # bytes of all that stood under a key when it was last found
        self._searched: dict[bytes, float] = {}  # when the nodes near a key were last looked for, in the loop's time

    @classmethod
    async def start(cls, options: P2pdOptions, answer: Callable[[], ProbeReply]) -> DhtStack:
        """Starts p2pd, which answers probes where it listens."""
        stack = cls(await P2pDaemon.start(options))
        if options.listen:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await serve_probe(stack.daemon.p2p, answer)
            except BaseException:
                await stack.stop()
                raise
        return stack

    async def join(self, seeds: Sequence[Invite], wall: Callable[[], float], client_only: bool) -> None:
        """Enters the DHT by seeds that p2pd is connected to; a client stores nothing for others."""
        from hivemind.dht.node import DHTNode

        self._client_only = client_only
        self._dht = await DHTNode.create(
            p2p=self.daemon.p2p,
            initial_peers=[seed.multiaddr for seed in seeds],
            wait_timeout=RPC_TIMEOUT_S,
            client_mode=client_only,
            record_validator=RecordValidator(wall),
            ensure_bootstrap_success=False,
            strict=False,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )

    @property
    def _live(self) -> bool:
        return self._dht is not None and self._dht.is_alive

    async def store(self, key: bytes, subkey: str, value: bytes, expires_at: float) -> bool:
        """Keeps a value here and asks others to; whether one of them took it, within STORE_TIMEOUT_S."""
        if not self._live:
            return False
        from hivemind.dht.routing import DHTID

        key_id, packed = DHTID.generate(key), self._dht.protocol.serializer.dumps(value)
        self._dht.protocol.storage.store(key_id, packed, expires_at, subkey=subkey)
        tried: dict[Any, list[bool] | None] = {}  # what each answered, None of those that did not

        async def offer(peer: Any) -> None:
            tried[peer] = None
            tried[peer] = await self._dht.protocol.call_store(peer, [key_id], [packed], expires_at, [subkey])

        async def offer_all() -> None:
            """To the nearest; in place of those that are silent, to the next ones."""
            while len(answers := [answer for answer in tried.values() if answer is not None]) < REPLICAS:
                turn = [peer for peer in self._near(key_id) if peer not in tried][: REPLICAS - len(answers)]
                if not turn:
                    return
                await asyncio.gather(*map(offer, turn))

        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await offer_all()
                if await self._look_around(key_id):
                    await asyncio.gather(*(offer(peer) for peer in self._near(key_id)[:REPLICAS] if peer not in tried))
        except TimeoutError:
            log.debug("storing took longer than %g s", STORE_TIMEOUT_S)
        return any(any(answer or ()) for answer in tried.values())

    def _near(self, key_id: Any) -> list[Any]:
        """The peers nearest to a key in the routing table, twice REPLICAS, the nearest first."""
        table = self._dht.protocol.routing_table
        near = table.get_nearest_neighbors(key_id, 2 * REPLICAS, exclude=self._dht.node_id)
        return [peer for _, peer in near if peer not in self._dht.blacklist]

    async def _look_around(self, key_id: Any) -> bool:
        """Once in HOMES_S: asks the nodes near a key for nearer ones, which then are in the routing table; True if so.

        It asks by a key beside this one, which has the same neighbours and nothing stored under it.
        """
        from hivemind.dht.routing import DHTID

        now, name = asyncio.get_running_loop().time(), key_id.to_bytes()
        if now - self._searched.get(name, -HOMES_S) < HOMES_S:
            return False
        self._searched[name] = now
        beside = DHTID(int(key_id) ^ 1)
        await self._dht.find_nearest_nodes([beside], k_nearest=REPLICAS, beam_size=2 * REPLICAS, exclude_self=True)
        return True

    def _is_near(self, key: bytes) -> bool:
        """Whether this node is one of the REPLICAS nearest to a key, as far as it knows."""
        from hivemind.dht.routing import DHTID

        key_id, table = DHTID.generate(key), self._dht.protocol.routing_table
        near = table.get_nearest_neighbors(key_id, REPLICAS, exclude=self._dht.node_id)
        own = self._dht.node_id.xor_distance(key_id)
        return not self._client_only and sum(node.xor_distance(key_id) < own for node, _ in near) < REPLICAS

    async def find(self, key: bytes, room: Room = no_wait) -> list[tuple[str, bytes, float]]:
        """(subkey, value, expiration) of each entry; empty when nothing is found within FIND_TIMEOUT_S.

        Begins when there is `room` for about as many bytes as will come.
        """
        if not self._live:
            return []
        looks = self._looks.setdefault(key, Looks())
        asked = looks.ask(stored_here=self._is_near(key))
        neighbours = len(self._dht.protocol.routing_table.uid_to_peer_id)
        await room(min(asked, neighbours) * self._answers.get(key, 0))
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                found = await self._dht.get(key, latest=True, beam_size=asked)
        except TimeoutError:
            return []
        entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
        looks.found({subkey for subkey, _ in entries})
        self._answers[key] = sum(len(subkey) + len(item.value) for subkey, item in entries)
        return [(subkey, item.value, item.expiration_time) for subkey, item in entries]

    def kept(self) -> list[tuple[Any, Any]]:
        """What this node stores, for the next life."""
        return list(self._dht.protocol.storage.items()) if self._dht is not None else []

    def records_kept(self) -> int:
        """How many live records this node stores, for itself and for others."""
        from hivemind.dht.storage import DictionaryDHTValue

        values = [item.value for _, item in self.kept()]
        return sum(len(list(v.items())) if isinstance(v, DictionaryDHTValue) else 1 for v in values)

    def keep(self, items: Sequence[tuple[Any, Any]]) -> None:
        """Takes over what a former life stored."""
        for key_id, item in items:
            self._dht.protocol.storage.store(key_id, item.value, item.expiration_time)

    def has_neighbours(self) -> bool:
        """Whether any node is in the routing table."""
        return self._live and bool(self._dht.protocol.routing_table.uid_to_peer_id)

    async def contacts(self) -> Mapping[PeerId, str]:
        """The peers p2pd is connected to, each with an address; empty when p2pd is going down."""
        try:
            return await self.daemon.contacts()
        except (LinkError, TimeoutError) as error:
            log.debug("no contacts: %s", error)
            return {}

    async def lost(self, peers: Mapping[PeerId, str]) -> dict[PeerId, str]:
        """Those of `peers` (id: multiaddr) that are not in the routing table, or that p2pd is not connected to."""
        from hivemind.p2p import PeerID

        if not self._live:
            return {}
        table, connected = self._dht.protocol.routing_table, await self.contacts()
        return {
            peer: at
            for peer, at in peers.items()
            if peer not in connected or PeerID.from_base58(peer) not in table
        }

    async def greet(self, peer: PeerId, multiaddr: str) -> None:
        """Dials a peer and, if it answers, takes it into the routing table; raises LinkError or TimeoutError."""
        from hivemind.p2p import PeerID

        match multiaddr.split("/"):
            case ["", protocol, host, "tcp", port]:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    multiaddr = await reach(protocol, host, int(port))
        await self.daemon.connect(peer, multiaddr, PROBE_TIMEOUT_S)
        if self._live:
            await self._dht.protocol.call_ping(PeerID.from_base58(peer), strict=False)

    async def hang_up(self) -> None:
        """Closes every connection of p2pd."""
        await asyncio.gather(*(self._let_go(peer) for peer in await self.contacts()))

    async def _let_go(self, peer: PeerId) -> None:
        try:
            await self.daemon.disconnect(peer)
        except (LinkError, TimeoutError) as error:
            log.debug("%s is not let go: %s", peer, error)

    async def stop(self) -> None:
        """Leaves the DHT and ends p2pd; calls still under way end by their own deadlines."""
        if self._dht is not None:
            self._dht.is_alive = False
        await self.daemon.stop()
