"""One stage of a pipeline: which microbatch runs next, with which weights, and who gets what comes out.

Source: PipeDream's 1F1B with weight stashing, as in "Mitigating Staleness in Asynchronous Pipeline Parallelism via
Basis Rotation" (arXiv 2602.03515), section (a) of the digest: stage k of P trains with gradients tau_k = P - 1 - k
updates old. Microbatches are numbered as they begin here, `microbatches` of them an update; update u is computed with
version max(first, u - tau_k), so the weights that come out do not depend on what arrives when. "sync" is the same
machine with tau_k = 0.

Each activation is answered by exactly one gradient, however often it is sent: one under way is not begun again, and
all who sent it get its answer; one just answered is answered again, one trained on long ago is computed without
counting. So a link that breaks, or a stage that moves to another node, is mended by sending again what has no answer
yet. A sender may have as many without an answer as its credit, which comes back when an answer has gone out: so one who
reads none fills no memory with them.
"""

from __future__ import annotations

from statistics import fmean

from peerloom.protocol import stage_effects as effects
from peerloom.protocol import stage_events as events
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.stage_effects import StageEffect
from peerloom.protocol.stage_events import StageEvent
from peerloom.protocol.stage_flight import Downstream, Flight
from peerloom.protocol.stage_moves import StageMoves
from peerloom.protocol.stage_window import LinkWindow
from peerloom.protocol.types import PeerId

MAX_CREDIT = 1 << 20
KEPT_EVALUATIONS = 4


class StageMachine(StageMoves):
    """Events in, effects out; at most one Run effect is under way at a time.

    `first_version` updates are behind the weights it starts from, trained on what `ledger` lists. `lane` numbers the
    microbatches of a first stage, which begins no update from `limit` on; it evaluates `held_out` of them at a time. No
    lane has more than the `updates` of the run.
    """

    def handle(self, event: StageEvent, now: float) -> list[StageEffect]:
        """Takes an event; `now` in seconds of a clock that never jumps. Raises InvalidTransition for a bug of ours."""
        self._history.append(f"{now:.3f} {event}")
        self._out = []
        self._take(event, now)
        self._route(now)
        self._run_next()
        return self._out

    def _take(self, event: StageEvent, now: float) -> None:
        match event:
            case events.UpstreamOpened(peer):
                self._open_upstream(peer)
            case events.UpstreamLost(peer):
                self._lose_upstream(peer)
            case events.DownstreamOpened(peer, credit):
                self._lose_downstream(peer)
                self._downstream[peer] = Downstream(min(credit, MAX_CREDIT), now)
            case events.DownstreamLost(peer):
                self._lose_downstream(peer)
            case events.DownstreamBeat(peer, waiting):
                self._beat(peer, waiting, now)
            case events.CreditReceived(peer, count):
                if peer in self._downstream:
                    self._downstream[peer].credit = min(self._downstream[peer].credit + count, MAX_CREDIT)
            case events.ActivationReceived():
                self._activation(event)
            case events.GradientReceived():
                self._answer(event, now)
            case events.ScoreReceived():
                self._answer(event, now)
            case events.AnswerSent(peer):
                if peer in self._upstream:
                    self._grant(peer)
            case events.ForwardDone(microbatch, loss):
                self._forward_done(microbatch, loss)
            case events.BackwardDone(microbatch):
                flight = self._ended(microbatch, effects.RunBackward)
                self._complete(flight)
            case events.UpdateDone(update):
                self._update_done(update)
            case events.SaveWanted():
                self._save_wanted = True
            case events.SaveDone():
                if not isinstance(self._running, effects.RunSave):
                    raise self._bug("a save ended that was not under way")
                self._running = None
            case events.MixingWanted(step, round):
                if self._mixing_wanted is not None:
                    raise self._bug("a step of mixing is asked for while another waits")
                self._mixing_wanted = effects.RunMixing(step, round)
            case events.MixingDone():
                if not isinstance(self._running, effects.RunMixing):
                    raise self._bug("a step of mixing ended that was not under way")
                self._running = None
            case events.Ticked():
                self._give_up_silent(now)
            case events.DrainStarted():
                self._draining = True

    # neighbours

    def _open_upstream(self, peer: PeerId) -> None:
        self._lose_upstream(peer)
        self._windows[peer] = LinkWindow(self._indices)
        self._upstream[peer] = self._credit
        self._out.append(effects.SendCredit(peer, self._upstream[peer]))

    def _lose_upstream(self, peer: PeerId) -> None:
        """What it alone sent and has not begun is left to be sent again, here or to another node of this stage."""
        self._upstream.pop(peer, None)
        self._windows.pop(peer, None)
        for microbatch, flight in list(self._flights.items()):
            if flight.upstreams.pop(peer, None) is not None and flight.phase == "queued" and not flight.upstreams:
                del self._flights[microbatch]
                self._out.append(effects.Forget(microbatch))

    def _lose_downstream(self, peer: PeerId) -> None:
        self._downstream.pop(peer, None)
        for flight in self._flights.values():
            if flight.downstream == peer and flight.phase == "sent":
                flight.phase, flight.downstream = "unsent", None

    def _beat(self, peer: PeerId, waiting: bool, now: float) -> None:
        downstream = self._downstream.get(peer)
        if downstream is not None:
            if downstream.waiting or waiting:
                downstream.answered_at = now  # it owes nothing while it waits, and its time begins anew after it
            downstream.waiting = waiting

    def _give_up_silent(self, now: float) -> None:
        for peer, downstream in list(self._downstream.items()):
            owes = any(flight.downstream == peer and flight.phase == "sent" for flight in self._flights.values())
            if not owes:
                downstream.answered_at = now
            elif now - downstream.answered_at > self._spec.answer_s:
                detail = f"stage {self.stage + 1} took microbatches and answered none for {self._spec.answer_s:g} s"
                self._blame(peer, "stage_unanswered", detail)
                self._lose_downstream(peer)

    # what arrives

    def _activation(self, event: events.ActivationReceived) -> None:
        peer, microbatch = event.peer, event.microbatch
        left = self._upstream.get(peer)
        if left is None:
            return  # of a link that is over already
        if left <= 0:
            self._blame(peer, "stage_flood", f"{microbatch} came without credit for it")
            return
        if (refusal := self._windows[peer].refusal(microbatch, event.version)) is not None:
            self._blame(peer, "bad_stage_frame", refusal)
            return
        self._upstream[peer] = left - 1
        flight = self._flights.get(microbatch)
        if flight is not None:
            if peer in flight.upstreams:
                self._grant(peer)  # both get one answer, and credit comes back with it once
            flight.upstreams[peer], flight.origin = event.version, peer
        elif microbatch in self._results:
            self._reply(peer, microbatch, event.version, self._results[microbatch])
        else:
            counted = not microbatch.held_out and microbatch not in self._ledger
            self._flights[microbatch] = Flight(microbatch, counted, {peer: event.version}, origin=peer)
            self._out.append(effects.KeepActivation(microbatch))

    def _answer(self, event: events.GradientReceived | events.ScoreReceived, now: float) -> None:
        peer, microbatch = event.peer, event.microbatch
        if peer not in self._downstream:
            return  # of a link that is over already
        if isinstance(event, events.ScoreReceived) != microbatch.held_out:
            return self._blame(peer, "bad_stage_frame", f"{microbatch} was answered with the other kind of answer")
        flight = self._flights.get(microbatch)
        if flight is None or flight.phase in ("answered", "backward"):
            if flight is None and microbatch not in self._ledger and microbatch not in self._results:
                self._blame(peer, "bad_stage_frame", f"{microbatch} is not under way here")
            return  # an answer twice: the link broke after the first
        if flight.phase != "sent" or flight.downstream != peer:
            return self._blame(peer, "bad_stage_frame", f"{microbatch} was not sent to it")
        if flight.version != event.version:
            detail = f"{microbatch} was sent with version {flight.version} and answered with {event.version}"
            return self._blame(peer, "bad_stage_frame", detail)
        self._downstream[peer].answered_at = now
        flight.loss = event.loss
        flight.phase = "answered"
        if microbatch.held_out:
            self._complete(flight)
        else:
            self._out.append(effects.KeepGradient(peer, microbatch))

    # what the worker did

    def _ended(self, microbatch: Microbatch, kind: type[StageEffect]) -> Flight:
        running = self._running
        if not isinstance(running, kind) or getattr(running, "microbatch", None) != microbatch:
            raise self._bug(f"{kind.__name__} of {microbatch} ended, but {running} is under way")
        self._running = None
        return self._flights[microbatch]

    def _forward_done(self, microbatch: Microbatch, loss: float | None) -> None:
        flight = self._ended(microbatch, effects.RunForward)
        if not self._last:
            flight.phase = "unsent"
            return
        if loss is None:
            raise self._bug(f"the last stage gave no loss for {microbatch}")
        flight.loss = loss
        self._complete(flight)

    def _complete(self, flight: Flight) -> None:
        """All is computed here that the microbatch needs: its gradient waits for its update, its answer goes back."""
        microbatch = flight.microbatch
        del self._flights[microbatch]
        if flight.counted:
            self._members.setdefault(flight.update, []).append(flight)
            self._unledgered.add(microbatch)
        if microbatch.held_out:
            self._scored(microbatch, flight.loss)
        for peer, version in flight.upstreams.items():
            self._reply(peer, microbatch, version, flight.loss)
        self._results[microbatch] = flight.loss
        if self._first:
            self._out.append(effects.Forget(microbatch))  # nobody asks a first stage for an answer
        while len(self._results) > self._kept:
            self._drop_result()

    def _drop_result(self) -> None:
        """Drops the oldest answer but none of a member: sent again before its update is made, it would count twice.

        There is one: more answers are kept than there can be members.
        """
        oldest = next(microbatch for microbatch in self._results if microbatch not in self._unledgered)
        del self._results[oldest]
        if not self._first:
            self._out.append(effects.Forget(oldest))

    def _reply(self, peer: PeerId, microbatch: Microbatch, version: int, loss: float) -> None:
        kind = effects.SendScore if microbatch.held_out else effects.SendGradient
        self._out.append(kind(peer, microbatch, version, loss))

    def _scored(self, microbatch: Microbatch, loss: float) -> None:
        if not self._held_out:
            return
        evaluation = microbatch.index // self._held_out
        scores = self._scores.setdefault(evaluation, [])
        scores.append(loss)
        if len(scores) == self._held_out:
            self._out.append(effects.ReportHeldOut(fmean(scores)))
        while len(self._scores) > KEPT_EVALUATIONS:
            del self._scores[next(iter(self._scores))]

    def _update_done(self, update: int) -> None:
        running = self._running
        if not isinstance(running, effects.RunUpdate) or running.update != update:
            raise self._bug(f"update {update} ended, but {running} is under way")
        self._running = None
        self._applied = update + 1
        members = self._members.pop(update)
        for flight in members:
            self._ledger.add(flight.microbatch)
            self._unledgered.discard(flight.microbatch)
        self._out.append(effects.ReportTrained(update, fmean(flight.loss for flight in members)))
        if self._source is not None and self._applied % self._spec.eval_every == 0:
            self._source.evaluate()
