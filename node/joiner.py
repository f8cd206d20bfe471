"""Performs the fetch machine's effects: streams a donor's theta into memory, donor after donor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from peerloom.node.payload import check_numbers
from peerloom.node.seams import Transport
from peerloom.protocol.effects import ScorePeer
from peerloom.protocol.errors import BadPayload, LinkError, NoDonor, PeerloomError, ProtocolError
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


@dataclass(frozen=True, slots=True)
class FetchedState:
    """A donor's state, every piece verified."""

    round: int
    step: int
    theta: bytearray
    held_out_loss: float | None


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

    async def fetch(self, machine: FetchMachine, total_bytes: int) -> FetchedState:
        """Runs the machine to its end; raises NoDonor when all donors failed."""
        theta = bytearray(total_bytes)
        effects = machine.start()
        while True:
            request, done = self._sort(effects)
            if done is not None:
                return FetchedState(done.round, done.step, theta, done.held_out_loss)
            assert request is not None  # the machine's promise: it asks on, is done, or failed
            effects = await self._read(machine, request, theta)

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

    async def _read(self, machine: FetchMachine, ask: StartFetch, theta: bytearray) -> list[FetchEffect]:
        """Feeds one donor's stream until the machine wants something else than the next piece."""
        record = self._records(ask.donor)
        if record is None:
            return machine.handle(DonorFailed(ask.attempt, "its record has expired"))
        try:
            async with aclosing(self._transport.fetch(record, ask.request)) as stream:
                return await self._feed(machine, ask.attempt, stream, theta)
        except TimeoutError:
            return machine.handle(DonorFailed(ask.attempt, f"it sent nothing for {STALL_S:.0f} s"))
        except PeerloomError as error:
            return machine.handle(DonorFailed(ask.attempt, str(error), isinstance(error, ProtocolError)))

    async def _feed(
        self, machine: FetchMachine, attempt: int, stream: AsyncGenerator[StateMessage, None], theta: bytearray
    ) -> list[FetchEffect]:
        while True:
            async with asyncio.timeout(STALL_S):
                message = await anext(stream, None)
            if message is None:
                raise LinkError("its stream ended early")
            if isinstance(message, StatePiece):
                _check_piece(message)
            effects = machine.handle(_event(attempt, message))
            if self._store(effects, message, theta):
                self._progress("fetching the model", machine.progress)
                effects = [effect for effect in effects if not isinstance(effect, StorePiece)]
            if effects:
                return effects

    def _store(self, effects: list[FetchEffect], message: StateMessage, theta: bytearray) -> bool:
        for effect in effects:
            if isinstance(effect, StorePiece) and isinstance(message, StatePiece):
                theta[effect.offset : effect.offset + len(message.data)] = message.data
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
