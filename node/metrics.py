"""What Prometheus sees of a node: its status, and the swarm's sums as it knows them; served by `http_server`.

Names follow the conventions of Prometheus: `peerloom_`, base units in the name, `_total` on what only grows. The table
in deploy/README.md lists them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from peerloom.node.counters import COUNTERS, RENAMED
from peerloom.node.status import Totals
from peerloom.protocol.types import NodeState, NodeStatus


class NodeCollector(Collector):
    """Turns one node's status, and the swarm's totals, into metric families."""

    def __init__(
        self,
        status: Callable[[], NodeStatus],
        totals: Callable[[], Totals] | None = None,
        dht_records: Callable[[], int] | None = None,
    ) -> None:
        self._status = status
        self._totals = totals
        self._dht_records = dht_records

    def collect(self) -> Iterator[Metric]:
        """What a scrape sees."""
        status = self._status()
        yield from _node_metrics(status)
        zeros = dict.fromkeys(COUNTERS.keys() - RENAMED.keys(), 0.0)  # for a rate over the first that is counted
        for name, value in sorted((zeros | status.counters).items()):
            clean = re.sub("[^a-z0-9_]", "_", name)
            told = COUNTERS.get(name, "A counter of this node's method")
            if name in RENAMED:
                yield GaugeMetricFamily(f"peerloom_{RENAMED[name]}", told, value)
            else:
                yield CounterMetricFamily(f"peerloom_{clean}", told, value)
        if self._dht_records is not None:
            told = "Records of the DHT that this node keeps, for itself and for others"
            yield GaugeMetricFamily("peerloom_dht_records", told, self._dht_records())
        if self._totals is not None:
            yield from _swarm_metrics(self._totals())


def _node_metrics(status: NodeStatus) -> Iterator[Metric]:
    record = status.record
    about = {"peer_id": record.peer_id, "name": record.name, "role": record.role, "version": record.version}
    yield InfoMetricFamily("peerloom_node", "Who this is", about)
    state = GaugeMetricFamily("peerloom_state", "1 for the state this node is in, 0 for the others", labels=["state"])
    for name in get_args(NodeState):
        state.add_metric([name], float(name == record.state))
    yield state
    yield GaugeMetricFamily("peerloom_start_time_seconds", "When the node started, Unix time", record.started_at)
    yield GaugeMetricFamily("peerloom_round", "Round this node is in", record.round)
    yield GaugeMetricFamily("peerloom_optimizer_steps", "Optimizer steps behind the parameters", record.step)
    yield GaugeMetricFamily("peerloom_tokens_per_second", "Tokens trained a second", record.tokens_per_s)
    if record.loss is not None:
        yield GaugeMetricFamily("peerloom_held_out_loss_nats", "Held-out loss a token", record.loss)
    yield CounterMetricFamily("peerloom_tokens", "Tokens this node has trained on", record.tokens)
    yield CounterMetricFamily("peerloom_sent_bytes", "Sent to peers", record.up_bytes)
    yield CounterMetricFamily("peerloom_received_bytes", "Received from peers", record.down_bytes)
    yield GaugeMetricFamily("peerloom_partners", "Peers it has exchanged with in this life", len(status.partners))


def _swarm_metrics(totals: Totals) -> Iterator[Metric]:
    nodes = GaugeMetricFamily("peerloom_swarm_nodes", "Nodes of the swarm as this node sees it", labels=["kind"])
    for kind in ("trainers", "training", "silent"):
        nodes.add_metric([kind], getattr(totals, kind))
    nodes.add_metric(["all"], totals.nodes)
    yield nodes
    yield GaugeMetricFamily("peerloom_swarm_tokens_per_second", "Tokens a second of all nodes", totals.tokens_per_s)
    yield GaugeMetricFamily("peerloom_swarm_tokens", "Tokens the nodes in sight have trained on", totals.tokens)
    yield GaugeMetricFamily("peerloom_swarm_token_budget", "Tokens of the run; 0 for no end", totals.token_budget or 0)
    yield GaugeMetricFamily("peerloom_swarm_missing_stages", "Stages served by nobody", len(totals.missing_stages))
    if totals.loss_min is not None and totals.loss_max is not None:
        yield GaugeMetricFamily("peerloom_swarm_loss_min_nats", "Lowest held-out loss a token", totals.loss_min)
        yield GaugeMetricFamily("peerloom_swarm_loss_max_nats", "Highest held-out loss a token", totals.loss_max)
    if totals.consensus_distance is not None:
        told = "How far the trainers lie from their mean, relative to their norm"
        yield GaugeMetricFamily("peerloom_swarm_consensus_distance_ratio", told, totals.consensus_distance)
    if totals.states_differ is not None:
        told = "Trainers whose state is not the commonest, where a method keeps all equal"
        yield GaugeMetricFamily("peerloom_swarm_states_differ", told, totals.states_differ)


def exposition(
    status: Callable[[], NodeStatus],
    totals: Callable[[], Totals] | None = None,
    dht_records: Callable[[], int] | None = None,
) -> Callable[[str], tuple[bytes, str]]:
    """A function from an Accept header to a scrape's body and content type; it also tells of the process itself."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(status, totals, dht_records))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)

    def scrape(accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    return scrape
