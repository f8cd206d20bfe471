"""Fetching a donor's state: every piece verified, a dead donor followed by the next, going on where it broke.

What is kept when the donor changes. A piece of an earlier donor stays if the new manifest gives it the same digest, or
if the two donors' rounds are at most `max_round_skew` apart: replicas of one run stay close to their mean, and a theta
put together from pieces of two of them is as good a start as either (it is what fragment-wise gossip makes). Otherwise
it is fetched again. A donor that still keeps the snapshot it served before simply goes on.

`total_bytes` is this node's own: a manifest is held against it, and nothing is sized by the donor's word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from peerloom.protocol.effects import ScorePeer
from peerloom.protocol.errors import InvalidTransition
from peerloom.protocol.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES, MAX_PIECES, piece_length, pieces_of
from peerloom.protocol.messages import FetchRequest, StateKind, StateManifest, StatePiece
from peerloom.protocol.types import PeerId

MAX_CYCLES = 3  # times round all donors without one new piece


@dataclass(frozen=True, slots=True)
class ManifestReceived:
    """The donor's first answer in the stream that StartFetch of the same `attempt` opened."""

    attempt: int
    manifest: StateManifest


@dataclass(frozen=True, slots=True)
class PieceReceived:
    """The next answer of that stream."""

    attempt: int
    piece: StatePiece


@dataclass(frozen=True, slots=True)
class DonorFailed:
    """That stream is over without all pieces: refused, ended, stalled, or broken by a bad message (`at_fault`)."""

    attempt: int
    reason: str
    at_fault: bool = False


@dataclass(frozen=True, slots=True)
class StartFetch:
    """End the stream before, if any, and ask `donor`; events of this stream carry `attempt`."""

    attempt: int
    donor: PeerId
    request: FetchRequest


@dataclass(frozen=True, slots=True)
class StorePiece:
    """The piece of the event just handled is good: its data belongs at byte `offset` of theta."""

    index: int
    offset: int


@dataclass(frozen=True, slots=True)
class FetchDone:
    """Theta is whole; the figures are those of the last donor."""

    donor: PeerId
    round: int
    step: int
    held_out_loss: float | None


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """No donor is left to ask; `reason` names the last failure of each."""

    reason: str


FetchEvent = ManifestReceived | PieceReceived | DonorFailed
FetchEffect = StartFetch | StorePiece | FetchDone | FetchFailed | ScorePeer


@dataclass(frozen=True, slots=True)
class _Stored:
    """What is known of a piece in place."""

    digest: bytes
    round: int


class FetchMachine:
    """Decides one fetch: `start()`, then `handle(event)` until FetchDone or FetchFailed.

    A donor may not drip its state in pieces under `least_piece_bytes`.
    `donors` come best first; `layout` is the model's layout digest, `total_bytes` theta in fp32. With a skew of -1 all
    pieces in place are always as the last manifest has them.
    """

    def __init__(
        self,
        donors: Sequence[PeerId],
        layout: str,
        total_bytes: int,
        max_round_skew: int,
        *,
        least_piece_bytes: int = LEAST_CHUNK_BYTES,
        kind: StateKind = "theta",
    ) -> None:
        if total_bytes <= 0:
            raise ValueError(f"total_bytes is {total_bytes}: a model has at least one parameter")
        self._donors = list(dict.fromkeys(donors))
        self._layout, self._total_bytes, self._skew = layout, total_bytes, max_round_skew
        self._least_piece_bytes, self._kind = least_piece_bytes, kind
        self._turn, self._cycles, self._attempt = 0, 0, 0
        self._failures: dict[PeerId, str] = {}
        self._snapshots: dict[PeerId, str] = {}
        self._piece_bytes = 0  # of the pieces in place
        self._stored: dict[int, _Stored] = {}
        self._most_stored = 0
        self._manifest: StateManifest | None = None
        self._next = 0
        self._started, self._over = False, False

    @property
    def donor(self) -> PeerId | None:
        """Whom we are asking."""
        return self._donors[self._turn] if self._started and not self._over else None

    @property
    def progress(self) -> float:
        """Share of theta in place, 0 to 1."""
        return min(1.0, len(self._stored) * self._piece_bytes / self._total_bytes)

    def start(self) -> list[FetchEffect]:
        """Asks the first donor."""
        if self._started:
            raise InvalidTransition("a fetch is started once")
        self._started = True
        return self._ask() if self._donors else self._fail()

    def handle(self, event: FetchEvent) -> list[FetchEffect]:
        """Takes one event; those of an earlier attempt, or after the end, are late and give nothing."""
        if not self._started or event.attempt > self._attempt:
            raise InvalidTransition(f"{event} belongs to no attempt made; the last is {self._attempt}")
        if self._over or event.attempt < self._attempt:
            return []
        match event:
            case ManifestReceived():
                return self._on_manifest(event.manifest)
            case PieceReceived():
                return self._on_piece(event.piece)
            case DonorFailed():
                return self._next_donor(event.reason, "bad_state" if event.at_fault else "")

    def _on_manifest(self, manifest: StateManifest) -> list[FetchEffect]:
        wrong = "it sent a second manifest" if self._manifest is not None else self._misfit(manifest)
        if wrong:
            return self._next_donor(wrong, "bad_manifest")
        donor = self._donors[self._turn]
        self._snapshots[donor] = manifest.snapshot
        self._drop_unlike(manifest)
        if len(self._stored) == len(manifest.piece_digests):
            return self._done(manifest)
        if self._first_missing() < self._next:
            return self._ask()  # the stream begins past what was just dropped; the snapshot is the same
        self._manifest = manifest
        return []

    def _misfit(self, manifest: StateManifest) -> str:
        """What makes the manifest unusable, "" if nothing does."""
        if manifest.layout != self._layout:
            return "its model has another layout"
        if manifest.total_bytes != self._total_bytes:
            return f"it announces {manifest.total_bytes} bytes, the model has {self._total_bytes}"
        least = min(self._least_piece_bytes, self._total_bytes)
        if not least <= manifest.piece_bytes <= CHUNK_BYTES or manifest.piece_bytes % 4:
            return f"it cuts its state into pieces of {manifest.piece_bytes} bytes"
        expected = pieces_of(self._total_bytes, manifest.piece_bytes)
        if expected > MAX_PIECES or len(manifest.piece_digests) != expected:
            return f"it lists {len(manifest.piece_digests)} pieces where {expected} are needed, at most {MAX_PIECES}"
        return ""

    def _drop_unlike(self, manifest: StateManifest) -> None:
        """Forgets the pieces in place that do not go with this manifest."""
        if manifest.piece_bytes != self._piece_bytes:
            self._stored.clear()
            self._piece_bytes = manifest.piece_bytes
        for index, stored in list(self._stored.items()):
            same = stored.digest == manifest.piece_digests[index]
            if not same and abs(stored.round - manifest.round) > self._skew:
                del self._stored[index]

    def _on_piece(self, piece: StatePiece) -> list[FetchEffect]:
        manifest = self._manifest
        if manifest is None:
            return self._next_donor("it sent a piece before the manifest", "bad_piece")
        index = piece.index
        if index != self._next or index >= len(manifest.piece_digests):
            return self._next_donor(f"it sent piece {index} where {self._next} was due", "bad_piece")
        fits = len(piece.data) == piece_length(index, self._total_bytes, manifest.piece_bytes)
        if not fits or blake3(piece.data).digest() != manifest.piece_digests[index]:
            return self._next_donor(f"piece {index} is not the one its manifest announced", "bad_piece")
        self._stored[index] = _Stored(manifest.piece_digests[index], manifest.round)
        self._next += 1
        if len(self._stored) > self._most_stored:
            self._most_stored, self._cycles = len(self._stored), 0
        store = StorePiece(index, index * manifest.piece_bytes)
        if len(self._stored) == len(manifest.piece_digests):
            return [store, *self._done(manifest)]
        return [store]

    def _first_missing(self) -> int:
        return next(index for index in range(len(self._stored) + 1) if index not in self._stored)

    def _ask(self) -> list[FetchEffect]:
        donor = self._donors[self._turn]
        self._attempt += 1
        self._manifest, self._next = None, self._first_missing()
        request = FetchRequest(self._layout, self._snapshots.get(donor, ""), self._next, kind=self._kind)
        return [StartFetch(self._attempt, donor, request)]

    def _next_donor(self, reason: str, fault: str) -> list[FetchEffect]:
        """Goes on to the next donor; one at fault is not asked again."""
        donor = self._donors[self._turn]
        self._failures[donor] = reason
        out: list[FetchEffect] = []
        if fault:
            out.append(ScorePeer(donor, fault))
            del self._donors[self._turn]
        else:
            self._turn += 1
        if self._turn >= len(self._donors):
            self._turn = 0
            self._cycles += 1
        if not self._donors or self._cycles >= MAX_CYCLES:
            return out + self._fail()
        return out + self._ask()

    def _done(self, manifest: StateManifest) -> list[FetchEffect]:
        donor = self._donors[self._turn]
        self._over = True
        return [FetchDone(donor, manifest.round, manifest.step, manifest.held_out_loss)]

    def _fail(self) -> list[FetchEffect]:
        self._over = True
        told = "; ".join(f"{donor}: {reason}" for donor, reason in self._failures.items())
        return [FetchFailed(told or "no peer holds a model to hand over")]
