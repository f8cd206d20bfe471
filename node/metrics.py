"""/metrics for Prometheus and /healthz, on 127.0.0.1; what they say is what Status says."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from peerloom.node.ports import hold_port
from peerloom.protocol.types import NodeState, NodeStatus

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

HOST = "127.0.0.1"
HEALTHY: frozenset[NodeState] = frozenset({"training", "seeking", "exchanging", "serving", "done"})
LARGEST = {"exchange_seconds_max", "progress"}  # of Facts.counters: values that may fall, or do not add up


class _NodeCollector(Collector):
    """Turns one node's status into metric families."""

    def __init__(self, status: Callable[[], NodeStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """What a scrape sees."""
        status = self._status()
        record = status.record
        yield InfoMetricFamily(
            "peerloom_node",
            "Who this is",
            {"peer_id": record.peer_id, "name": record.name, "role": record.role, "version": record.version},
        )
        state = GaugeMetricFamily("peerloom_state", "1 for the state this node is in", labels=["state"])
        state.add_metric([record.state], 1)
        yield state
        yield GaugeMetricFamily("peerloom_round", "Round this node is in", record.round)
        yield GaugeMetricFamily("peerloom_tokens_per_second", "Tokens trained a second", record.tokens_per_s)
        if record.loss is not None:
            yield GaugeMetricFamily("peerloom_held_out_loss_nats", "Held-out loss a token", record.loss)
        yield CounterMetricFamily("peerloom_tokens", "Tokens this node has trained on", record.tokens)
        yield CounterMetricFamily("peerloom_sent_bytes", "Sent to peers", record.up_bytes)
        yield CounterMetricFamily("peerloom_received_bytes", "Received from peers", record.down_bytes)
        for name, value in sorted(status.counters.items()):
            gauge = name in LARGEST or name.endswith("_now")
            family = GaugeMetricFamily if gauge else CounterMetricFamily
            yield family(f"peerloom_{re.sub('[^a-z0-9_]', '_', name)}", "See the gossip machine's counters", value)


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is no news."""


class MetricsServer:
    """Serves /metrics and /healthz from a thread of its own; raises PortInUse."""

    def __init__(self, port: int, status: Callable[[], NodeStatus]) -> None:
        hold_port(HOST, port).release()  # says that a port is taken in the words of the other ports
        registry = CollectorRegistry()
        registry.register(_NodeCollector(status))
        self._metrics = make_wsgi_app(registry)
        self._status = status
        self._server: WSGIServer = make_server(HOST, port, self._answer, handler_class=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port bound."""
        return self._server.server_port

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        match environ.get("PATH_INFO"):
            case "/metrics":
                body: Iterable[bytes] = self._metrics(environ, start)
                return body
            case "/healthz":
                record = self._status().record
                good = record.state in HEALTHY
                start("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
                return [": ".join(filter(None, (record.state, record.reason))).encode() + b"\n"]
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [b"there are /metrics and /healthz\n"]

    def stop(self) -> None:
        """Closes the port and ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
