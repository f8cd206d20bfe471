"""Two to six gossip machines on a lossy fabric: rounds end in time, commits agree, nothing deadlocks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from peerloom.protocol import events as ev
from tests.unit.protocol.gossip_fabric import Fabric

FORMS: list[dict[str, object]] = [
    {"pairing": "rendezvous"},
    {"pairing": "scheduled"},
    {"pairing": "rendezvous", "fragments": 3},
    {"pairing": "scheduled", "fragments": 2},
    {"pairing": "scheduled", "group_size": 4, "fragments": 2},
    {"pairing": "two_peer"},
    {"pairing": "ring"},
    {"pairing": "complete"},
    {"pairing": "regular", "degree": 3, "weights": "unit"},
    {"pairing": "hypercube", "group_size": 4},
    {"pairing": "base"},
    {"pairing": "exponential", "fragments": 2},
]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(2, 7),
    form=st.sampled_from(FORMS),
    loss=st.sampled_from([0.0, 0.02, 0.1, 0.4]),
    train_s=st.sampled_from([0.05, 3.0, 12.0]),
    silent=st.booleans(),
)
def test_every_round_ends_in_time_and_commits_agree(
    seed: int, count: int, form: dict[str, object], loss: float, train_s: float, silent: bool
) -> None:
    gone = frozenset({count - 1}) if silent else frozenset()
    fabric = Fabric(seed, count, 6, loss=loss, train_s=train_s, silent=gone, **form)  # type: ignore[arg-type]
    fabric.run()
    fabric.check_books()


@pytest.mark.parametrize("pairing", ["rendezvous", "scheduled"])
def test_without_loss_two_nodes_meet_in_every_round(pairing: str) -> None:
    fabric = Fabric(3, 2, 20, pairing=pairing, train_s=2.0)
    fabric.run()
    fabric.check_books()
    for node in fabric.nodes:
        assert node.counts["gossip_committed"] >= 19  # the last may find its peer gone
        assert node.counts["gossip_in_doubt"] == node.counts["gossip_broken"] == 0
        assert not node.scores


def test_rendezvous_meets_different_partners_and_seldom_goes_alone() -> None:
    fabric = Fabric(5, 5, 30)
    fabric.run()
    fabric.check_books()
    for node in fabric.nodes:
        partners = {end.partner for end in node.finished.values() if end.partner is not None}
        assert len(partners) >= 3
        assert node.counts["gossip_committed"] >= 22


@pytest.mark.parametrize("form", FORMS[3:], ids=lambda form: "-".join(map(str, form.values())))
def test_without_loss_all_edges_of_the_topology_are_kept(form: dict[str, object]) -> None:
    fabric = Fabric(4, 6, 8, train_s=2.0, **form)  # type: ignore[arg-type]
    fabric.run()
    fabric.check_books()
    for node in fabric.nodes:
        assert node.counts["gossip_broken"] == node.counts["gossip_in_doubt"] == 0
        alone = [place for place, end in node.finished.items() if end.partner is None and "topology" not in end.reason]
        assert all(place.round == 7 for place in alone), "in the last round a partner may be gone"


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_log(seed: int) -> None:
    logs = []
    for _ in range(2):
        fabric = Fabric(seed, 4, 5, loss=0.1)
        fabric.run()
        logs.append(fabric.log)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 50


class SwarmStory(RuleBasedStateMachine):
    """Hypothesis decides who is ready when, which message overtakes, which stream breaks, who drops out of sight."""

    @initialize(seed=st.integers(0, 999), count=st.integers(2, 5), form=st.sampled_from(FORMS))
    def begin(self, seed: int, count: int, form: dict[str, object]) -> None:
        self.fabric = Fabric(seed, count, 4, **form)  # type: ignore[arg-type]

    @rule(node=st.integers(0, 4))
    def trained_early(self, node: int) -> None:
        i = node % len(self.fabric.nodes)
        machine = self.fabric.nodes[i].machine
        if machine.state == "training" and self.fabric.in_training(i):
            place = self.fabric.nodes[i].next
            assert place is not None
            self.fabric.ready(i, place)

    @rule(pick=st.integers(0, 50))
    def overtake(self, pick: int) -> None:
        waiting = [(s, end) for s in self.fabric.streams.values() for end in s.ends if end.inbox]
        if waiting:
            self.fabric.deliver(*waiting[pick % len(waiting)])

    @rule(pick=st.integers(0, 50))
    def break_one(self, pick: int) -> None:
        whole = [s for s in self.fabric.streams.values() if not s.broken and all(end.open for end in s.ends)]
        if whole:
            self.fabric.sever(whole[pick % len(whole)])

    @rule(steps=st.integers(1, 5))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.fabric.step()

    @rule(node=st.integers(0, 4), missing=st.integers(0, 4))
    def view_changes(self, node: int, missing: int) -> None:
        i = node % len(self.fabric.nodes)
        seen = [ev.PeerSeen(peer, 0) for j, peer in enumerate(self.fabric.ids) if j not in (i, missing)]
        self.fabric.feed(i, ev.PeersChanged(tuple(seen)))

    @invariant()
    def consistent(self) -> None:
        for node in self.fabric.nodes:
            node.machine.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "fabric"):
            self.fabric.run()
            self.fabric.check_books()


TestSwarmStory = SwarmStory.TestCase
TestSwarmStory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
