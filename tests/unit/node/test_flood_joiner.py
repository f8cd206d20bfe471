"""Whom a late joiner asks about its donor's state, and what becomes of witnesses that cannot be asked at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peerloom.node import flood_joiner
from peerloom.node.flood_join import Fetched
from peerloom.node.flood_joiner import ASK_TURNS, FloodJoiner
from peerloom.node.virtual_time import run_virtual
from peerloom.protocol.errors import LinkError, MalformedMessage
from peerloom.protocol.flood_messages import Snapshot

OWN = b"own hash"
FETCHED = Fetched(Snapshot(()), b"", 0)


class Swarm:
    """Peers with a list of answers each, one a question; None: the question fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: list[bytes | None]) -> None:
        self.answers = {name: list(each) for name, each in answers.items()}
        self.asked: list[str] = []
        records = [SimpleNamespace(peer_id=name) for name in ("donor", *answers)]
        monkeypatch.setattr(flood_joiner, "swarm_peers", lambda context: records)
        monkeypatch.setattr(flood_joiner, "ask_hash", self.ask)

    async def ask(self, transport: object, peer: Any, heads: object) -> bytes:
        self.asked.append(peer.peer_id)
        answer = self.answers[peer.peer_id].pop(0)
        if answer is None:
            raise LinkError("there is a link already")
        return answer

    def confirmed(self) -> int:
        nobody: Any = SimpleNamespace(transport=None)
        joiner = FloodJoiner(nobody, nobody, nobody, nobody, nobody)
        donor: Any = SimpleNamespace(peer_id="donor")

        async def main() -> int:
            return await joiner._confirmed(donor, FETCHED, OWN)

        return run_virtual(main)


def test_two_that_say_the_same_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Swarm(monkeypatch, a=[OWN], b=[b""], c=[OWN], d=[OWN])
    assert swarm.confirmed() == 2 and swarm.asked == ["a", "b", "c"]


def test_a_witness_that_could_not_be_asked_is_asked_again_before_a_donor_is_taken_at_its_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm = Swarm(monkeypatch, a=[None, b"other"], b=[b""])
    with pytest.raises(MalformedMessage, match="1 other peers have another hash"):
        swarm.confirmed()
    assert swarm.asked == ["a", "b", "a"]


def test_where_nobody_can_tell_the_donor_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Swarm(monkeypatch).confirmed() == 0
    dead = Swarm(monkeypatch, a=[None] * ASK_TURNS)
    assert dead.confirmed() == 0 and len(dead.asked) == ASK_TURNS
