"""The moves of the gossip machine: each changes its books and asks for the effects that go with it.

Which move is made on which event is decided in `gossip.py`.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Literal, NoReturn

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol.company import Company
from peerloom.protocol.errors import InvalidTransition
from peerloom.protocol.gossip_parts import MAX_PARKED, Book, Engaged, Outbox, Parked, Sent
from peerloom.protocol.messages import DeclineReason, ExchangeId, Offer
from peerloom.protocol.pairing import Place, pairing_of, rank
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId, Span

HISTORY = 20  # (event, state) pairs carried by InvalidTransition
SEEK_SHARE, STALL_SHARE = 0.75, 0.25  # of match_timeout_s

State = Literal["training", "seeking", "exchanging"]


class Moves:
    """State, status and moves of one node's gossip; see GossipMachine for what the arguments are."""

    def __init__(
        self,
        self_id: PeerId,
        spec: GaslocSpec,
        run_seed: int,
        rng: random.Random,
        layout: str,
        payload_bytes: int | tuple[int, ...],
    ) -> None:
        self._self_id, self._spec, self._seed, self._rng = self_id, spec, run_seed, rng
        self._layout = layout
        self._sizes = (payload_bytes,) if isinstance(payload_bytes, int) else payload_bytes
        self._stall_s = STALL_SHARE * spec.match_timeout_s
        self._state: State = "training"
        self._place, self._open, self._draining = Place(0), False, False
        self._pairing = pairing_of(spec, self_id, run_seed)
        self._book = Book()
        self._busy: set[PeerId] = set()  # declined for now: asked again after a pause
        self._excluded: set[PeerId] = set()  # not asked again this round
        self._shunned: set[PeerId] = set()  # at fault: not listened to this round either
        self._company = Company(rng, SEEK_SHARE / 2 * spec.match_timeout_s)
        self._stale: PeerId | None = None  # met too often: left aside while the "company" timer runs
        self._began = 0.0
        self._trained_s = 0.0  # what the last local steps took
        self._missed = False  # the last round ended alone although others are there
        self._cut = False  # the local steps under way are being ended
        self._reached = 0.0  # when the fragment's first leg was ready
        self._retries = 0
        self._history: deque[tuple[ev.Event, State]] = deque(maxlen=HISTORY)
        self._now = 0.0
        self._out = Outbox()

    @property
    def state(self) -> State:
        """What this node is doing."""
        return self._state

    @property
    def round(self) -> int:
        """The round trained or exchanged, or last finished."""
        return self._place.round

    def legs(self, fragment: int) -> int:
        """How many exchanges a fragment has in this round; settled once the round's first exchange has begun."""
        return self._pairing.legs(self._place.round, fragment)

    @property
    def partner(self) -> PeerId | None:
        """The peer at the other end of the exchange under way."""
        return self._book.engaged.peer if self._book.engaged else None

    @property
    def reason(self) -> str:
        """Why this node is not training: one sentence, "" when it is."""
        if self._state == "training":
            return ""
        if self._busy and not self._book.sent and not self._book.engaged:
            return "every peer asked is busy; asking again soon"
        return self._book.waits_for() or "waiting a while for another partner than the last"

    def piece_bytes(self, span: Span) -> tuple[int, ...]:
        """The encoded length of each of these pieces."""
        return self._sizes[slice(*span)]

    def is_open(self, exchange_id: ExchangeId) -> bool:
        """Whether the exchange is one this machine still waits on."""
        return self._book.is_open(exchange_id)

    def check_invariants(self) -> None:
        """Raises AssertionError when the machine's parts contradict each other; for tests."""
        state, timers, book = self._state, self._out.timers, self._book
        book.check_invariants()
        assert (book.engaged is not None) == (state == "exchanging"), "engaged exactly while exchanging"
        assert not book.sent or state == "seeking", "offers of ours stand only while seeking"
        assert ("offer" in timers) == (book.active is not None), "an active offer has its timer"
        assert not (self._draining and (book.parked or state == "seeking")), "no new exchange while draining"
        assert self._open or state == "training", "a round is open until finished"
        assert state != "training" or not timers, "no timer while training"
        assert state != "seeking" or "seek" in timers, "seeking has an end"
        assert ("company" in timers) == (self._stale is not None), "the stale partner has its timer"
        pausing = not timers.keys().isdisjoint({"retry", "company"})
        assert state != "seeking" or book.sent or pausing, "seeking waits for something"

    # --- ending a round

    def _finish_with(self, engaged: Engaged) -> None:
        self._out.count("gossip_committed")
        self._missed = False
        self._company.met(engaged.peer, slow=self._now - engaged.since > self._trained_s)
        round, weight, swap = self._place.round, self._pairing.weight(self._place), self._pairing.swap(self._place)
        self._pairing.met(self._place)
        if engaged.partner_round != round:
            self._out.count("gossip_stale_round")
        self._leave_round("")
        finish = do.FinishRound(round, engaged.peer, engaged.partner_round, "", weight, swap.receive, swap.halved >= 0)
        self._out.add(finish)

    def _finish_alone(self, reason: str, metric: str = "gossip_alone") -> None:
        round = self._place.round
        self._missed = bool(self._pairing.view)
        self._out.count(metric)
        self._leave_round("finished the round alone")
        self._out.add(do.FinishRound(round, None, round, reason))

    def _leave_round(self, reason: str) -> None:
        """Back to training: no offer of ours stands, what was deferred is held for the next turn, no timer runs."""
        self._state, self._book.engaged = "training", None
        self._go_on()
        for sent in list(self._book.sent.values()):
            self._withdraw(sent, reason)
        for parked in self._book.deferred():
            parked.held = True
            self._out.add(do.SendHold(parked.exchange_id))
        self._out.cancel_all()
        self._stale = None
        self._busy.clear()
        self._excluded.clear()
        self._shunned.clear()
        self._retries = 0

    def _go_on(self) -> None:
        """To the round's next turn, or the round's end."""
        round, fragment, leg = self._place
        if leg + 1 < self._pairing.legs(round, fragment):
            self._place = Place(round, fragment, leg + 1)
        elif fragment + 1 < self._spec.fragments:
            self._place = Place(round, fragment + 1)
        else:
            self._open = False

    def _expected_bytes(self, place: Place) -> int:
        """What a peer sends us there."""
        return sum(self.piece_bytes(self._pairing.swap(place).receive))

    # --- our offers

    def _precedes(self, peer: PeerId) -> bool:
        return rank(self._seed, self._self_id) < rank(self._seed, peer)

    def _offer(self, peer: PeerId) -> None:
        exchange_id = self._rng.randbytes(16).hex()
        self._book.sent[exchange_id] = Sent(exchange_id, peer)
        weight, swap = self._pairing.weight(self._place), self._pairing.swap(self._place)
        self._out.add(do.SendOffer(exchange_id, peer, *self._place, weight, swap.send))
        self._out.set_timer("offer", self._now + self._stall_s)

    def _withdraw(self, sent: Sent, reason: str) -> None:
        self._forget(sent)
        self._out.add(do.SendWithdraw(sent.exchange_id, reason))

    def _forget(self, sent: Sent) -> None:
        del self._book.sent[sent.exchange_id]
        if not sent.held:
            self._out.cancel_timer("offer")

    # --- peers' offers and the exchange

    def _park(self, peer: PeerId, offer: Offer, *, held: bool) -> None:
        if len(self._book.parked) >= MAX_PARKED or self._book.has_parked(peer):
            return self._refuse(offer.exchange_id, "busy")
        self._book.parked[offer.exchange_id] = Parked(offer.exchange_id, peer, offer, held)
        if held:
            self._out.add(do.SendHold(offer.exchange_id))

    def _refuse(self, exchange_id: ExchangeId, reason: DeclineReason, detail: str = "") -> None:
        self._book.parked.pop(exchange_id, None)
        self._out.count(f"gossip_refused_{reason}")
        self._out.add(do.SendDecline(exchange_id, reason, detail))

    def _accept(self, exchange_id: ExchangeId, peer: PeerId, round: int) -> None:
        self._out.add(do.SendAccept(exchange_id, self._place.round))
        self._engage(Engaged(exchange_id, peer, round, offering=False))

    def _engage(self, engaged: Engaged) -> None:
        self._state, self._book.engaged, engaged.since = "exchanging", engaged, self._now
        swap = self._pairing.swap(self._place)
        self._out.add(do.Transfer(engaged.exchange_id, self._stall_s, swap.send, swap.receive))
        for sent in list(self._book.sent.values()):
            self._withdraw(sent, "engaged with another peer" if sent.peer != engaged.peer else "crossed")
        for parked in self._book.deferred():
            self._refuse(parked.exchange_id, "busy")
        self._out.cancel_timer("retry")
        self._forgive_stale()

    def _avoid_stale(self) -> None:
        """Leaves a partner met too often aside for a while, if somebody else may come."""
        if self._spec.pairing != "rendezvous":
            return
        avoid = self._company.to_avoid(self._pairing.view.keys(), self._now - self._began)
        if avoid is not None:
            self._stale = avoid[0]
            self._out.set_timer("company", self._now + avoid[1])

    def _forgive_stale(self) -> None:
        self._stale = None
        self._out.cancel_timer("company")

    def _exclude(self, peer: PeerId, fault: str = "") -> None:
        self._excluded.add(peer)
        if fault:
            self._shunned.add(peer)
            self._out.add(do.ScorePeer(peer, fault))

    def _invalid(self, why: str) -> NoReturn:
        story = "; ".join(f"{event} in {state}" for event, state in self._history)
        event = self._history[-1][0]
        raise InvalidTransition(f"{event} is not allowed in state {self._state}: {why}. History: {story}")
