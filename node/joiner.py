"""Performs the fetch machine's effects: streams a donor's theta into memory, donor after donor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from peerloom.node.least_rate import left_s
from peerloom.node.payload import check_numbers
from peerloom.node.seams import Transport
from peerloom.protocol.effects import ScorePeer
from peerloom.protocol.errors import (
    BadPayload,
    LinkError,
    MalformedMessage,
    NoDonor,
    PeerloomError,
    ProtocolError,
    StorageError,
)
from peerloom.protocol.limits import MAX_PAST_RECORD, MAX_STEPS_PAST_RECORD, MAX_TAKEN
from peerloom.protocol.messages import StateManifest, StateMessage, StatePiece
from peerloom.protocol.transfer import (
    DonorFailed,
    FetchDone,
    FetchEffect,
    FetchEvent,
    FetchFailed,
    FetchMachine,
    ManifestReceived,
    PieceReceived,
    StartFetch,
    StorePiece,
)
from peerloom.protocol.types import PeerId, PeerRecord

STALL_S = 20.0  # a donor that sends nothing for this long is left for the next one
MAX_STEPS_A_ROUND = 10**8  # a thousand a second in the longest round that a spec may have


@dataclass(frozen=True, slots=True)
class FetchedState:
    """A state, every piece verified; its figures are the last donor's, its pieces those of all `donors`, in turn."""

    round: int
    step: int
    theta: bytearray
    held_out_loss: float | None
    donors: tuple[PeerId, ...]

    def to_blame(self) -> tuple[PeerId, ...]:
        """Who is at fault for a bad state: a sole donor; of several, those that broke off before the last one."""
        return self.donors[:-1] or self.donors


class Joiner:
    """Fetches one state; `progress` is told the share that has arrived, `score` each donor's faults."""

    def __init__(
        self,
        transport: Transport,
        records: Callable[[PeerId], PeerRecord | None],
        score: Callable[[PeerId, str], None],
        progress: Callable[[str, float], None],
    ) -> None:
        self._transport = transport
        self._records = records
        self._score = score
        self._progress = progress
        self._sources: dict[PeerId, None] = {}  # whose pieces are in place, in turn
        self._least_round = 0
        self._manifest_s: float | None = None
        self._waited = 0.0  # for manifests
        self._fp32 = True

    async def fetch(
        self,
        machine: FetchMachine,
        total_bytes: int,
        *,
        least_round: int = 0,
        manifest_within_s: float | None = None,
    ) -> FetchedState:
        """Runs the machine to its end; raises NoDonor when all donors failed.

        A manifest's round may be neither under `least_round` nor far past its donor's record. All waiting for manifests
        together takes at most `manifest_within_s`, half of it for one donor (None: no more than STALL_S for each).
        """
        theta = bytearray(total_bytes)

        def store(offset: int, data: bytes) -> None:
            theta[offset : offset + len(data)] = data

        done, donors = await self.fetch_into(
            machine, store, least_round=least_round, manifest_within_s=manifest_within_s
        )
        return FetchedState(done.round, done.step, theta, done.held_out_loss, donors)

    async def fetch_into(
        self,
        machine: FetchMachine,
        store: Callable[[int, bytes], None],
        *,
        least_round: int = 0,
        manifest_within_s: float | None = None,
        fp32: bool = True,
    ) -> tuple[FetchDone, tuple[PeerId, ...]]:
        """As `fetch`, each piece given to `store` with its offset; returns the end and whose pieces are in place.

        Of a state that is not `fp32` no number is looked at: its digest is the caller's to check.
        """
        self._sources = {}
        self._least_round, self._manifest_s = least_round, manifest_within_s
        self._waited = 0.0
        self._fp32 = fp32
        effects = machine.start()
        while True:
            request, done = self._sort(effects)
            if done is not None:
                sources = [peer for peer in self._sources if peer != done.donor]
                return done, (*sources, done.donor)
            assert request is not None  # the machine's promise: it asks on, is done, or failed
            effects = await self._read(machine, request, store)

    def _sort(self, effects: list[FetchEffect]) -> tuple[StartFetch | None, FetchDone | None]:
        """Scores, and finds what comes next; raises NoDonor."""
        request: StartFetch | None = None
        for effect in effects:
            match effect:
                case ScorePeer(peer, fault):
                    self._score(peer, fault)
                case FetchFailed(reason):
                    raise NoDonor(f"no peer could hand over the model ({reason}); join again when a trainer is up")
                case FetchDone():
                    return None, effect
                case StartFetch():
                    request = effect
        return request, None

    async def _read(
        self, machine: FetchMachine, ask: StartFetch, store: Callable[[int, bytes], None]
    ) -> list[FetchEffect]:
        """Feeds one donor's stream until the machine wants something else than the next piece."""
        record = self._records(ask.donor)
        if record is None:
            return machine.handle(DonorFailed(ask.attempt, "its record has expired"))
        try:
            async with aclosing(self._transport.fetch(record, ask.request)) as stream:
                return await self._feed(machine, ask.attempt, stream, store, record)
        except TimeoutError:
            return machine.handle(DonorFailed(ask.attempt, "it sent nothing for too long"))
        except StorageError:
            raise  # this disk's: no donor mends it
        except PeerloomError as error:
            return machine.handle(DonorFailed(ask.attempt, str(error), isinstance(error, ProtocolError)))

    async def _feed(
        self,
        machine: FetchMachine,
        attempt: int,
        stream: AsyncGenerator[StateMessage, None],
        store: Callable[[int, bytes], None],
        record: PeerRecord,
    ) -> list[FetchEffect]:
        message = await self._first(stream)
        began, received = asyncio.get_running_loop().time(), 0
        while True:
            if message is None:
                raise LinkError("its stream ended early")
            if isinstance(message, StatePiece) and self._fp32:
                _check_piece(message)
            if isinstance(message, StateManifest):
                self._check_position(message, record)
            effects = machine.handle(_event(attempt, message))
            if _stored(effects, message, store):
                self._sources[record.peer_id] = None
                self._progress("fetching the model", machine.progress)
                effects = [effect for effect in effects if not isinstance(effect, StorePiece)]
            if effects:
                return effects
            if isinstance(message, StatePiece):
                received += len(message.data)
            async with asyncio.timeout(left_s(began, received, STALL_S)):
                message = await anext(stream, None)

    async def _first(self, stream: AsyncGenerator[StateMessage, None]) -> StateMessage | None:
        """The manifest, unless the waiting for it takes too long; raises TimeoutError."""
        total, loop = self._manifest_s, asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(STALL_S if total is None else min(total / 2, total - self._waited)):
                return await anext(stream, None)
        finally:
            self._waited += loop.time() - began

    def _check_position(self, manifest: StateManifest, record: PeerRecord) -> None:
        """Raises MalformedMessage for a round or step that this node could not go on from."""
        most = min(record.round + MAX_PAST_RECORD, MAX_TAKEN)
        in_rounds = (manifest.round + 2) * MAX_STEPS_A_ROUND  # a record may lie about its step as well
        most_step = min(record.step + MAX_STEPS_PAST_RECORD, in_rounds, MAX_TAKEN)
        if not self._least_round <= manifest.round <= most or manifest.step > most_step:
            raise MalformedMessage(
                f"its state is of round {manifest.round}, step {manifest.step}; its record says round {record.round}, "
                f"step {record.step}; rounds {self._least_round} to {most} and steps to {most_step} could be taken over"
            )


def _stored(effects: list[FetchEffect], message: StateMessage, store: Callable[[int, bytes], None]) -> bool:
    for effect in effects:
        if isinstance(effect, StorePiece) and isinstance(message, StatePiece):
            store(effect.offset, message.data)
            return True
    return False


def _check_piece(piece: StatePiece) -> None:
    try:
        check_numbers(piece.data, "fp32")
    except BadPayload as error:
        raise BadPayload(f"{error} in piece {piece.index}") from None


def _event(attempt: int, message: StateMessage) -> FetchEvent:
    match message:
        case StateManifest():
            return ManifestReceived(attempt, message)
        case StatePiece():
            return PieceReceived(attempt, message)
