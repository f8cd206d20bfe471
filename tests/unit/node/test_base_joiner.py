"""A joiner without the base takes it from the peers that train on it, and from no liar; all in virtual time."""

from __future__ import annotations

import asyncio
import errno
import json
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from peerloom.node import base_folder
from peerloom.node.base_joiner import BaseJoiner
from peerloom.node.donor import manifest_of
from peerloom.node.virtual_time import VirtualClock, run_virtual
from peerloom.protocol.base import BaseFiles, pack_files
from peerloom.protocol.errors import (
    BaseMissing,
    LinkError,
    NoDonor,
    RunMismatch,
    SpecError,
    StorageError,
    VersionMismatch,
)
from peerloom.protocol.messages import FetchRequest, StateMessage, StatePiece
from peerloom.protocol.types import PeerId, PeerRecord
from tests.unit.node.wire import record_of

NUMEL, PIECE = 6144, 8192
WEIGHTS = bytes(range(256)) * (4 * NUMEL // 256)
DIGEST = blake3(WEIGHTS).hexdigest()
FILES = {"config.json": json.dumps({"numel": NUMEL}).encode()}
MISSING = BaseMissing(["model.path: /nowhere cannot be loaded"])


class Peer:
    """One donor: what it serves, and how much of the weights before it breaks off."""

    def __init__(self, weights: bytes = WEIGHTS, files: dict[str, bytes] = FILES, **changes: Any) -> None:
        self.weights, self.files = weights, pack_files(BaseFiles("fp32", files))
        self.pieces: int = changes.pop("pieces", 99)
        self.digest: str = changes.pop("digest", DIGEST)
        self.messages: int = changes.pop("messages", 0)
        self.error: Exception | None = changes.pop("error", None)
        self.asked: list[FetchRequest] = []


class Swarm:
    """Donors, and a joiner that sees them as `context` wants it; `received` is what its node notes."""

    def __init__(self, home: Path, *peers: Peer, expect_peers: bool = True, named: str = "") -> None:
        self.run_dir = home / "run"
        self.peers = {PeerId(f"peer-{index}"): peer for index, peer in enumerate(peers)}
        self.scored: list[tuple[PeerId, str]] = []
        self.counts: Counter[str] = Counter()
        self.said: list[str] = []
        self.journal: list[dict[str, Any]] = []
        settings = SimpleNamespace(
            run_dir=self.run_dir, expect_peers=expect_peers, first_view_s=1.0, donor_patience_s=10.0
        )
        self.context: Any = SimpleNamespace(
            settings=settings,
            spec=SimpleNamespace(model=SimpleNamespace(digest=named)),
            transport=self,
            view=self,
            facts=SimpleNamespace(enter=lambda *told: None, count=self.count),
            progress=lambda what, share: None,
            say=self.said.append,
            journal=SimpleNamespace(write=lambda kind, **values: self.journal.append({"kind": kind, **values})),
        )

    async def join(self) -> None:
        self.context.clock = VirtualClock()
        await BaseJoiner(self.context, self).fetch(MISSING)  # type: ignore[arg-type]

    def count(self, metric: str, amount: float = 1.0) -> None:
        self.counts[metric] += int(amount)

    # a view

    def believed(self) -> list[PeerRecord]:
        left_alone = {peer for peer, fault in self.scored if fault == "bad_base"}
        return [record for peer in self.peers if peer not in left_alone and (record := self.record_of(peer))]

    def record_of(self, peer: PeerId) -> PeerRecord | None:
        found = self.peers[peer]
        about = {"state": "training", "init_digest": found.digest, "messages": found.messages}
        return record_of(peer, ("a:1",), b"", **about)

    def score(self, peer: PeerId, fault: str) -> None:
        self.scored.append((peer, fault))

    async def wait_for_anybody(self, seconds: float) -> None:
        await asyncio.sleep(0)

    async def refresh(self) -> None:
        await asyncio.sleep(0)

    # a transport

    async def fetch(self, record: PeerRecord, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        peer = self.peers[record.peer_id]
        peer.asked.append(request)
        assert request.layout == peer.digest
        if peer.error is not None:
            raise peer.error
        if request.kind == "base_files":
            yield manifest_of(peer.files, round=0, step=0, layout=request.layout, held_out_loss=None)
            yield StatePiece(0, peer.files)
            return
        manifest = manifest_of(
            peer.weights, round=0, step=0, layout=request.layout, held_out_loss=None, piece_bytes=PIECE
        )
        yield manifest
        for index in range(request.start_piece, len(manifest.piece_digests)):
            if index >= peer.pieces:
                raise LinkError("the connection broke")
            yield StatePiece(index, peer.weights[index * PIECE : (index + 1) * PIECE])

    # a worker

    async def base_numel(self, folder: Path) -> int:
        about = json.loads((folder / "config.json").read_bytes())
        if "numel" not in about:
            raise SpecError(["model.path: the base's configuration makes no model"])
        return int(about["numel"])

    def weights(self) -> bytes | None:
        """What was taken over; nothing else is left on disk."""
        assert not list(self.run_dir.glob(".base-*"))
        folder = base_folder.fetched(self.run_dir)
        return (folder / base_folder.WEIGHTS).read_bytes() if folder else None

    def asked(self, index: int) -> list[tuple[str, int]]:
        return [(request.kind, request.start_piece) for request in self.peers[PeerId(f"peer-{index}")].asked]


def joined(swarm: Swarm) -> Swarm:
    """After a fetch that must succeed."""
    run_virtual(swarm.join)
    assert swarm.weights() == WEIGHTS
    return swarm


def failed(swarm: Swarm, error: type[Exception], match: str) -> Swarm:
    """After one that must fail, with nothing left."""
    with pytest.raises(error, match=match):
        run_virtual(swarm.join)
    assert swarm.weights() is None
    return swarm


def test_the_cost_is_told_and_counted(tmp_path: Path) -> None:
    swarm = joined(Swarm(tmp_path, Peer(), Peer(), Peer(), Peer()))
    size = len(WEIGHTS) + len(pack_files(BaseFiles("fp32", FILES)))
    assert swarm.counts == {"base_fetched": 1, "base_fetched_bytes": size}
    assert swarm.said == [
        f"fetched the base model for {size} bytes; its digest is the swarm's; 3 other peers have the same configuration"
    ]
    assert swarm.journal == [{"kind": "base_fetched", "bytes": size, "digest": DIGEST, "witnesses": 3}]
    alone = joined(Swarm(tmp_path / "alone", Peer()))
    assert alone.said[0].endswith("nobody else could be found to have the same configuration")


@pytest.mark.parametrize("liars", [1, 2])
def test_weights_of_another_digest_are_refused_and_their_donor_scored(tmp_path: Path, liars: int) -> None:
    lie = Peer(bytes(len(WEIGHTS)), messages=9)
    swarm = joined(Swarm(tmp_path, *[lie] * liars, Peer(), Peer(), Peer()))
    assert [fault for _, fault in swarm.scored] == ["bad_base"] * liars
    assert {peer for peer, _ in swarm.scored} == {PeerId(f"peer-{index}") for index in range(liars)}


def test_another_size_than_the_configuration_implies_is_refused_before_a_piece_comes(tmp_path: Path) -> None:
    swarm = joined(Swarm(tmp_path, Peer(WEIGHTS * 2, messages=9), Peer(), Peer()))
    assert swarm.scored == [(PeerId("peer-0"), "bad_manifest")]
    assert swarm.counts["base_fetched_bytes"] == len(WEIGHTS) + len(pack_files(BaseFiles("fp32", FILES)))


def test_a_fetch_that_breaks_off_goes_on_from_another_donor(tmp_path: Path) -> None:
    swarm = joined(Swarm(tmp_path, Peer(pieces=1, messages=9), Peer(pieces=2, messages=8), Peer()))
    assert not swarm.scored
    assert [swarm.asked(index)[-1] for index in range(3)] == [("base", 0), ("base", 1), ("base", 2)]


def test_a_configuration_that_the_others_do_not_have_is_not_taken(tmp_path: Path) -> None:
    other = Peer(files={"config.json": json.dumps({"numel": NUMEL, "rms_norm_eps": 0.5}).encode()}, messages=9)
    swarm = joined(Swarm(tmp_path, other, Peer(), Peer()))
    config = json.loads((swarm.run_dir / base_folder.FOLDER / "config.json").read_bytes())
    assert config == {"numel": NUMEL} and not swarm.scored, "who of them is right nobody can prove"


def test_of_two_that_disagree_neither_is_proven_a_liar_and_the_base_is_the_swarms(tmp_path: Path) -> None:
    other = Peer(files={"config.json": json.dumps({"numel": NUMEL, "rms_norm_eps": 0.5}).encode()})
    swarm = joined(Swarm(tmp_path, Peer(messages=9), other))
    assert (swarm.run_dir / base_folder.FOLDER / "config.json").read_bytes() == FILES["config.json"]
    assert not swarm.scored and swarm.journal[0]["witnesses"] == 0


def test_files_that_most_have_and_that_make_no_model_here_speak_against_nobody(tmp_path: Path) -> None:
    newer = Peer(files={"config.json": b'{"no": 1}'})
    swarm = failed(Swarm(tmp_path, newer, newer), NoDonor, "makes no model")
    assert not swarm.scored


@pytest.mark.parametrize(
    "peer",
    [
        Peer(files={"config.json": b'{"no": 1}'}),
        Peer(files={"config.json": b"[]"}),
        Peer(files={"config.json": b'{"numel": 100000000000000}'}),
        Peer(files={"config.json": b'{"numel": 6143}'}),
        Peer(bytes(len(WEIGHTS))),
    ],
)
def test_a_liar_alone_leaves_nothing_behind(tmp_path: Path, peer: Peer) -> None:
    swarm = failed(Swarm(tmp_path, peer), NoDonor, "/nowhere cannot be loaded; and no peer could hand over the base")
    assert swarm.counts["base_fetched"] == 0
    assert len(peer.asked) < 30, "it is not asked without end"


def test_a_configuration_that_lies_about_its_size_does_not_blame_the_honest(tmp_path: Path) -> None:
    """It has no witness against it here: the others do not answer for their files."""
    liar = Peer(bytes(4 * 100), files={"config.json": b'{"numel": 100}'}, messages=9)
    honest = Peer()
    swarm = Swarm(tmp_path, liar, honest)
    fetch = swarm.fetch

    async def silent_files(record: PeerRecord, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        if record.peer_id == "peer-1" and request.kind == "base_files" and not honest.asked:
            honest.asked.append(request)
            raise LinkError("busy")
        async for message in fetch(record, request):
            yield message

    swarm.fetch = silent_files  # type: ignore[method-assign]
    joined(swarm)
    assert swarm.scored == [(PeerId("peer-0"), "bad_base")]


def test_a_donor_that_cannot_hand_it_over_is_passed_over(tmp_path: Path) -> None:
    errors = (RunMismatch("its configuration alone does not rebuild it"), VersionMismatch("too old"), LinkError("busy"))
    swarm = joined(Swarm(tmp_path, *(Peer(error=error, messages=9) for error in errors), Peer()))
    assert not swarm.scored


def test_a_full_disk_is_no_donors_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(base_folder.os, "pwrite", full)
    swarm = failed(Swarm(tmp_path, Peer(), Peer()), StorageError, "the disk is full; free some space")
    assert swarm.asked(1) == [("base_files", 0)] and not swarm.scored


def test_a_base_that_fewer_have_is_not_asked_for(tmp_path: Path) -> None:
    other = Peer(bytes(len(WEIGHTS)), digest="ab" * 32, messages=10**6)
    swarm = joined(Swarm(tmp_path, other, Peer(), Peer()))
    assert not other.asked and not swarm.scored


@pytest.mark.parametrize("liars", [1, 3])
def test_the_base_that_the_run_names_is_taken_whatever_others_announce(tmp_path: Path, liars: int) -> None:
    lies = [Peer(bytes(len(WEIGHTS)), digest=blake3(bytes(len(WEIGHTS))).hexdigest(), messages=9) for _ in range(liars)]
    swarm = joined(Swarm(tmp_path, *lies, Peer(), named=DIGEST))
    assert not any(lie.asked for lie in lies) and swarm.journal[0]["digest"] == DIGEST
    failed(Swarm(tmp_path / "b", *lies, named=DIGEST), NoDonor, "no trainer has the one that the run names")
    masked = Peer(bytes(len(WEIGHTS)), messages=9)  # says it has the named one
    assert joined(Swarm(tmp_path / "c", masked, Peer(), named=DIGEST)).scored == [(PeerId("peer-0"), "bad_base")]


def test_a_swarm_of_one_and_a_swarm_without_trainers_say_what_is_missing(tmp_path: Path) -> None:
    failed(Swarm(tmp_path, Peer(), expect_peers=False), BaseMissing, "/nowhere cannot be loaded$")
    failed(Swarm(tmp_path / "b"), NoDonor, r"no trainer is there\): put it in its place")
