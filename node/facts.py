"""What a node knows of itself: one mutable place from which its record, its status and its log lines are made."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from peerloom.node.seams import Clock
from peerloom.node.worker_seams import RoundFinished, RoundTrained, WorkerReady
from peerloom.protocol.limits import MAX_PARTNERS
from peerloom.protocol.progress import StepPace
from peerloom.protocol.types import NodeState, NodeStatus, PeerId, PeerRecord, Reach, Role, StageRole

LONELY = 3  # rounds alone in a row from which status says so
RATE_SMOOTHING = 0.3  # weight of the newest round in tokens/s
TRAFFIC_WINDOW_S = 30.0  # over which bytes a second are told


@dataclass(slots=True, kw_only=True)
class Facts:
    """Mutable facts; `changed` is called after each change of state or round."""

    peer_id: PeerId
    name: str
    role: Role
    version: str
    instance: str
    cert_der: bytes
    clock: Clock
    bytes_moved: Callable[[], tuple[int, int]]
    changed: Callable[[], None] = lambda: None
    started_at: float = 0.0
    addresses: tuple[str, ...] = ()
    state: NodeState = "starting"
    reason: str = "starting up"
    warning: str = ""  # what is wrong although it trains; shown in place of an empty reason
    init_digest: str = ""
    layout_digest: str = ""
    round: int = 0
    step: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    sketch: tuple[float, ...] = ()
    reach: Reach = "unknown"
    via: tuple[PeerId, ...] = ()
    relays: bool = False
    libp2p: tuple[str, ...] = ()
    state_hash: str = ""  # SeedFlow's
    messages: int = 0
    accuracy: float | None = None
    stage: int = -1
    stage_role: StageRole = ""
    alone: int = 0  # rounds in a row without a partner
    alone_because: str = ""
    partners: Counter[PeerId] = field(default_factory=Counter)
    last_partner: str = ""
    last_met_at: float = 0.0
    pace: StepPace = field(default_factory=StepPace)
    tells_steps: bool = False  # whether the worker does, as it takes them
    _traffic: deque[tuple[float, int, int]] = field(default_factory=deque)
    counters: dict[str, float] = field(default_factory=dict)

    def enter(self, state: NodeState, reason: str = "") -> None:
        """Changes the state, with a sentence that says why this node is not training, if it is not."""
        self.pace.alive(self.clock.monotonic())
        if (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            self.changed()

    def count(self, metric: str, amount: float = 1.0) -> None:
        """Adds to a cumulative counter."""
        self.counters[metric] = self.counters.get(metric, 0.0) + amount

    def worst(self, metric: str, value: float) -> None:
        """Keeps the largest value seen."""
        self.counters[metric] = max(value, self.counters.get(metric, 0.0))

    def ready(self, ready: WorkerReady) -> None:
        """Takes what the worker built or resumed."""
        self.init_digest, self.layout_digest = ready.init_digest, ready.layout_digest
        self.round, self.step, self.tokens = ready.round, ready.step, ready.tokens
        self.loss, self.sketch = ready.held_out_loss, ready.sketch
        self.changed()

    def trained(self, trained: RoundTrained) -> None:
        """Takes the local steps of a round."""
        self.step, self.tokens = trained.step, trained.tokens
        if trained.batches:
            self.pace.measured(trained.seconds / trained.batches)

    def finished(self, finished: RoundFinished, rate: float) -> None:
        """Takes the end of a round, `rate` being its tokens/s, exchange included."""
        self.round, self.sketch = finished.round, finished.sketch
        self.pace.round_ended(self.clock.monotonic())
        if finished.held_out_loss is not None:
            self.loss = finished.held_out_loss
        self.rate(rate)
        self.changed()

    def rate(self, tokens_per_s: float) -> None:
        """Takes the newest speed into the smoothed one."""
        smooth = RATE_SMOOTHING if self.tokens_per_s else 1.0
        self.tokens_per_s += smooth * (tokens_per_s - self.tokens_per_s)

    def stepped(self, steps: int) -> None:
        """Takes a sign of life of the worker: how many steps it has taken."""
        self.tells_steps = True
        if self.state == "stalled":
            self.enter("training")
        self.pace.stepped(steps, self.clock.monotonic())

    def stall(self, reason: str) -> None:
        """Enters "stalled", which is no sign of life; a reason that counts seconds is told anew without a change."""
        before, self.state, self.reason = self.state, "stalled", reason
        if before != "stalled":
            self.changed()

    def exchanged_with(self, peer: PeerId) -> None:
        """Takes a committed exchange."""
        self.partners[peer] += 1
        if len(self.partners) > 2 * MAX_PARTNERS:  # so far past the limit that a newcomer has time to become frequent
            self.partners = Counter(dict(self._most_frequent()))
        self.last_partner, self.last_met_at = peer, self.clock.wall()

    def _most_frequent(self) -> list[tuple[PeerId, int]]:
        """The partners that a status has room for."""
        return self.partners.most_common(MAX_PARTNERS)

    def met(self, somebody: bool, why_not: str) -> None:
        """Takes whether the round had a partner."""
        self.alone, self.alone_because = (0, "") if somebody else (self.alone + 1, why_not)

    def _told(self) -> str:
        """Why it is not training, else what is wrong although it trains, else that it meets nobody."""
        lonely = f"{self.alone} rounds alone: {self.alone_because}" if self.alone >= LONELY else ""
        return self.reason or self.warning or lonely

    def record(self) -> PeerRecord:
        """This node's record as of now."""
        up, down = self.bytes_moved()
        up_rate, down_rate = self._traffic_rates(up, down)
        return PeerRecord(
            peer_id=self.peer_id,
            name=self.name,
            role=self.role,
            addresses=self.addresses,
            cert_der=self.cert_der,
            version=self.version,
            instance=self.instance,
            started_at=self.started_at,
            issued_at=self.clock.wall(),
            state=self.state,
            reason=self._told(),
            init_digest=self.init_digest,
            layout_digest=self.layout_digest,
            round=self.round,
            step=self.step,
            tokens=self.tokens,
            tokens_per_s=self.tokens_per_s,
            loss=self.loss,
            up_bytes=up,
            down_bytes=down,
            sketch=self.sketch,
            reach=self.reach,
            via=self.via,
            relays=self.relays,
            libp2p=self.libp2p,
            state_hash=self.state_hash,
            messages=self.messages,
            accuracy=self.accuracy,
            stage=self.stage,
            stage_role=self.stage_role,
            up_bytes_per_s=up_rate,
            down_bytes_per_s=down_rate,
            last_partner=self.last_partner,
            last_met_at=self.last_met_at,
        )

    def _traffic_rates(self, up: int, down: int) -> tuple[float, float]:
        """Bytes a second over the last TRAFFIC_WINDOW_S, told from the records made in that time."""
        samples, now = self._traffic, self.clock.monotonic()
        while len(samples) > 1 and samples[1][0] <= now - TRAFFIC_WINDOW_S:
            samples.popleft()
        if not samples or now - samples[-1][0] >= 1.0:
            samples.append((now, up, down))
        since, up_then, down_then = samples[0]
        seconds = now - since
        return ((up - up_then) / seconds, (down - down_then) / seconds) if seconds >= 1.0 else (0.0, 0.0)

    def status(self) -> NodeStatus:
        """The answer to Status."""
        return NodeStatus(record=self.record(), partners=dict(self._most_frequent()), counters=dict(self.counters))
