"""Finds a late joiner's state among the peers, has its hash confirmed by others, and takes it over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from peerloom.node.context import Context
from peerloom.node.flood_driver import FloodDriver
from peerloom.node.flood_join import Fetched, ask_hash, fetch_state
from peerloom.node.flood_log import FloodLog
from peerloom.node.logs import short
from peerloom.node.worker_seams import SeedflowPort, SeedflowReady
from peerloom.protocol.errors import LinkError, MalformedMessage, PeerloomError, ProtocolError, RunMismatch
from peerloom.protocol.flood import FloodMachine
from peerloom.protocol.flood_messages import Batch, Head
from peerloom.protocol.types import NodeState, PeerId, PeerRecord

log = logging.getLogger(__name__)

ASK_TURNS = 3  # of asking the others, where none of those that are there could be asked
ASK_AGAIN_S = 6.0  # between two; a link that was in the way is tried again within RETRY_S
WITNESSES = 2  # other peers that must confirm a donor's state, where there are as many
FLOODING: frozenset[NodeState] = frozenset({"training", "fetching"})


def swarm_peers(context: Context) -> list[PeerRecord]:
    """The trainers that flood the same run from the same base model, best donor first."""
    facts = context.facts
    found = [
        record
        for record in context.view.believed()
        if record.role == "trainer"
        and record.state in FLOODING
        and (record.init_digest, record.layout_digest) == (facts.init_digest, facts.layout_digest)
    ]
    return sorted(found, key=lambda record: (-record.messages, record.peer_id))


def confirmed_by(witnesses: int) -> str:
    """What is known of a state's hash, in words."""
    if not witnesses:
        return "no other peer could confirm its hash: it is taken on the donor's word alone"
    return f"its hash was confirmed by {witnesses} other {'peer' if witnesses == 1 else 'peers'}"


class FloodJoiner:
    """Serves one life of a node; `join` may be called again when the state turns out to count a liar's messages."""

    def __init__(
        self, context: Context, worker: SeedflowPort, machine: FloodMachine, flood_log: FloodLog, ready: SeedflowReady
    ) -> None:
        self._context, self._worker, self._machine, self._log = context, worker, machine, flood_log
        self._ready = ready
        self._driver: FloodDriver | None = None

    def check_base(self) -> None:
        """Raises RunMismatch when others train, all of them from another base, and the run names none."""
        if self._context.spec.model.digest:
            return  # this node's is the one that the run names: the others are of no concern
        digests = {record.init_digest for record in self._context.view.believed() if record.role == "trainer"} - {""}
        if digests and self._ready.init_digest not in digests:
            self._context.facts.count("flood_refused_base")
            raise RunMismatch(
                f"the base model here has the digest {self._ready.init_digest[:16]}, and that of the swarm "
                f"{min(digests)[:16]}; give this node the same model files as the others, "
                "or none at the path that the run names: then it fetches the base from a peer"
            )

    async def join(
        self,
        *,
        needed: bool,
        dropped: Callable[[], object] = lambda: None,
        driver: FloodDriver | None = None,
    ) -> bool:
        """Takes over a peer's state that others confirm; False when there was none.

        Without `needed`, no state is looked for where nobody has one, and every message is then asked for instead.
        `dropped` is called when what waited to be applied is part of the state taken. `driver` has links that stand.
        """
        self._driver = driver
        donors = [record for record in swarm_peers(self._context) if needed or record.messages]
        for donor in donors:
            self._context.facts.enter("fetching", f"taking over the state of {short(donor.peer_id)}")
            if await self._take_over(donor, dropped):
                return True
        if donors:
            log.warning("no peer's state could be taken over; the messages are asked for one by one")
        return False

    async def _take_over(self, donor: PeerRecord, dropped: Callable[[], object]) -> bool:
        context, machine = self._context, self._machine
        try:
            fetched = await fetch_state(
                context.transport, donor, self._ready.layout_digest, self._ready.state_bytes_max
            )
            if {mark.origin for mark in fetched.snapshot.marks} & machine.cut:
                log.info("the state of %s counts messages of a liar still", short(donor.peer_id))
                return False
            if machine.falls_short(fetched.snapshot):
                log.info("the state of %s has less of this node's own messages than this node", short(donor.peer_id))
                return False
            if not machine.check(fetched.snapshot):
                raise MalformedMessage("its version vector is not what the origins signed")
            await self._worker.adopt_state(fetched.state)
            witnesses = await self._confirmed(donor, fetched, await self._worker.state_hash())
            if {mark.origin for mark in fetched.snapshot.marks} & machine.cut:
                raise LinkError("it counts messages of a peer that was cut off meanwhile")
        except PeerloomError as error:
            if isinstance(error, ProtocolError):
                context.view.score(donor.peer_id, "bad_state")
            context.facts.count("flood_states_refused")
            log.warning("the state of %s was not taken over: %s", short(donor.peer_id), error)
            await self._worker.adopt_state(b"")
            await self._worker.apply(self._all())
            dropped()
            return False
        self._log.adopt(fetched.snapshot, fetched.state)
        dropped()
        await self._worker.apply(machine.adopt(fetched.snapshot))
        self._note(donor, fetched, witnesses)
        return True

    def _all(self) -> list[Batch]:
        """What the machine holds, from the first message on."""
        return self._machine.beyond(()) or []

    async def _confirmed(self, donor: PeerRecord, fetched: Fetched, own: bytes) -> int:
        """How many other peers came to the same hash, WITNESSES at most; raises MalformedMessage when more did not.

        None where nobody can tell, as in a swarm of two: the state is then taken on its donor's word.
        """
        heads = [Head(mark.origin, mark.next, mark.chain) for mark in fetched.snapshot.marks]
        words: dict[PeerId, bytes] = {}
        for turn in range(ASK_TURNS):
            if turn:  # nobody could be asked, though somebody is there: links come and go
                await asyncio.sleep(ASK_AGAIN_S)
            failed = await self._ask_all(donor, heads, own, words)
            if any(words.values()) or not failed:
                break
        same = sum(word == own for word in words.values())
        other = sum(word not in (own, b"") for word in words.values())
        if other >= max(1, same):
            raise MalformedMessage(f"{other} other peers have another hash for the same messages, {same} the same")
        return same

    async def _ask_all(self, donor: PeerRecord, heads: list[Head], own: bytes, words: dict[PeerId, bytes]) -> bool:
        """Notes what others say until enough of them do; whether some could not be asked."""
        failed = False
        for peer in swarm_peers(self._context):
            same = sum(word == own for word in words.values())
            other = sum(word not in (own, b"") for word in words.values())
            if peer.peer_id == donor.peer_id or peer.peer_id in words or same >= WITNESSES + other:
                continue
            try:
                words[peer.peer_id] = await self._ask(peer, heads)
            except PeerloomError as error:
                failed = True
                log.info("%s could not confirm the state: %s", short(peer.peer_id), error)
        return failed

    async def _ask(self, peer: PeerRecord, heads: list[Head]) -> bytes:
        if self._driver is not None and self._driver.linked(peer.peer_id):
            return await self._driver.ask(peer.peer_id, heads)
        return await ask_hash(self._context.transport, peer, heads)

    def _note(self, donor: PeerRecord, fetched: Fetched, witnesses: int) -> None:
        facts = self._context.facts
        facts.count("state_fetched")
        facts.count("state_fetched_bytes", fetched.size)
        total = self._machine.total()
        self._context.say(f"joined at {total} messages for {fetched.size} bytes; {confirmed_by(witnesses)}")
        log.log(
            logging.INFO if witnesses else logging.WARNING,
            "joined at %d messages with %d bytes from %s; %s",
            total, fetched.size, short(donor.peer_id), confirmed_by(witnesses),
        )  # fmt: skip
        self._context.journal.write(
            "joined", messages=total, bytes=fetched.size, donor=donor.peer_id, witnesses=witnesses
        )
