"""What Prometheus sees: clean exposition, names by convention, and the one table that lists them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from peerloom.node.counters import COUNTERS, RENAMED
from peerloom.node.metrics import exposition
from peerloom.node.status import rows_of, totals_of
from peerloom.protocol.flood_events import Refusal as FloodRefusal
from peerloom.protocol.messages import DeclineReason
from peerloom.protocol.relay_choice import FAULT_WEIGHTS
from peerloom.protocol.tunnel import Refusal as TunnelRefusal
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord

ROOT = Path(__file__).resolve().parents[3]
RECORD = PeerRecord(
    peer_id=PeerId("12D3KooWA"),
    name='a "quoted"\\ name',
    role="trainer",
    addresses=("127.0.0.1:1",),
    cert_der=b"x",
    version="0.1.0",
    instance="00",
    started_at=1.0,
    issued_at=2.0,
    state="training",
    round=7,
    tokens=1024,
    loss=2.5,
    sketch=(1.0, 2.0),
)
STATUS = NodeStatus(record=RECORD, counters=dict.fromkeys(COUNTERS, 3.0) | {"exchange_seconds_max": 0.5})
TOTALS = totals_of(rows_of([STATUS, NodeStatus(record=RECORD)], 2.0))
OPEN = "application/openmetrics-text; version=1.0.0"
SUFFIX = re.compile(r"_(seconds|bytes|ratio|nats|per_second|total|info)$")
UNITLESS = {  # counts of things that are in the name
    "peerloom_state", "peerloom_round", "peerloom_optimizer_steps", "peerloom_partners", "peerloom_swarm_nodes",
    "peerloom_swarm_tokens", "peerloom_swarm_token_budget", "peerloom_swarm_missing_stages",
    "peerloom_swarm_states_differ", "peerloom_relay_places", "peerloom_open_tunnels_relayed",
    "peerloom_open_tunnels_delivered", "peerloom_half_open_tunnels", "peerloom_dht_records",
}  # fmt: skip


def exported() -> dict[str, str]:
    """Every sample name of ours, and its family's type."""
    from dataclasses import replace

    totals = replace(TOTALS, consensus_distance=0.1, states_differ=1)
    body, _ = exposition(lambda: STATUS, lambda: totals, lambda: 4)(OPEN)
    return {
        sample.name: family.type
        for family in parse_open(body.decode())
        for sample in family.samples
        if sample.name.startswith("peerloom_")
    }


def test_both_formats_parse_and_hold_the_figures() -> None:
    scrape = exposition(lambda: STATUS, lambda: TOTALS)
    for accept, parse in (("", parse_text), (OPEN, parse_open)):
        body, _ = scrape(accept)
        samples = {s.name: s.value for family in parse(body.decode()) for s in family.samples}
        assert samples["peerloom_round"] == 7
        assert samples["peerloom_tokens_total"] == 1024
        assert samples["peerloom_held_out_loss_nats"] == 2.5
        assert samples["peerloom_gossip_committed_total"] == 3
        assert samples["peerloom_longest_exchange_seconds"] == 0.5
        assert samples["process_open_fds"] > 0
    body, _ = scrape("")
    states = [s for f in parse_text(body.decode()) if f.name == "peerloom_state" for s in f.samples]
    assert {s.labels["state"]: s.value for s in states}["training"] == 1
    assert sum(s.value for s in states) == 1 and len(states) > 5


def test_what_has_not_happened_is_a_zero_and_not_missing() -> None:
    body, _ = exposition(lambda: NodeStatus(record=RECORD))("")
    samples = {sample.name: sample.value for family in parse_text(body.decode()) for sample in family.samples}
    assert samples["peerloom_tunnel_legs_libp2p_total"] == samples["peerloom_worker_deaths_total"] == 0
    assert "peerloom_progress_ratio" not in samples  # not a count: without a figure it has none


def test_names_follow_the_conventions() -> None:
    for name, kind in exported().items():
        assert re.fullmatch(r"peerloom_[a-z0-9_]+", name)
        assert SUFFIX.search(name) or name in UNITLESS, f"{name} has no unit"
        assert name.endswith("_total") == (kind == "counter"), f"{name} is a {kind}"


def test_the_operators_table_lists_exactly_what_is_exported() -> None:
    text = (ROOT / "deploy/README.md").read_text()
    listed = dict(re.findall(r"^\| `(peerloom_\w+)` \|.*\| (.*?) \|$", text, re.MULTILINE))
    assert set(listed) == set(exported())
    for name, said in COUNTERS.items():
        assert listed["peerloom_" + RENAMED.get(name, f"{name}_total")] == said


def counted(source: str) -> set[str]:
    """The names of counters in a file: what is passed where a counter's name belongs, a `*` for what is filled in."""
    tree = ast.parse(source)
    texts: list[ast.expr | None] = []
    takers: dict[str, int] = dict.fromkeys(("count", "_count", "worst", "Count"), 0)
    for node in ast.walk(tree):  # functions that hand a name on, with what they are called without one
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in takers:
            names = [each.arg for each in node.args.args]
            if "metric" in names:
                takers[node.name] = names.index("metric") - (names[0] == "self")
                texts += node.args.defaults
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in takers:
                texts += node.args[takers[called] : takers[called] + 1]
                texts += [each.value for each in node.keywords if each.arg == "metric"]
    branches: list[ast.expr | None] = []
    for text in texts:
        branches += [text.body, text.orelse] if isinstance(text, ast.IfExp) else [text]
    found = {each.value for each in branches if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    for each in branches:
        if isinstance(each, ast.JoinedStr):
            found.add("".join(part.value if isinstance(part, ast.Constant) else "*" for part in each.values))
    return {name for name in found if re.fullmatch(r"[a-z_]+\*?", name)}


def test_every_counter_of_the_code_is_told_in_words() -> None:
    files = [file for folder in ("node", "protocol") for file in (ROOT / folder).rglob("*.py")]
    names = {name for file in files for name in counted(file.read_text())}
    assert {"gossip_alone", "gossip_declined_*", "relay_faults_*", "steps"} <= names  # each way of naming one
    families = {name.removesuffix("*") for name in names if name.endswith("*")}
    untold = {name for name in names if not name.endswith("*")} - set(COUNTERS)
    assert not untold, "add what it says to node/counters.py, and a line to deploy/README.md"
    reasons = {
        "gossip_declined_": get_args(DeclineReason), "gossip_refused_": get_args(DeclineReason),
        "flood_refused_": get_args(FloodRefusal), "tunnels_refused_": get_args(TunnelRefusal),
        "relay_faults_": tuple(FAULT_WEIGHTS),
    }  # fmt: skip
    assert families == set(reasons), "a new family of counters: name what fills it in"
    assert {family + reason for family, each in reasons.items() for reason in each} <= set(COUNTERS)
    assert set(RENAMED) <= set(COUNTERS)
