"""The fetch machine: verified pieces, donors that die, lie or come back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from peerloom.protocol.effects import ScorePeer
from peerloom.protocol.errors import InvalidTransition
from peerloom.protocol.limits import CHUNK_BYTES
from peerloom.protocol.messages import FetchRequest, StateManifest, StatePiece
from peerloom.protocol.transfer import (
    MAX_CYCLES,
    DonorFailed,
    FetchDone,
    FetchEffect,
    FetchFailed,
    FetchMachine,
    ManifestReceived,
    PieceReceived,
    StartFetch,
    StorePiece,
)
from peerloom.protocol.types import PeerId

A, B = PeerId("a"), PeerId("b")
PIECE, TOTAL, SKEW = 64, 64 * 4 + 20, 8


def theta(seed: int) -> bytes:
    return random.Random(seed).randbytes(TOTAL)


def pieces(data: bytes) -> list[bytes]:
    return [data[i : i + PIECE] for i in range(0, len(data), PIECE)]


def manifest(data: bytes, round: int = 5, snapshot: str = "s") -> StateManifest:
    digests = tuple(blake3(piece).digest() for piece in pieces(data))
    return StateManifest(snapshot, round, 100 + round, "L", len(data), PIECE, digests, 1.5)


class Bench:
    """A machine and the theta that its effects have put together."""

    def __init__(self, *donors: PeerId) -> None:
        self.machine = FetchMachine(donors, "L", TOTAL, SKEW, least_piece_bytes=4)
        self.theta = bytearray(TOTAL)
        self.last = self.machine.start()

    @property
    def attempt(self) -> int:
        return self.ask.attempt

    @property
    def ask(self) -> StartFetch:
        return next(effect for effect in reversed(self.last) if isinstance(effect, StartFetch))

    def takes(self, data: StateManifest) -> list[FetchEffect]:
        return self._keep(self.machine.handle(ManifestReceived(self.attempt, data)))

    def piece(self, index: int, data: bytes) -> list[FetchEffect]:
        effects = self.machine.handle(PieceReceived(self.attempt, StatePiece(index, data)))
        for effect in effects:
            if isinstance(effect, StorePiece):
                self.theta[effect.offset : effect.offset + len(data)] = data
        return self._keep(effects)

    def fails(self, reason: str = "reset", at_fault: bool = False) -> list[FetchEffect]:
        return self._keep(self.machine.handle(DonorFailed(self.attempt, reason, at_fault)))

    def _keep(self, effects: list[FetchEffect]) -> list[FetchEffect]:
        if any(isinstance(effect, StartFetch) for effect in effects):
            self.last = effects
        return effects


def test_a_whole_fetch() -> None:
    bench, data = Bench(A), theta(1)
    assert bench.last == [StartFetch(1, A, FetchRequest("L", "", 0))]
    assert bench.takes(manifest(data)) == []
    cut = pieces(data)
    for i, piece in enumerate(cut[:-1]):
        assert bench.piece(i, piece) == [StorePiece(i, i * PIECE)]
    assert bench.machine.progress == pytest.approx(4 * PIECE / TOTAL)
    assert bench.piece(4, cut[4]) == [StorePiece(4, 4 * PIECE), FetchDone(A, 5, 105, 1.5)]
    assert bytes(bench.theta) == data
    assert bench.machine.donor is None
    assert bench.machine.progress == 1.0


def half(bench: Bench, data: bytes, **changes: int | str) -> None:
    """Two good pieces of a snapshot, then the donor dies."""
    bench.takes(replace(manifest(data), **changes))  # type: ignore[arg-type]
    for i, piece in enumerate(pieces(data)[:2]):
        bench.piece(i, piece)
    bench.fails()


def finish(bench: Bench, data: bytes) -> list[FetchEffect]:
    effects: list[FetchEffect] = []
    for i in range(bench.ask.request.start_piece, len(pieces(data))):
        effects = bench.piece(i, pieces(data)[i])
    return effects


def test_a_donor_that_comes_back_goes_on_with_its_snapshot() -> None:
    bench, data = Bench(A), theta(1)
    half(bench, data)
    assert bench.last == [StartFetch(2, A, FetchRequest("L", "s", 2))]
    bench.takes(manifest(data))
    assert finish(bench, data)[-1] == FetchDone(A, 5, 105, 1.5)
    assert bytes(bench.theta) == data


def test_the_next_donor_near_in_rounds_goes_on_where_the_first_died() -> None:
    bench, first, second = Bench(A, B), theta(1), theta(2)
    half(bench, first)
    assert bench.last == [StartFetch(2, B, FetchRequest("L", "", 2))]
    assert bench.takes(manifest(second, round=5 + SKEW, snapshot="t")) == []
    assert finish(bench, second)[-1] == FetchDone(B, 5 + SKEW, 105 + SKEW, 1.5)
    assert bytes(bench.theta) == first[: 2 * PIECE] + second[2 * PIECE :]


def test_pieces_of_a_donor_too_far_away_are_fetched_again() -> None:
    bench, first, second = Bench(A, B), theta(1), theta(2)
    half(bench, first)
    far = manifest(second, round=6 + SKEW, snapshot="t")
    assert bench.takes(far) == [StartFetch(3, B, FetchRequest("L", "t", 0))]
    assert bench.takes(far) == []
    assert isinstance(finish(bench, second)[-1], FetchDone)
    assert bytes(bench.theta) == second


def test_equal_pieces_are_kept_whatever_the_round() -> None:
    bench, first = Bench(A, B), theta(1)
    half(bench, first)
    second = first[:PIECE] + theta(2)[PIECE:]
    assert bench.takes(manifest(second, round=500, snapshot="t")) == [StartFetch(3, B, FetchRequest("L", "t", 1))]
    bench.takes(manifest(second, round=500, snapshot="t"))
    assert isinstance(finish(bench, second)[-1], FetchDone)
    assert bytes(bench.theta) == second


def test_another_piece_size_starts_over() -> None:
    bench, data = Bench(A, B), theta(1)
    half(bench, data)
    digests = tuple(blake3(data[i : i + 128]).digest() for i in range(0, TOTAL, 128))
    other = replace(manifest(data), piece_bytes=128, piece_digests=digests)
    assert bench.takes(other) == [StartFetch(3, B, FetchRequest("L", "s", 0))]
    assert bench.machine.progress == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": "other"}, "another layout"),
        ({"total_bytes": TOTAL + 4}, f"announces {TOTAL + 4} bytes, the model has {TOTAL}"),
        ({"piece_bytes": 0}, "pieces of 0 bytes"),
        ({"piece_bytes": -64}, "pieces of -64 bytes"),
        ({"piece_bytes": 66}, "pieces of 66 bytes"),
        ({"piece_bytes": CHUNK_BYTES + 4}, f"pieces of {CHUNK_BYTES + 4} bytes"),
        ({"piece_bytes": 4}, "lists 5 pieces where 69 are needed"),
        ({"piece_digests": ()}, "lists 0 pieces where 5 are needed"),
    ],
)
def test_a_manifest_that_does_not_fit_is_a_fault(changes: dict[str, object], words: str) -> None:
    bench = Bench(A)
    effects = bench.takes(replace(manifest(theta(1)), **changes))  # type: ignore[arg-type]
    assert effects[0] == ScorePeer(A, "bad_manifest")
    assert isinstance(effects[1], FetchFailed)
    assert words in effects[1].reason


def test_an_honest_manifest_of_too_many_pieces_is_refused() -> None:
    machine = FetchMachine([A], "L", 4 * 40_000, SKEW, least_piece_bytes=4)
    machine.start()
    many = StateManifest("s", 1, 1, "L", 4 * 40_000, 4, (b"\0" * 32,) * 40_000, None)
    assert machine.handle(ManifestReceived(1, many))[0] == ScorePeer(A, "bad_manifest")


@pytest.mark.parametrize(
    ("index", "data"),
    [
        (0, b"x" * PIECE),  # another digest
        (0, theta(1)[: PIECE - 1]),
        (1, theta(1)[PIECE : 2 * PIECE]),
        (-1, theta(1)[:PIECE]),
        (5, b""),
    ],
)
def test_a_bad_piece_costs_the_donor_its_place(index: int, data: bytes) -> None:
    bench = Bench(A, B)
    bench.takes(manifest(theta(1)))
    effects = bench.piece(index, data)
    assert effects == [ScorePeer(A, "bad_piece"), StartFetch(2, B, FetchRequest("L", "", 0))]
    for _ in range(MAX_CYCLES):
        effects = bench.fails()
    assert isinstance(effects[0], FetchFailed)
    assert "a: " in effects[0].reason
    assert "b: reset" in effects[0].reason


def test_a_piece_before_the_manifest_and_a_second_manifest_are_faults() -> None:
    assert Bench(A).piece(0, theta(1)[:PIECE])[0] == ScorePeer(A, "bad_piece")
    bench = Bench(A)
    bench.takes(manifest(theta(1)))
    assert bench.takes(manifest(theta(1)))[0] == ScorePeer(A, "bad_manifest")


def test_a_stream_broken_by_a_bad_message_is_scored() -> None:
    assert Bench(A, B).fails("garbage", at_fault=True)[0] == ScorePeer(A, "bad_state")


def test_donors_are_tried_in_turn_then_the_fetch_fails() -> None:
    bench, asked = Bench(A, B, A), [A]
    effects = bench.last
    while isinstance(effects[-1], StartFetch):
        effects = bench.fails("down")
        if isinstance(effects[-1], StartFetch):
            asked.append(effects[-1].donor)
    assert asked == [A, B] * MAX_CYCLES
    assert effects == [FetchFailed("a: down; b: down")]


def test_progress_gives_donors_more_turns() -> None:
    bench, data = Bench(A), theta(1)
    for i, piece in enumerate(pieces(data)[:4]):
        bench.takes(manifest(data))
        bench.piece(i, piece)
        assert isinstance(bench.fails()[-1], StartFetch)
    bench.takes(manifest(data))
    assert isinstance(finish(bench, data)[-1], FetchDone)


def test_nobody_to_ask_fails_at_once() -> None:
    assert FetchMachine([], "L", TOTAL, SKEW).start() == [FetchFailed("no peer holds a model to hand over")]


def test_late_events_are_ignored_and_impossible_ones_raise() -> None:
    bench, data = Bench(A, B), theta(1)
    bench.fails()
    assert bench.machine.handle(PieceReceived(1, StatePiece(0, pieces(data)[0]))) == []
    assert bench.machine.handle(DonorFailed(1, "again")) == []
    with pytest.raises(InvalidTransition):
        bench.machine.handle(DonorFailed(9, "from the future"))
    with pytest.raises(InvalidTransition):
        bench.machine.start()
    with pytest.raises(ValueError, match="total_bytes is 0"):
        FetchMachine([A], "L", 0, SKEW)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_whatever_donors_do_a_finished_theta_holds_only_announced_pieces(seed: int) -> None:
    rng = random.Random(seed)
    donors = [A, B, PeerId("c")]
    states = {donor: (theta(i), rng.choice([5, 6, 40])) for i, donor in enumerate(donors)}
    bench = Bench(*donors)
    for _ in range(2000):
        donor = bench.machine.donor
        if donor is None:
            break
        data, round = states[donor]
        attempt, start = bench.attempt, bench.ask.request.start_piece
        if rng.random() < 0.1:
            bench.fails()
            continue
        bench.takes(manifest(data, round, f"{donor}{round}"))
        for i in range(start, len(pieces(data))):
            if bench.machine.donor is None or bench.attempt != attempt:
                break
            if rng.random() < 0.3:
                bench.fails()
            else:
                bench.piece(i, pieces(data)[i] if rng.random() < 0.95 else b"?" * PIECE)
    assert bench.machine.donor is None
    if bench.machine.progress == 1.0:
        sources = [
            {round for data, round in states.values() if pieces(data)[i] == piece}
            for i, piece in enumerate(pieces(bytes(bench.theta)))
        ]
        assert all(sources)
        rounds = {round for source in sources for round in source}
        assert max(rounds) - min(rounds) <= SKEW


def test_a_donor_that_drips_its_state_is_refused() -> None:
    machine = FetchMachine([A], "L", 1 << 20, SKEW)
    machine.start()
    crumbs = StateManifest("s", 1, 1, "L", 1 << 20, 4096, (b"\0" * 32,) * 256, None)
    assert machine.handle(ManifestReceived(1, crumbs))[0] == ScorePeer(A, "bad_manifest")
