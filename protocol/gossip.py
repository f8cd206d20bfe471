"""GASLoC's exchange: one partner a round, on both sides or on neither (digest, (b) and (f)8).

Two-sided commit. Offering: SendOffer, OfferAccepted, Transfer, PayloadsVerified, SendCommit, AckReceived, FinishRound.
Accepting: SendAccept and Transfer, then PayloadsVerified and CommitReceived in either order, SendAck, FinishRound.
What breaks before the commit counts for nobody. What breaks between SendCommit and AckReceived is in doubt: the
offering side drops the edge, the accepting side may have mixed.

Rendezvous. One offer at a time is *active* (unanswered); an offer the peer holds stands beside it, up to `FANOUT`. An
offer that meets an active one of ours to a third peer is taken if its sender has the lower rank, else deferred until
ours is answered. Who defers waits for a peer of lower rank, so chains of deferral end. Offers are parked while we
train, and what is parked stays through an exchange for the next round; what arrives during an exchange is declined
"busy", so that its sender looks elsewhere and may come back while we train.

A partner met again and again is left aside for a while when others may come: see `company.py`. A node whose last round
ended alone ends its local steps early for a peer that waits: see `_meet_the_waiting`.

Planned. Under every other pairing the partner follows from (seed, round, live view). Both ends offer, so that each
learns at once when the other is past the round, or has settled on other matchings. An offer for a round ahead is held.

Turns. Where the spec has legs or fragments, a round is several exchanges, each decided as a round is: the offer names
fragment, leg and weight, FinishRound ends one turn, and a leg waits for those whom an earlier leg may have kept.

Time, with M = match_timeout_s: seeking ends at 0.75 M, an offer waits at most 0.25 M for an answer, and once engaged
nobody waits longer than 0.25 M for a byte, the commit or the ack: so M for a partner that is not there, and the time in
which bytes move, at LEAST_RATE or faster, for one that is.

Counters: gossip_committed, gossip_alone, gossip_idle (turns; idle: the topology has nobody for this node);
gossip_stale_round (committed with a partner in another round); gossip_broken (also an accept that crossed its offer's
withdrawal), gossip_in_doubt (exchanges); gossip_offer_lost, gossip_unanswered, gossip_declined_<reason> (our offers);
gossip_refused_<reason> (peers' offers); gossip_late_event.
"""

from __future__ import annotations

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol.gossip_moves import SEEK_SHARE, Moves
from peerloom.protocol.gossip_parts import FANOUT, Engaged, Parked, Sent, misfit, place_of
from peerloom.protocol.messages import DeclineReason, Offer
from peerloom.protocol.pairing import Place
from peerloom.protocol.plan import in_sequence, is_plain
from peerloom.protocol.types import PeerId

CUT_SHARE = 0.5  # of the last local steps: what a node does of them at least before it comes to one who waits
RETRY_SHARE = 0.02  # of match_timeout_s: first pause after every candidate declined; doubles three times

ExchangeEvent = (
    ev.OfferHeld
    | ev.OfferAccepted
    | ev.OfferDeclined
    | ev.PayloadsVerified
    | ev.CommitReceived
    | ev.AckReceived
    | ev.ExchangeBroken
)
_RETRYABLE: frozenset[DeclineReason] = frozenset({"busy", "crossed", "partner"})


class GossipMachine(Moves):
    """Decides one node's exchanges: `handle(event, now)` returns what to do, in order.

    `layout` is the model's layout digest, `payload_bytes` the size of one encoded proposal. An exchange id means one
    stream: the driver must not let a new stream take the id of one that `is_open()`.
    """

    def handle(self, event: ev.Event, now: float) -> list[do.Effect]:
        """Takes one event; raises InvalidTransition when this node's own side broke the order of events."""
        self._history.append((event, self._state))
        self._now = now
        match event:
            case ev.PeersChanged():
                self._on_peers(event)
            case ev.RoundStarted():
                self._on_round(event)
            case ev.ProposalReady():
                self._on_proposal(event)
            case ev.OfferReceived():
                self._on_offer(event.peer, event.offer)
            case ev.TimerFired():
                self._on_timer(event.name)
            case ev.DrainStarted():
                self._on_drain()
            case _:
                self._on_exchange(event)
        return self._out.take()

    # --- rounds

    def _on_round(self, event: ev.RoundStarted) -> None:
        if self._state != "training":
            self._invalid("the round before has not been finished")
        self._place, self._open, self._began, self._cut = Place(event.round), True, self._now, False

    def _on_proposal(self, event: ev.ProposalReady) -> None:
        place = Place(event.round, event.fragment, event.leg)
        if self._state != "training" or not self._open or place != self._place:
            self._invalid(f"round {self.round} is {'open' if self._open else 'not open'}, next is {self._place}")
        self._pairing.begin(event.round)
        if self._draining:
            return self._finish_alone("this node is stopping")
        self._state, self._trained_s = "seeking", self._now - self._began
        self._avoid_stale()
        if event.leg == 0:
            self._reached = self._now
        self._advance()
        if self._place == place and self._open:
            self._out.set_timer("seek", self._seek_until())

    def _seek_until(self) -> float:
        """A leg waits for those whom an earlier leg of this fragment has kept waiting."""
        share = SEEK_SHARE * self._spec.match_timeout_s
        return max(self._now + share, self._reached + share * (self._place.leg + 1))

    def _on_drain(self) -> None:
        self._draining = True
        for parked in list(self._book.parked.values()):
            self._refuse(parked.exchange_id, "draining")
        if self._state == "seeking":
            self._finish_alone("this node is stopping")

    def _on_peers(self, event: ev.PeersChanged) -> None:
        self._pairing.see(seen for seen in event.peers if seen.peer != self._self_id)
        fit = {peer for peer, seen in self._pairing.view.items() if not seen.left_alone}
        for parked in [p for p in self._book.parked.values() if p.peer not in fit]:
            self._refuse(parked.exchange_id, "refused")
        if self._state == "seeking":
            if self._stale is not None and not self._pairing.view.keys() - {self._stale}:
                self._forgive_stale()
            targets = self._pairing.targets(self._place)
            for sent in [s for s in self._book.sent.values() if s.peer not in targets]:
                self._withdraw(sent, "no longer a candidate")
            self._advance()

    # --- seeking

    def _advance(self) -> None:
        """While seeking with no active offer: accept what is parked, else offer, else wait, else go on alone."""
        if self._book.active is not None:
            return
        if (parked := self._take_parked()) is not None:
            return self._accept(parked.exchange_id, parked.peer, parked.offer.round)
        if self._comes_to_the_waiting():
            return self._finish_alone("the others wait at another fragment")
        room = len(self._book.sent) < FANOUT
        taken = self._book.asked() | self._busy | self._excluded | {self._stale}
        if room and (fresh := [peer for peer in self._pairing.targets(self._place) if peer not in taken]):
            return self._offer(self._rng.choice(fresh))
        if room and self._busy:
            if "retry" not in self._out.timers:
                pause = RETRY_SHARE * self._spec.match_timeout_s * 2 ** min(self._retries, 3)
                self._out.set_timer("retry", self._now + pause * (0.5 + self._rng.random()))
        elif not self._book.sent and self._stale is None:
            idle = self._pairing.idles(self._place)
            self._finish_alone(self._pairing.why_alone(self._place), "gossip_idle" if idle else "gossip_alone")

    def _comes_to_the_waiting(self) -> bool:
        """Whether to go on to another fragment, at which all that this node might meet wait for it.

        At the rendezvous nothing else brings nodes to one fragment, and two that wait for each other at different ones
        would do so for ever. Who has the shorter way goes, of two as far apart either way that of lower rank.
        """
        if self._spec.pairing != "rendezvous" or self._spec.fragments == 1:
            return False
        at = {parked.peer: parked.place.fragment for parked in self._book.parked.values()}
        left = set(self._pairing.targets(self._place)) - self._excluded
        if not left or not left <= at.keys():
            return False
        way, peer = min(((at[peer] - self._place.fragment) % self._spec.fragments, peer) for peer in left)
        back = self._spec.fragments - way
        return 0 < way < back or (way == back and self._precedes(peer))

    # --- peers' offers

    def _on_offer(self, peer: PeerId, offer: Offer) -> None:
        if self.is_open(offer.exchange_id):
            # no decline: it would end the stream that has the id
            self._out.add(do.ScorePeer(peer, "duplicate_exchange"))
            return self._out.count("gossip_refused_duplicate")
        total_bytes = None if in_sequence(self._spec) else self._expected_bytes(place_of(offer))
        mismatch = misfit(offer, self._layout, self._spec.encoding, self._spec.fragments, total_bytes)
        if mismatch and not self._draining:
            return self._refuse(offer.exchange_id, "incompatible", mismatch)
        refusal = self._refusal(peer, offer)
        if refusal is not None:
            return self._refuse(offer.exchange_id, refusal)
        if self._state == "training" or not self._pairing.due(place_of(offer), self._place):
            self._park(peer, offer, held=True)
            return self._advance() if self._state == "seeking" else self._meet_the_waiting()
        if self._state == "exchanging":
            return self._refuse(offer.exchange_id, "busy")
        if peer == self._stale:
            return self._park(peer, offer, held=True)
        active = self._book.active
        if active is None or not self._precedes(peer):
            return self._accept(offer.exchange_id, peer, offer.round)
        if active.peer == peer:
            return self._refuse(offer.exchange_id, "crossed")
        self._park(peer, offer, held=False)

    def _meet_the_waiting(self) -> None:
        """Ends the local steps early for a peer that waits, if the last round found nobody.

        Rounds longer than the timeout may miss one another for ever: who waits gives up before the other arrives. Of
        two such nodes one is always past the middle of its steps when the other waits; that one comes at once, and
        then they are in step. A worker's number of local steps may vary (digest, (a)).
        """
        seldom = self._state != "training" or not self._open or self._cut or not self._missed
        plain = is_plain(self._spec) and self._spec.pairing == "rendezvous"
        if seldom or not plain or not self._book.parked:
            return
        if self._now - self._began >= CUT_SHARE * self._trained_s:
            self._cut = True
            self._out.count("gossip_cut_short")
            self._out.add(do.CutShort(self._place.round))

    def _refusal(self, peer: PeerId, offer: Offer) -> DeclineReason | None:
        """Why an offer of this peer cannot be taken, now or later."""
        if self._draining:
            return "draining"
        if peer not in self._pairing.view or peer in self._shunned:
            return "refused"
        place = place_of(offer)
        refusal = self._pairing.refusal(peer, place, self._place, self._open)
        if refusal is None and self._state != "training" and self._pairing.due(place, self._place):
            ours = (self._pairing.weight(place), self._expected_bytes(place))
            return "plan" if (offer.weight, offer.total_bytes) != ours else None
        return refusal

    def _take_parked(self) -> Parked | None:
        """The oldest parked offer that can be taken in this round; those that never can be are declined on the way."""
        for parked in list(self._book.parked.values()):
            refusal = self._refusal(parked.peer, parked.offer)
            if refusal is not None:
                self._refuse(parked.exchange_id, refusal)
            elif parked.peer != self._stale and self._pairing.due(parked.place, self._place):
                return self._book.parked.pop(parked.exchange_id)
        return None

    # --- the exchange

    def _on_exchange(self, event: ExchangeEvent) -> None:
        """Sorts an event by what its exchange is to us; one we have left behind is late, not wrong."""
        match self._book.find(event.exchange_id):
            case Engaged() as engaged:
                self._on_engaged(engaged, event)
            case Sent() as sent:
                self._on_sent(sent, event)
            case Parked() as parked:
                self._on_parked(parked, event)
            case None:
                self._out.count("gossip_late_event")

    def _on_sent(self, sent: Sent, event: ev.Event) -> None:
        match event:
            case ev.OfferHeld() if not sent.held:
                sent.held = True
                self._out.cancel_timer("offer")
            case ev.OfferAccepted() if self._pairing.fits(event.round, self.round):
                self._forget(sent)
                return self._engage(Engaged(sent.exchange_id, sent.peer, event.round, offering=True))
            case ev.OfferAccepted() if not self._pairing.could_know():
                self._withdraw(sent, "too many rounds behind")
                self._out.count("gossip_declined_round")
                self._exclude(sent.peer)
            case ev.OfferDeclined():
                self._forget(sent)
                self._out.count(f"gossip_declined_{event.reason}")
                (self._busy if event.reason in _RETRYABLE else self._excluded).add(sent.peer)
            case ev.ExchangeBroken():
                self._forget(sent)
                self._out.count("gossip_offer_lost")
                self._exclude(sent.peer, "bad_exchange" if event.at_fault else "")
            case ev.PayloadsVerified():
                self._invalid("no transfer was asked for in this exchange")
            case _:
                self._withdraw(sent, "a message out of order")
                self._out.count("gossip_offer_lost")
                self._exclude(sent.peer, "out_of_order")
        self._advance()

    def _on_parked(self, parked: Parked, event: ev.Event) -> None:
        if isinstance(event, ev.PayloadsVerified):
            self._invalid("no transfer was asked for in this exchange")
        del self._book.parked[parked.exchange_id]
        if not isinstance(event, ev.ExchangeBroken):
            self._out.add(do.SendWithdraw(parked.exchange_id, "a message out of order"))
            self._exclude(parked.peer, "out_of_order")
        elif event.at_fault:
            self._exclude(parked.peer, "bad_exchange")

    def _on_engaged(self, engaged: Engaged, event: ev.Event) -> None:
        match event:
            case ev.PayloadsVerified():
                if engaged.verified:
                    self._invalid("the payloads were verified before")
                self._on_verified(engaged)
            case ev.CommitReceived() if not engaged.offering and not engaged.commit:
                engaged.commit = True
                if engaged.verified:
                    self._acknowledge(engaged)
            case ev.AckReceived() if engaged.in_doubt:
                self._finish_with(engaged)
            case ev.ExchangeBroken():
                self._break(engaged, event.reason, "bad_exchange" if event.at_fault else "")
            case _:
                self._out.add(do.SendWithdraw(engaged.exchange_id, "a message out of order"))
                self._break(engaged, "it sent a message out of order", "out_of_order")

    def _on_verified(self, engaged: Engaged) -> None:
        engaged.verified = True
        if not engaged.offering and engaged.commit:
            return self._acknowledge(engaged)
        if engaged.offering:
            engaged.commit = True
            self._out.add(do.SendCommit(engaged.exchange_id))
        self._out.set_timer("commit", self._now + self._stall_s)

    def _acknowledge(self, engaged: Engaged) -> None:
        self._out.add(do.SendAck(engaged.exchange_id))
        self._finish_with(engaged)

    def _break(self, engaged: Engaged, reason: str, fault: str = "") -> None:
        """The exchange is over without an edge here: seek again while there is time, unless it is in doubt."""
        self._book.engaged = None
        self._out.cancel_timer("commit")
        self._exclude(engaged.peer, fault)
        if engaged.in_doubt:
            self._out.count("gossip_in_doubt")
            return self._finish_alone(f"the exchange with {engaged.peer} broke after this side committed: {reason}")
        self._out.count("gossip_broken")
        if self._draining or "seek" not in self._out.timers:
            return self._finish_alone(f"the exchange with {engaged.peer} broke: {reason}")
        self._state = "seeking"
        self._advance()

    # --- timers

    def _on_timer(self, name: str) -> None:
        if not self._out.timer_due(name, self._now):
            return self._out.count("gossip_late_event")  # cancelled or replaced while it was on its way
        if name == "seek" and self._state == "seeking":
            self._finish_alone(f"no partner within {SEEK_SHARE * self._spec.match_timeout_s:g} s")
        elif name == "offer" and (active := self._book.active) is not None:
            self._withdraw(active, "no answer")
            self._out.count("gossip_unanswered")
            self._excluded.add(active.peer)
            self._out.add(do.ScorePeer(active.peer, "unanswered"))
            self._advance()
        elif name == "company":
            self._stale = None
            self._advance()
        elif name == "retry":
            self._busy.clear()
            self._retries += 1
            self._advance()
        elif name == "commit" and (engaged := self._book.engaged) is not None:
            awaited = "acknowledgement" if engaged.offering else "commit"
            self._out.add(do.SendWithdraw(engaged.exchange_id, f"no {awaited} within {self._stall_s:g} s"))
            self._break(engaged, f"no {awaited} within {self._stall_s:g} s")
