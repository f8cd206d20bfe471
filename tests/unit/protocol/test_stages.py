from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerloom.protocol import stage_effects as effects
from peerloom.protocol import stage_events as events
from peerloom.protocol.errors import InvalidTransition
from peerloom.protocol.ledger import Ledger, Microbatch
from peerloom.protocol.spec_pipeline import PipelineSpec
from peerloom.protocol.stage_moves import MAX_UPSTREAM
from peerloom.protocol.stage_window import REACH
from peerloom.protocol.stages import StageMachine
from peerloom.protocol.types import PeerId
from tests.unit.protocol.stage_fabric import Fabric, name, pipeline

UP, DOWN = PeerId("up"), PeerId("down")


def m(index: int, lane: int = 0) -> Microbatch:
    return Microbatch(lane, index)


def spec(stages: int = 4, **keys: object) -> PipelineSpec:
    return PipelineSpec(stages=stages, **keys)  # type: ignore[arg-type]


def test_the_first_of_two_stages_runs_one_forward_one_backward() -> None:
    machine = StageMachine(spec(2), 0, limit=4)
    sent = [*machine.handle(events.DownstreamOpened(DOWN, 8), 0.0)]
    assert sent == [effects.RunForward(m(0), 0, 0)]
    assert machine.handle(events.ForwardDone(m(0)), 0.0) == [
        effects.SendActivation(DOWN, m(0), 0),
        effects.RunForward(m(1), 0, 1),
    ]
    assert machine.handle(events.ForwardDone(m(1)), 0.0) == [effects.SendActivation(DOWN, m(1), 0)]  # window of 2
    assert machine.handle(events.GradientReceived(DOWN, m(0), 0, 5.0), 0.0) == [
        effects.KeepGradient(DOWN, m(0)),
        effects.RunBackward(m(0)),
    ]
    assert machine.handle(events.BackwardDone(m(0)), 0.0) == [effects.Forget(m(0)), effects.RunUpdate(0, 1)]
    assert machine.handle(events.UpdateDone(0), 0.0) == [
        effects.ReportTrained(0, 5.0),
        effects.RunForward(m(2), 1, 2),
    ]


def test_the_last_stage_answers_with_a_gradient_and_gives_credit() -> None:
    machine = StageMachine(spec(2), 1)
    (credit,) = machine.handle(events.UpstreamOpened(UP), 0.0)
    assert credit == effects.SendCredit(UP, 4)  # a window of the stage before, and two
    assert machine.handle(events.ActivationReceived(UP, m(0), 7), 0.0) == [
        effects.KeepActivation(m(0)),
        effects.RunForward(m(0), 0, 0),
    ]
    assert machine.handle(events.ForwardDone(m(0), 2.5), 0.0) == [
        effects.SendGradient(UP, m(0), 7, 2.5),
        effects.RunUpdate(0, 1),
    ]
    assert machine.handle(events.AnswerSent(UP), 0.0) == [effects.SendCredit(UP, 1)]


@pytest.mark.parametrize("parts", [1, 3])
def test_delays_are_those_of_the_paper_once_warm(parts: int) -> None:
    stages, updates = 4, 12
    fabric = pipeline(spec(stages, microbatches=parts), limit=updates, seed=3)
    fabric.run()
    for stage in range(stages):
        host = fabric.hosts[name(stage)]
        lag = stages - 1 - stage
        assert host.versions == [(u, max(0, u - lag)) for u in range(updates) for _ in range(parts)]
        assert host.trained == Counter({m(index): 1 for index in range(updates * parts)})
        assert host.machine.applied == updates


def test_synchronous_stages_have_no_delay_and_keep_to_the_window() -> None:
    fabric = pipeline(spec(3, microbatches=4, schedule="sync"), limit=5, seed=1)
    most = Counter[PeerId]()
    while fabric.step():
        for peer, host in fabric.hosts.items():
            most[peer] = max(most[peer], sum(f.phase != "queued" for f in host.machine._flights.values()))
    for stage in range(3):
        host = fabric.hosts[name(stage)]
        assert [version for _, version in host.versions] == [u for u in range(5) for _ in range(4)]
        assert most[host.peer] <= min(4, 3 - stage)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["async", "sync"]),
    st.integers(0, 2**32),
    st.integers(0, 2),
)
def test_whatever_comes_when_and_however_often_the_versions_are_the_same(
    stages: int, parts: int, schedule: str, seed: int, held_out: int
) -> None:
    table = spec(stages, microbatches=parts, schedule=schedule, eval_every=3)
    fabric = pipeline(table, limit=7, seed=seed, held_out=held_out)
    frames = (events.GradientReceived, events.ScoreReceived)
    fabric.twice = lambda event: isinstance(event, frames) and fabric.rng.random() < 0.3
    fabric.run()
    for stage in range(stages):
        host = fabric.hosts[name(stage)]
        expected = [(u, max(0, u - table.lag(stage))) for u in range(7) for _ in range(parts)]
        assert sorted(host.versions) == expected
        assert host.trained == Counter({m(index): 1 for index in range(7 * parts)})
        assert not host.blamed
        assert len(host.held_out) == (3 if held_out else 0)  # at the start, after 3 and 6


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 2), st.integers(0, 2**32))
def test_links_that_break_and_come_back_lose_nothing_and_count_nothing_twice(
    stages: int, parts: int, seed: int
) -> None:
    fabric = pipeline(spec(stages, microbatches=parts), limit=12, seed=seed)
    while fabric.step():
        if fabric.rng.random() < 0.05:
            stage = fabric.rng.randrange(stages - 1)
            fabric.cut(name(stage), name(stage + 1))
            fabric.link(name(stage), name(stage + 1))
    for stage in range(stages):
        host = fabric.hosts[name(stage)]
        assert host.trained == Counter({m(index): 1 for index in range(12 * parts)})
        assert not host.blamed


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(0, 3), st.integers(1, 2), st.integers(0, 2**32), st.integers(30, 300))
def test_a_stage_that_moves_to_its_copy_is_trained_on_what_it_had_not_and_nobody_counts_twice(
    stages: int, which: int, parts: int, seed: int, killed_after: int
) -> None:
    stage = which % stages
    fabric = pipeline(spec(stages, microbatches=parts), limit=15, seed=seed)
    for step in range(killed_after):
        fabric.step()
        if step % 40 == 20:
            fabric.feed(name(stage), events.SaveWanted())
    dead = fabric.kill(name(stage))
    while fabric.step():
        continue
    version, ledger = dead.saved
    new = fabric.add(stage, version=version, ledger=Ledger(ledger))
    fabric.run()
    everything = {m(index) for index in range(15 * parts)}
    for k in range(stages):
        host = fabric.hosts[name(k)]
        assert set(host.trained.values()) <= {1}, "none counted twice"
        assert not host.blamed
        if k != stage:
            assert set(host.trained) == everything
    behind = Ledger(ledger)
    assert not any(microbatch in behind for microbatch in new.trained)
    if stage == 0:
        assert {i for i in everything if i in behind} | set(new.trained) == everything


def test_one_that_waits_for_its_update_counts_once_whatever_runs_meanwhile() -> None:
    """What a stage that was taken over sends does not count, and turns over the answers kept; then a link breaks."""
    trained = Ledger({9: (1000, [])})
    machine = StageMachine(spec(2, microbatches=2), 1, first_version=50, ledger=trained)
    machine.handle(events.UpstreamOpened(UP), 0.0)

    def send(microbatch: Microbatch) -> list[effects.StageEffect]:
        out = machine.handle(events.ActivationReceived(UP, microbatch, 0), 0.0)
        runs = [effect for effect in out if isinstance(effect, effects.RunForward)]
        out += [e for run in runs for e in machine.handle(events.ForwardDone(run.microbatch, 1.0), 0.0)]
        return out + machine.handle(events.AnswerSent(UP), 0.0)

    assert effects.RunForward(m(0, lane=7), 50, 50) in send(m(0, lane=7))
    for index in range(100):
        assert effects.RunForward(m(index, lane=9), 50, None) in send(m(index, lane=9))
    machine.handle(events.UpstreamLost(UP), 0.0)
    machine.handle(events.UpstreamOpened(UP), 0.0)
    again = send(m(0, lane=7))
    assert effects.SendGradient(UP, m(0, lane=7), 0, 1.0) in again
    assert not any(isinstance(effect, effects.RunForward | effects.RunUpdate) for effect in again)
    assert effects.RunUpdate(50, 51) in send(m(1, lane=7))
    assert len(machine._results) == machine._kept, "and no more are kept for it"


@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_the_members_of_a_large_update_are_all_kept(schedule: str) -> None:
    fabric = pipeline(spec(3, microbatches=40, schedule=schedule), limit=4, seed=2)
    while fabric.step():
        for host in fabric.hosts.values():
            assert host.machine._unledgered <= set(host.machine._results)
    for host in fabric.hosts.values():
        assert host.trained == Counter({m(index): 1 for index in range(160)})
        assert not host.machine._unledgered


def test_two_nodes_of_one_stage_share_the_microbatches() -> None:
    fabric = Fabric(spec(3), limit=40, seed=5)
    fabric.add(0)
    fabric.add(1, 0)
    fabric.add(1, 1)
    fabric.add(2)
    fabric.run()
    left, right = (fabric.hosts[name(1, replica)].trained for replica in (0, 1))
    assert not left.keys() & right.keys()
    assert left.keys() | right.keys() == {m(index) for index in range(40)}
    assert min(len(left), len(right)) >= 10


def test_each_goes_to_the_node_that_owes_the_fewest() -> None:
    machine = StageMachine(spec(4), 0)
    machine.handle(events.DownstreamOpened(PeerId("a"), 8), 0.0)
    machine.handle(events.DownstreamOpened(PeerId("b"), 8), 0.0)
    out = [effect for index in range(4) for effect in machine.handle(events.ForwardDone(m(index)), 0.0)]
    sent = [(e.peer, e.microbatch.index) for e in out if isinstance(e, effects.SendActivation)]
    assert sent == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
    out = machine.handle(events.DownstreamLost(PeerId("a")), 1.0)
    assert [e for e in out if isinstance(e, effects.SendActivation)] == [
        effects.SendActivation(PeerId("b"), m(0), 0),
        effects.SendActivation(PeerId("b"), m(2), 0),
    ]


def test_without_credit_nothing_is_sent() -> None:
    machine = StageMachine(spec(3), 0)
    machine.handle(events.DownstreamOpened(DOWN, 1), 0.0)
    machine.handle(events.ForwardDone(m(0)), 0.0)
    assert not any(isinstance(e, effects.SendActivation) for e in machine.handle(events.ForwardDone(m(1)), 0.0))
    out = machine.handle(events.CreditReceived(DOWN, 1), 0.0)
    assert effects.SendActivation(DOWN, m(1), 0) in out


def test_frames_that_break_the_protocol_are_blamed() -> None:
    machine = StageMachine(spec(2), 0)
    machine.handle(events.DownstreamOpened(DOWN, 8), 0.0)
    machine.handle(events.ForwardDone(m(0)), 0.0)

    def fault(event: events.StageEvent) -> str:
        (blame,) = [e for e in machine.handle(event, 0.0) if isinstance(e, effects.Blame)]
        return blame.detail

    assert "version 0 and answered with 3" in fault(events.GradientReceived(DOWN, m(0), 3, 1.0))
    assert "not under way" in fault(events.GradientReceived(DOWN, m(9), 0, 1.0))
    assert "other kind" in fault(events.ScoreReceived(DOWN, m(0), 0, 1.0))
    last = StageMachine(spec(2), 1)
    last.handle(events.UpstreamOpened(UP), 0.0)
    for index in range(4):
        last.handle(events.ActivationReceived(UP, m(index), 0), 0.0)
    (blame,) = [e for e in last.handle(events.ActivationReceived(UP, m(9), 0), 0.0) if isinstance(e, effects.Blame)]
    assert blame.fault == "stage_flood"


def taken(machine: StageMachine, microbatch: Microbatch, version: int) -> str:
    """What the sender of an activation is blamed for, nothing where it is taken."""
    out = machine.handle(events.ActivationReceived(UP, microbatch, version), 0.0)
    blames = [e for e in out if isinstance(e, effects.Blame)]
    assert all((blame.peer, blame.fault) == (UP, "bad_stage_frame") for blame in blames)
    return " ".join(blame.detail for blame in blames)


def test_an_activation_out_of_its_link_s_window_is_blamed_and_not_begun() -> None:
    machine = StageMachine(spec(2), 1, held_out=64)
    machine.handle(events.UpstreamOpened(UP), 0.0)
    assert not taken(machine, m(100), 50), "a link may begin anywhere"
    load = machine.load
    assert f"version {51 + REACH}, more than {REACH} from version 50" in taken(machine, m(101), 51 + REACH)
    assert f"more than {REACH} after 100, the last of its lane" in taken(machine, m(101 + REACH), 50)
    assert "more than" in taken(machine, m(1 << 52), 50)
    assert machine.load == load
    assert not taken(machine, m(100 + REACH), 50 + REACH), "others had all between"
    assert "more than" in taken(machine, m(101 + REACH), 49), "older than anything under way"
    assert not taken(machine, m(3), 50), "one that is run again"
    assert not taken(machine, m(1 << 40, lane=9), 50), "another lane"
    assert not taken(machine, Microbatch(0, 1 << 30, True), 50), "held-out ones are numbered apart"
    assert "more than" in taken(machine, Microbatch(0, (1 << 30) + REACH + 1, True), 50)
    machine.handle(events.UpstreamLost(UP), 0.0)
    machine.handle(events.UpstreamOpened(UP), 0.0)
    assert not taken(machine, m(1 << 41), 0), "a node that begins anew"


def test_a_run_that_ends_has_a_last_microbatch() -> None:
    machine = StageMachine(spec(2, microbatches=2), 1, held_out=2, updates=10)
    machine.handle(events.UpstreamOpened(UP), 0.0)
    assert not taken(machine, m(19), 0) and not taken(machine, Microbatch(0, 40, True), 0)
    assert "a lane of this run has 20" in taken(machine, m(20), 0)


def test_of_two_that_owe_as_little_none_is_left_out() -> None:
    """Else one that is always idle would be far behind when it is needed."""
    machine = StageMachine(spec(2), 0, limit=6)
    sent: list[PeerId] = []
    todo: deque[events.StageEvent] = deque(events.DownstreamOpened(PeerId(peer), 1000) for peer in "ab")
    while todo:
        for effect in machine.handle(todo.popleft(), 0.0):
            match effect:
                case effects.RunForward(microbatch):
                    todo.append(events.ForwardDone(microbatch))
                case effects.SendActivation(peer, microbatch, version):
                    sent.append(peer)
                    todo.appendleft(events.GradientReceived(peer, microbatch, version, 1.0))  # before the next is sent
                case effects.RunBackward(microbatch):
                    todo.append(events.BackwardDone(microbatch))
                case effects.RunUpdate(update):
                    todo.append(events.UpdateDone(update))
    assert sent == ["a", "b"] * 3


OTHER = PeerId("other")


def replies(out: list[effects.StageEffect]) -> list[tuple[PeerId, int]]:
    return [(e.peer, e.version) for e in out if isinstance(e, effects.SendGradient)]


def test_all_who_sent_a_microbatch_get_its_one_answer() -> None:
    """The stage before sent it again by another way when a link broke, and whom it had it from waits too."""
    machine = StageMachine(spec(3), 1)
    for event in (events.DownstreamOpened(DOWN, 8), events.UpstreamOpened(UP), events.UpstreamOpened(OTHER)):
        machine.handle(event, 0.0)
    machine.handle(events.ActivationReceived(UP, m(0), 3), 0.0)
    machine.handle(events.ForwardDone(m(0)), 0.0)
    assert not machine.handle(events.ActivationReceived(OTHER, m(0), 5), 0.0)[1:], "not begun again"
    machine.handle(events.GradientReceived(DOWN, m(0), 0, 1.0), 0.0)
    assert replies(machine.handle(events.BackwardDone(m(0)), 0.0)) == [(UP, 3), (OTHER, 5)]


def test_of_those_who_sent_a_microbatch_only_the_linked_are_answered() -> None:
    machine = StageMachine(spec(2), 1)
    machine.handle(events.UpstreamOpened(UP), 0.0)
    machine.handle(events.UpstreamOpened(OTHER), 0.0)
    machine.handle(events.ActivationReceived(UP, m(9), 0), 0.0)  # under way, so that the next is queued
    machine.handle(events.ActivationReceived(UP, m(0), 3), 0.0)
    machine.handle(events.ActivationReceived(OTHER, m(0), 5), 0.0)
    assert not machine.handle(events.UpstreamLost(OTHER), 0.0), "one that another waits for is not dropped"
    machine.handle(events.ForwardDone(m(9), 1.0), 0.0)
    machine.handle(events.UpdateDone(0), 0.0)
    assert replies(machine.handle(events.ForwardDone(m(0), 1.0), 0.0)) == [(UP, 3)]


def test_who_sends_what_another_has_sent_takes_no_credit_from_it() -> None:
    machine, credit = StageMachine(spec(3), 1), Counter[PeerId]()

    def feed(event: events.StageEvent) -> None:
        for effect in machine.handle(event, 0.0):
            if isinstance(effect, effects.SendCredit):
                credit[effect.peer] += effect.count
            elif isinstance(effect, effects.SendGradient):
                feed(events.AnswerSent(effect.peer))

    def send(peer: PeerId, microbatch: Microbatch) -> None:
        credit[peer] -= 1
        feed(events.ActivationReceived(peer, microbatch, 0))

    for event in (events.DownstreamOpened(DOWN, 8), events.UpstreamOpened(UP), events.UpstreamOpened(OTHER)):
        feed(event)
    whole = credit[UP]
    send(UP, m(9))
    send(UP, m(0))
    send(OTHER, m(0))
    send(OTHER, m(0))
    for microbatch in (m(9), m(0)):
        feed(events.ForwardDone(microbatch))
    for microbatch in (m(9), m(0)):
        feed(events.GradientReceived(DOWN, microbatch, 0, 1.0))
        feed(events.BackwardDone(microbatch))
        feed(events.UpdateDone(machine.applied))
    send(UP, m(9))  # which is answered at once
    assert credit == {UP: whole, OTHER: whole}


def test_who_reads_no_answers_is_made_no_more_of_them() -> None:
    machine, made, sent = StageMachine(spec(2), 1), 0, 0
    (credit,) = [e for e in machine.handle(events.UpstreamOpened(UP), 0.0) if isinstance(e, effects.SendCredit)]
    for index in range(500):
        out = machine.handle(events.ActivationReceived(UP, m(index), 0), 0.0)
        if blames := [effect for effect in out if isinstance(effect, effects.Blame)]:
            break
        sent += 1
        made += len(replies(machine.handle(events.ForwardDone(m(index), 1.0), 0.0)))
        machine.handle(events.UpdateDone(machine.applied), 0.0)
    assert (made, sent) == (credit.count, credit.count)
    assert [blame.fault for blame in blames] == ["stage_flood"], "it was not let send so many"


class Sender:
    """A node of the stage before, which sends as much as it is let, over links as new as it likes."""

    def __init__(self, machine: StageMachine, name: str, indices: Iterator[int], held_out: bool) -> None:
        self.machine, self.peer, self.indices, self.held_out = machine, PeerId(name), indices, held_out
        self.credit = 0

    def open(self) -> None:
        self.credit = 0
        self.feed(events.UpstreamOpened(self.peer))

    def lose(self) -> None:
        self.feed(events.UpstreamLost(self.peer))

    def feed(self, event: events.StageEvent) -> list[Microbatch]:
        """Runs all forward passes that follow, and reads the answers; returns what was passed on."""
        begun, todo = [], deque([event])
        while todo:
            for effect in self.machine.handle(todo.popleft(), 0.0):
                match effect:
                    case effects.SendCredit(self.peer, count):
                        self.credit += count
                    case effects.RunForward(microbatch):
                        begun.append(microbatch)
                        todo.append(events.ForwardDone(microbatch))
                    case effects.SendGradient(peer) | effects.SendScore(peer):
                        todo.append(events.AnswerSent(peer))
        return begun

    def send(self, most: int = 500) -> int:
        """Sends until it may no more; how many passes that made."""
        begun = 0
        while self.credit and most and (index := next(self.indices, None)) is not None:
            self.credit, most = self.credit - 1, most - 1
            microbatch = Microbatch(0, index, self.held_out)
            begun += len(self.feed(events.ActivationReceived(self.peer, microbatch, 0)))
        return begun


@pytest.mark.parametrize("held_out", [False, True])
def test_what_does_not_count_fills_no_memory_and_keeps_no_other_sender_back(held_out: bool) -> None:
    """The next stage answers none, and the stage before sends what was trained on, or held-out ones, for ever."""
    trained = Ledger()
    for index in range(5000):
        trained.add(m(index))
    indices = iter(range(5000))
    machine = StageMachine(spec(3), 1, held_out=4, ledger=trained)
    machine.handle(events.DownstreamOpened(DOWN, 0), 0.0)
    hostile, honest = Sender(machine, "hostile", indices, held_out), Sender(machine, "honest", indices, held_out)
    hostile.open()
    window = hostile.credit
    assert hostile.send() == window and machine.load == window
    for _ in range(5):
        hostile.lose()
        hostile.open()
        assert hostile.send() == 0, "a new link is no new window"
        assert machine.load == 2 * window, "a window in hand, and one queued"
    honest.open()
    assert honest.send() == window, "a stage that was taken over runs what was in flight again"
    for number in range(2, 200):
        other = Sender(machine, f"sybil-{number}", indices, held_out)
        other.open()
        other.send()
        other.lose()
    assert machine.load <= (MAX_UPSTREAM + 2) * window


def test_what_does_not_count_goes_on_as_it_is_answered() -> None:
    trained = Ledger()
    for index in range(100):
        trained.add(m(index))
    machine = StageMachine(spec(3), 1, ledger=trained)
    machine.handle(events.DownstreamOpened(DOWN, 1000), 0.0)
    sender = Sender(machine, "up", iter(range(100)), held_out=False)
    sender.open()
    begun, answered = sender.send(), 0
    while answered < begun:
        out = sender.machine.handle(events.GradientReceived(DOWN, m(answered), 0, 1.0), 0.0)
        assert effects.RunBackward(m(answered)) in out
        begun += len(sender.feed(events.BackwardDone(m(answered)))) + sender.send()
        answered += 1
    assert answered == 100


def test_who_takes_and_never_answers_is_given_up() -> None:
    machine = StageMachine(spec(2, answer_s=10.0), 0)
    machine.handle(events.DownstreamOpened(DOWN, 8), 0.0)
    machine.handle(events.ForwardDone(m(0)), 1.0)
    assert not any(isinstance(e, effects.Blame) for e in machine.handle(events.Ticked(), 10.0))
    machine.handle(events.DownstreamBeat(DOWN, True), 10.5)  # it waits for others itself
    machine.handle(events.DownstreamBeat(DOWN, False), 11.0)
    assert not any(isinstance(e, effects.Blame) for e in machine.handle(events.Ticked(), 20.0))
    blames = [e for e in machine.handle(events.Ticked(), 21.5) if isinstance(e, effects.Blame)]
    assert [blame.fault for blame in blames] == ["stage_unanswered"]
    assert machine.waiting_for == 1


def test_work_that_ends_without_having_begun_is_a_bug_told_with_its_story() -> None:
    machine = StageMachine(spec(2), 1)
    with pytest.raises(InvalidTransition, match="before it: .*BackwardDone"):
        machine.handle(events.BackwardDone(m(3)), 0.0)


@given(st.permutations(list(range(12))))
def test_a_ledger_knows_what_it_took_in_any_order(order: list[int]) -> None:
    ledger = Ledger()
    for count, index in enumerate(order):
        assert m(index) not in ledger
        ledger.add(m(index))
        assert all((m(i) in ledger) == (i in order[: count + 1]) for i in range(14))
        ledger = Ledger(ledger.entries())
    assert ledger.entries() == {0: (12, [])}
