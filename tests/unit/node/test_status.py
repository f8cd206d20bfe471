"""The swarm as a user sees it: rows, totals, health, JSON and the table."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from peerloom.node.failures import DEGRADED, EMPTY, OK
from peerloom.node.status import LastHeard, health_of, problems_of, rows_of, to_json, totals_of
from peerloom.node.status_table import columns_for, duration, render, short, summary
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord

NOW = 1_700_000_000.0


def status(name: str, *, age_s: float = 1.0, partners: dict[str, int] | None = None, **fields: Any) -> NodeStatus:
    record = PeerRecord(
        peer_id=PeerId("12D3KooW" + name),
        name=name,
        cert_der=b"",
        version="0.1.0",
        addresses=("127.0.0.1:1",),
        started_at=NOW - 100,
        issued_at=NOW - age_s,
        **{"role": "trainer", "instance": "a", "state": "training", **fields},
    )
    return NodeStatus(record=record, partners={PeerId(peer): count for peer, count in (partners or {}).items()})


def test_trainers_come_first_then_names() -> None:
    rows = rows_of([status("seed", role="bootstrap", state="serving"), status("b"), status("a")], NOW)
    assert [row.name for row in rows] == ["a", "b", "seed"]


@pytest.mark.parametrize(("age_s", "silent_s"), [(0.0, None), (15.0, None), (15.5, 15.5), (-2.0, None)])
def test_a_node_is_silent_once_its_record_is_older_than_a_renewal(age_s: float, silent_s: float | None) -> None:
    (row,) = rows_of([status("a", age_s=age_s)], NOW)
    assert (row.silent_s, row.heartbeat_age_s) == (silent_s, max(0.0, age_s))


def test_totals_leave_out_the_silent_where_they_say_nothing_of_now() -> None:
    rows = rows_of(
        [
            status("a", loss=2.0, tokens=10, tokens_per_s=5.0),
            status("b", loss=2.25, tokens=20, tokens_per_s=6.0, state="done"),
            status("c", loss=9.0, tokens=40, tokens_per_s=7.0, age_s=20),
            status("seed", role="bootstrap", state="serving"),
        ],
        NOW,
    )
    totals = totals_of(rows)
    assert (totals.nodes, totals.trainers, totals.training, totals.silent) == (4, 3, 2, 1)
    assert (totals.tokens, totals.tokens_per_s) == (70, 11.0)
    assert (totals.loss_min, totals.loss_max, totals.loss_spread) == (2.0, 2.25, 0.25)


@pytest.mark.parametrize(
    ("statuses", "health"),
    [
        ([], EMPTY),
        ([status("seed", role="bootstrap", state="serving")], EMPTY),
        ([status("a"), status("b", state="done"), status("c", state="exchanging"), status("d", state="seeking")], OK),
        ([status("a"), status("seed", role="bootstrap", state="serving")], OK),
        ([status("a"), status("b", state="fetching")], DEGRADED),
        ([status("a"), status("b", age_s=16)], DEGRADED),
        ([status("a", age_s=16)], DEGRADED),
        ([status("a"), status("seed", role="bootstrap", state="serving", age_s=16)], DEGRADED),
    ],
)
def test_health(statuses: list[NodeStatus], health: int) -> None:
    assert health_of(rows_of(statuses, NOW)) == health


def test_a_node_that_is_gone_stays_listed() -> None:
    heard = LastHeard()
    heard.observe([status("a"), status("b", round=7)])
    (row,) = [row for row in rows_of(heard.observe([status("a", age_s=-60)]), NOW + 60) if row.name == "b"]
    assert (row.silent_s, row.round) == (61.0, 7)


@pytest.mark.parametrize("state", ["draining", "done"])
def test_a_node_that_said_goodbye_is_forgotten(state: str) -> None:
    heard = LastHeard()
    heard.observe([status("a"), status("b", state=state)])
    assert [each.record.name for each in heard.observe([status("a")])] == ["a"]


def test_a_node_that_leaves_in_order_is_no_problem() -> None:
    rows = rows_of([status("a"), status("b", state="draining", reason="stopping on request")], NOW)
    assert problems_of(rows, totals_of(rows)) == []


def test_a_node_that_was_silent_for_an_hour_is_forgotten() -> None:
    heard = LastHeard()
    heard.observe([status("a"), status("b")])
    assert len(heard.observe([status("a", age_s=-3500)])) == 2
    assert len(heard.observe([status("a", age_s=-3700)])) == 1


def test_an_old_record_does_not_hide_a_fresher_answer() -> None:
    heard = LastHeard()
    heard.observe([status("a", age_s=1, round=9)])
    (kept,) = heard.observe([status("a", age_s=8, round=5)])
    assert kept.record.round == 9


def test_a_record_keeps_the_partners_an_answer_told() -> None:
    heard = LastHeard()
    heard.observe([status("a", age_s=5, partners={"x": 2})])
    (kept,) = heard.observe([status("a", age_s=1, round=3)])
    assert (kept.record.round, kept.partners) == (3, {"x": 2})


def test_a_restarted_node_starts_anew() -> None:
    heard = LastHeard()
    heard.observe([status("a", round=9, partners={"x": 2})])
    (kept,) = heard.observe([status("a", round=1, instance="b", age_s=3)])
    assert (kept.record.round, kept.partners) == (1, {})


def test_json_is_the_documented_schema() -> None:
    spec = RunSpec()
    said: dict[str, Any] = {"loss": 2.5, "round": 3, "step": 60, "tokens": 100, "sketch": (3.0, 4.0)}
    said |= {"last_partner": "12D3KooWx", "last_met_at": NOW - 4}
    rows = rows_of([status("a", **said, partners={"x": 2, "y": 0})], NOW)
    assert json.loads(json.dumps(to_json(spec, spec.run_id, rows, NOW))) == {
        "schema": 1,
        "at": NOW,
        "health": "healthy",
        "problems": [],
        "run": {"id": spec.run_id, "name": "stdlib-llama", "method": "gasloc"},
        "totals": {
            "nodes": 1,
            "trainers": 1,
            "training": 1,
            "silent": 0,
            "tokens_per_s": 0,
            "tokens": 100,
            "token_budget": None,
            "left_s": None,
            "loss_min": 2.5,
            "loss_max": 2.5,
            "loss_spread": 0.0,
            "consensus_distance": None,
            "states_differ": None,
            "stages": {},
            "missing_stages": [],
        },
        "nodes": [
            {
                "peer_id": "12D3KooWa",
                "name": "a",
                "role": "trainer",
                "state": "training",
                "reason": "",
                "silent_s": None,
                "heartbeat_age_s": 1.0,
                "round": 3,
                "step": 60,
                "loss": 2.5,
                "tokens": 100,
                "tokens_per_s": 0.0,
                "up_bytes": 0,
                "down_bytes": 0,
                "partners": {"x": 2},
                "addresses": ["127.0.0.1:1"],
                "version": "0.1.0",
                "started_at": NOW - 100,
                "sketch": [3.0, 4.0],
                "reach": "unknown",
                "via": [],
                "relays": False,
                "where": "127.0.0.1",
                "stage": None,
                "stage_role": "",
                "up_bytes_per_s": 0.0,
                "down_bytes_per_s": 0.0,
                "last_partner": "12D3KooWx",
                "last_met_s": 4.0,
                "accuracy": None,
                "state_hash": "",
                "messages": 0,
            }
        ],
    }


def test_the_table_is_whole_at_80_columns() -> None:
    spec = RunSpec()
    rows = rows_of(
        [
            status("a-rather-long-name-for-a-node", round=123456, loss=10.123, tokens_per_s=123456,
                   up_bytes_per_s=9e11, down_bytes_per_s=8e11, last_partner="12D3KooWpartner7"),
            status("b", age_s=100, reason="the model is being fetched"),
            status("c", state="restarting", reason="the training process died"),
        ],
        NOW,
    )
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(render(spec, spec.run_id, rows))
    text = out.getvalue()
    for part in ("123456", "10.123", "123k", "900G", "800G", "partner7", "silent", "restarting", "partner", "2 m"):
        assert part in text, f"{part} is cut from\n{text}"
    assert "b: silent for 100 s, last heard training (the model is being fetched)" in text
    assert "c: restarting: the training process died" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (9960, "10k"), (999_600, "1.0M"), (2.5e9, "2.5G"), (3e15, "3P")],
)
def test_short(amount: float, text: str) -> None:
    assert short(amount) == text


def test_the_header_names_the_distance_of_the_trainers_that_are_heard() -> None:
    near = [status("a", sketch=(3.0, 0.0)), status("b", sketch=(5.0, 0.0))]
    others = [status("c", sketch=(99.0, 0.0), age_s=60), status("d", sketch=(77.0, 0.0), role="bootstrap")]
    totals = totals_of(rows_of([*near, *others], NOW))
    assert totals.consensus_distance == pytest.approx((2 / 34) ** 0.5)
    assert "consensus distance 0.24" in summary(totals)
    assert "consensus" not in summary(totals_of(rows_of(near[:1], NOW)))


def test_a_wider_terminal_shows_more_and_every_column_has_its_place() -> None:
    rows = rows_of([status("a")], NOW)
    headings = {width: [column.heading for column in columns_for(rows, width)] for width in (40, 80, 200)}
    assert headings[40] == ["peer", "state", "round"]
    assert headings[80] == ["peer", "state", "round", "loss", "tok/s", "up/s", "down/s", "partner", "age"]
    assert headings[200] == [
        "peer", "state", "role", "round", "loss", "tok/s", "up/s", "down/s", "partner", "age", "link", "where",
        "version",
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRecord(PeerRecord):
    """A record as the other methods make it."""

    via: tuple[PeerId, ...] = ()
    stage: int = -1
    stage_role: str = "hosts"
    state_hash: str = ""
    messages: int = 0


def piped(name: str, **fields: Any) -> NodeStatus:
    plain = status(name).record
    return NodeStatus(record=MethodRecord(**{key: getattr(plain, key) for key in plain.__slots__} | fields))


def test_stages_hashes_and_relays_are_shown_where_records_have_them() -> None:
    rows = rows_of(
        [
            piped("a", stage=0, state_hash="aa"),
            piped("b", stage=0, state_hash="aa", via=("12D3KooWr",)),
            piped("c", stage=2, state_hash="bb"),
            piped("d", stage=3, stage_role="claims", state_hash="cc", messages=9),  # has seen more than the others
            piped("e"),
        ],
        NOW,
    )
    totals = totals_of(rows, cast(RunSpec, SimpleNamespace(
        method="pipeline", token_budget=0, pipeline=SimpleNamespace(stages=4))))
    assert (totals.stages, totals.missing_stages, totals.states_differ) == ({"0": 2, "2": 1}, [1, 3], 1)
    assert "stages 0:2 2:1, missing stages 1 3" in summary(totals)
    assert problems_of(rows, totals) == ["stage 1 is served by nobody", "stage 3 is served by nobody"]
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(render(RunSpec(), RunSpec().run_id, rows))
    assert "stage" in out.getvalue() and "relayed" in out.getvalue() and "direct" in out.getvalue()


def test_the_budget_tells_how_long_it_lasts() -> None:
    rows = rows_of([status("a", tokens=250, tokens_per_s=0.5), status("b", tokens=250, tokens_per_s=9.5)], NOW)
    totals = totals_of(rows, RunSpec(token_budget=36_500))
    assert (totals.token_budget, totals.left_s) == (36_500, 3600.0)
    assert "500 of 36k tokens, 1.0 h left" in summary(totals)
    assert totals_of(rows[:0], RunSpec(token_budget=5)).left_s is None


def test_what_is_wrong_is_said_in_sentences() -> None:
    rows = rows_of(
        [status("a"), status("b", state="stalled", reason="no step for 90 s"), status("c", age_s=40)], NOW
    )
    assert problems_of(rows, totals_of(rows)) == [
        "b is stalled: no step for 90 s", "c is silent for 40 s, last heard training"
    ]  # fmt: skip
    assert health_of(rows) == DEGRADED
    assert problems_of([], totals_of([])) == ["no trainer is there"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1 m"), (3570, "1.0 h"), (86_400, "1 d"), (9e9, "999 d")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
