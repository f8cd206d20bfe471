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

from peerloom.node.status import Totals
from peerloom.protocol.types import NodeState, NodeStatus

COUNTERS = {  # of Facts.counters: the metric's name without its prefix, and what it says
    "rounds": "Rounds finished",
    "train_seconds": "Time in local steps",
    "exchange_seconds": "Time at exchange points, waiting and transferring",
    "exchange_seconds_max": "Longest time at an exchange point",
    "progress": "How far starting or fetching is, 0 to 1",
    "checkpoints_written": "Checkpoints written",
    "checkpoints_failed": "Checkpoints that the disk refused",
    "worker_deaths": "Times the training process died",
    "worker_stalls": "Times the training process made no step for long",
    "publish_failed": "Records that no other node took",
    "clock_jumps": "Times this machine's clock was set while the node ran",
    "peer_faults": "Faults held against peers",
    "peers_left_alone": "Times a peer was left alone for its faults",
    "state_served": "Model states handed to joiners",
    "state_fetched": "Model states taken over from peers",
    "states_refused": "Model states refused as worse than this node's own",
    "gossip_committed": "Exchanges committed",
    "gossip_in_doubt": "Exchanges that only one side may have committed",
    "gossip_broken": "Exchanges that broke off",
    "gossip_bad_payloads": "Payloads with numbers that are none",
    "gossip_clipped": "Exchanges in which a far-off peer counted less",
    "gossip_cut_short": "Rounds ended early for a waiting peer",
    "gossip_late_event": "Messages of exchanges that were over",
    "gossip_offer_lost": "Offers that went to a peer that had no time left",
    "gossip_refused_duplicate": "Second exchanges of one round that were refused",
    "gossip_stale_round": "Offers of a round too far from this node's",
    "gossip_unanswered": "Offers that nobody answered",
    "steps": "Steps of SeedFlow, each with its message",
    "updates": "Updates of this node's stage of a pipeline",
    "addresses_changed": "Times this node's addresses changed while it ran",
    "base_fetched": "Base models taken over from peers",
    "base_fetched_bytes": "Fetched for the base model, all attempts together",
    "base_refused": "Base models, or files of them, refused as false",
    "base_served": "Base models handed to joiners",
    "flood_cut": "Origins cut off with proof of two stories",
    "flood_duplicates": "Messages that came again, by another link or replayed: dropped",
    "flood_left_out": "Messages left out for a slow neighbour, which asks later",
    "flood_links": "Links of the flood that came up",
    "flood_links_failed": "Links of the flood that could not be opened",
    "flood_log_failed": "Batches that the disk refused to log",
    "flood_own": "Own messages flooded",
    "flood_payload_bytes": "Batches sent, without signatures and versions",
    "flood_refused_base": "States refused: of another base model",
    "flood_refused_bound": "Batches refused: a scalar outside the bound",
    "flood_refused_budget": "Batches refused: past the run's last step",
    "flood_refused_cut": "Batches refused: their origin was cut off",
    "flood_refused_doubtful": "Batches asked for again: their signature did not fit",
    "flood_refused_false_proof": "Proofs refused: they convict nobody",
    "flood_refused_forged": "Batches refused: not signed by their origin",
    "flood_refused_future": "Batches refused for now: a period too far ahead",
    "flood_refused_gap": "Batches refused for now: others before them are missing",
    "flood_refused_malformed": "Frames that could not be read",
    "flood_refused_older": "Batches refused: older than what is held",
    "flood_refused_origin": "Batches refused for now: of an unknown origin",
    "flood_refused_origins": "Batches refused: of one origin too many",
    "flood_refused_pace": "Links closed: the neighbour asked or repeated without end",
    "flood_refused_rate": "Batches refused for now: their origin sends too fast",
    "flood_refused_repeats": "Messages refused: a neighbour sent too much in vain",
    "flood_refused_talk": "Version vectors and questions refused: too many in the time",
    "flood_refused_wants": "Requests refused: a neighbour asked for too much",
    "flood_states_refused": "States of donors that others did not confirm",
    "flood_taken": "Messages of others that were new",
    "state_fetched_bytes": "Fetched as a late joiner of SeedFlow",
    "stage_busy_seconds": "Time in passes and updates of this node's stage",
    "stage_copies_fetched": "Copies of a stage fetched to keep or to take over",
    "stage_copies_kept": "Copies of a stage now on this node's disk",
    "stage_copies_sent": "Copies of this node's stage offered to its keeper",
    "stage_copies_served": "Copies of a stage handed to others",
    "stage_cpu_seconds": "CPU time of these passes and updates",
    "stages_left": "Stages this node gave up, to host another",
    "stages_taken_over": "Stages taken over from a host that was gone",
    "dht_sent_bytes": "Sent by the libp2p daemon for the DHT, beside all that is sent to peers",
    "dht_received_bytes": "Received by it likewise",
    "relayed_bytes": "Carried between others",
    "relays_left_alone": "Times a relay was left alone for its faults",
    "relays_lost": "Times a relay of this node was lost",
    "tunnel_sent_bytes": "Sent through tunnels that begin or end here",
    "tunnel_received_bytes": "Received through tunnels that begin or end here",
    "tunnel_legs_tcp": "Legs of tunnels, here and from here, over a relay's own TCP port",
    "tunnel_legs_libp2p": "Legs of tunnels, here and from here, over libp2p",
    "tunnel_strangers": "Connections to the relay port without a good token",
    "tunnels_opened": "Tunnels opened to peers that cannot be dialled",
    "tunnels_relayed": "Tunnels carried between others",
    "tunnels_delivered": "Tunnels that ended at this node",
    "tunnels_relayed_now": "Tunnels carried between others, open now",
    "tunnels_delivered_now": "Tunnels that end at this node, open now",
    "tunnels_half_open_now": "Tunnels being set up",
    "relay_places_now": "Peers that hold a place with this relay",
}
RENAMED = {  # these may fall
    "exchange_seconds_max": "longest_exchange_seconds",
    "progress": "progress_ratio",
    "tunnels_relayed_now": "open_tunnels_relayed",
    "tunnels_delivered_now": "open_tunnels_delivered",
    "tunnels_half_open_now": "half_open_tunnels",
    "relay_places_now": "relay_places",
}


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
        for name, value in sorted(status.counters.items()):
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
