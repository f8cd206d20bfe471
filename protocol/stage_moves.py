"""What a stage does next: the passes, updates and saves of its worker, and where what it made is sent.

What happens to it, and what that changes, is in `stages.py`.
"""

from __future__ import annotations

from collections import Counter, deque

from peerloom.protocol import stage_effects as effects
from peerloom.protocol.errors import InvalidTransition
from peerloom.protocol.ledger import Ledger, Microbatch
from peerloom.protocol.spec_pipeline import PipelineSpec
from peerloom.protocol.stage_effects import StageEffect
from peerloom.protocol.stage_flight import Downstream, Flight
from peerloom.protocol.stage_source import StageSource
from peerloom.protocol.stage_window import LinkWindow
from peerloom.protocol.types import PeerId

MAX_UPSTREAM = 64  # nodes of the stage before that one node serves: each may fill a window of memory
HISTORY = 32


class StageMoves:
    """State and status of one stage, and what it does next; see StageMachine for what the arguments are."""

    def __init__(
        self,
        spec: PipelineSpec,
        stage: int,
        *,
        first_version: int = 0,
        ledger: Ledger | None = None,
        lane: int = 0,
        held_out: int = 0,
        limit: int | None = None,
        updates: int | None = None,
    ) -> None:
        self._spec, self.stage = spec, stage
        self._first, self._last = stage == 0, stage == spec.stages - 1
        self._lag, self._window = spec.lag(stage), spec.window(stage)
        # What a sender has unanswered that counts is a window at most: for want of credit none of it waits.
        self._credit = spec.window(max(stage - 1, 0)) + held_out + 2
        self._kept = self._credit + max(self._credit, (self._lag + 1) * spec.microbatches)  # all members, and a window
        self._base = self._applied = first_version
        self._ledger = ledger or Ledger()
        self.limit = limit
        self._indices = None if updates is None else updates * spec.microbatches
        self._source = StageSource(lane, self._ledger, held_out) if self._first else None
        self._begun = 0  # counted ones that began here
        self._held_out = held_out
        self._scores: dict[int, list[float]] = {}
        self._flights: dict[Microbatch, Flight] = {}  # in the order in which they came
        self._results: dict[Microbatch, float] = {}  # answers that may be asked for again, with their loss
        self._members: dict[int, list[Flight]] = {}  # by update, those whose gradient is in
        self._unledgered: set[Microbatch] = set()  # all of them: the ledger takes them in with their update
        self._upstream: dict[PeerId, int] = {}  # how many each may still send
        self._windows: dict[PeerId, LinkWindow] = {}
        self._downstream: dict[PeerId, Downstream] = {}
        self._sent = 0  # in all
        self._running: StageEffect | None = None
        self._save_wanted = self._draining = False
        self._mixing_wanted: effects.RunMixing | None = None
        self._out: list[StageEffect] = []
        self._history: deque[str] = deque(maxlen=HISTORY)

    @property
    def applied(self) -> int:
        """Updates behind the newest weights."""
        return self._applied

    @property
    def load(self) -> int:
        """Microbatches under way here."""
        return len(self._flights)

    @property
    def idle(self) -> bool:
        """Nothing runs in the worker."""
        return self._running is None

    @property
    def waiting_for(self) -> int | None:
        """The neighbouring stage without which nothing goes on here, if one is missing."""
        if not self._last and not self._downstream:
            return self.stage + 1
        return self.stage - 1 if not self._first and not self._upstream else None

    @property
    def waits_downstream(self) -> bool:
        """Whether an answer is held up by a stage after this one."""
        if self._last:
            return False
        return not self._downstream or all(peer.waiting for peer in self._downstream.values())

    # what goes out

    def _route(self, now: float) -> None:
        """Sends what waits to be sent, each to the node of the next stage that owes the fewest answers; in turn, of
        several such."""
        if not any(flight.phase == "unsent" for flight in self._flights.values()):
            return
        owed = Counter(flight.downstream for flight in self._flights.values() if flight.phase == "sent")
        for flight in self._flights.values():
            if flight.phase != "unsent":
                continue
            free = [peer for peer, downstream in self._downstream.items() if downstream.credit > 0]
            if not free:
                return
            peer = min(free, key=lambda peer: (owed[peer], self._downstream[peer].last, peer))
            if not owed[peer]:
                self._downstream[peer].answered_at = now
            self._sent += 1
            self._downstream[peer].credit -= 1
            self._downstream[peer].last = self._sent
            owed[peer] += 1
            flight.phase, flight.downstream = "sent", peer
            self._out.append(effects.SendActivation(peer, flight.microbatch, flight.version))

    def _run_next(self) -> None:
        if self._running is not None:
            return
        chosen = (
            self._next_update()
            or self._next_mixing()
            or self._next_save()
            or self._next_backward()
            or self._next_forward()
        )
        if chosen is not None:
            self._running = chosen
            self._out.append(chosen)

    def _next_update(self) -> StageEffect | None:
        if len(self._members.get(self._applied, ())) < self._spec.microbatches:
            return None
        oldest = self._version_of(self._base + self._begun // self._spec.microbatches)
        return effects.RunUpdate(self._applied, min(oldest, self._applied + 1))

    def _version_of(self, update: int) -> int:
        return max(self._base, update - self._lag)

    def _next_save(self) -> StageEffect | None:
        if not self._save_wanted:
            return None
        self._save_wanted = False
        return effects.RunSave(self._ledger.entries())

    def _next_mixing(self) -> StageEffect | None:
        """Weights that a backward pass still needs are changed by nothing but an update that stash or flush allow for.

        Stashed versions are copies and the last stage's passes are whole; else it is done where no pass is under way.
        """
        if not (self._lag or self._last) and any(flight.phase != "queued" for flight in self._flights.values()):
            return None
        wanted, self._mixing_wanted = self._mixing_wanted, None
        return wanted

    def _next_backward(self) -> StageEffect | None:
        for flight in self._flights.values():
            if flight.phase == "answered":
                flight.phase = "backward"
                return effects.RunBackward(flight.microbatch)
        return None

    def _next_forward(self) -> StageEffect | None:
        if self._draining:
            return None
        if self._source is not None:
            self._draw(self._source)
        room, aside = self._room(), self._aside()
        for flight in self._flights.values():
            if flight.phase == "queued" and (room if flight.counted else self._room_aside(flight, aside)):
                return self._begin(flight)
        return None

    def _aside(self) -> Counter[PeerId | None]:
        """How many that do not count are under way past the queue, by who sent them last."""
        flights = self._flights.values()
        return Counter(flight.origin for flight in flights if not flight.counted and flight.phase != "queued")

    def _room_aside(self, flight: Flight, aside: Counter[PeerId | None]) -> bool:
        """Whether one more that does not count may begin: what it makes is kept until the next stage has answered.

        No version holds these up, so without a bound a sender could fill this node's memory. One a sender, kept when
        its link breaks, so that nobody takes another's: a stage that was taken over sends much that was counted here
        before, and more of it than a window is never needed at once for all after this one to go on.
        """
        if flight.origin is None:
            return True  # of our own, as many as `_draw` lets in
        return aside[flight.origin] < self._credit and aside.total() < MAX_UPSTREAM * self._credit

    def _room(self) -> bool:
        """Whether one more that counts may begin: the version it needs stands, and with "sync" the window has room."""
        update = self._base + self._begun // self._spec.microbatches
        if update - self._lag > self._applied:
            return False
        if self._spec.schedule == "async":
            return True
        return sum(flight.counted and flight.phase != "queued" for flight in self._flights.values()) < self._window

    def _begin(self, flight: Flight) -> StageEffect:
        flight.phase, flight.version = "forward", self._applied
        if not flight.counted:
            return effects.RunForward(flight.microbatch, flight.version, None)
        flight.update = self._base + self._begun // self._spec.microbatches
        self._begun += 1
        if self._spec.stash:
            flight.version = self._version_of(flight.update)
        return effects.RunForward(flight.microbatch, flight.version, flight.update)

    # a first stage draws its own

    def _draw(self, source: StageSource) -> None:
        """Keeps one microbatch of either kind waiting to begin."""
        under_way = sum(flight.microbatch.held_out for flight in self._flights.values())
        if under_way < self._window and (held_out := source.next_held_out()) is not None:
            self._enter(held_out)
        if any(flight.counted and flight.phase == "queued" for flight in self._flights.values()):
            return
        if self.limit is None or self._base + self._begun // self._spec.microbatches < self.limit:
            self._enter(source.next_counted())

    def _enter(self, microbatch: Microbatch) -> None:
        self._flights[microbatch] = Flight(microbatch, not microbatch.held_out)

    # for both

    def _grant(self, peer: PeerId) -> None:
        self._upstream[peer] += 1
        self._out.append(effects.SendCredit(peer, 1))

    def _blame(self, peer: PeerId, fault: str, detail: str) -> None:
        self._out.append(effects.Blame(peer, fault, detail))

    def _bug(self, what: str) -> InvalidTransition:
        return InvalidTransition(f"{what}; before it: " + " | ".join(self._history))
