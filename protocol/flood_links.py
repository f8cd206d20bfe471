"""What the flood machine remembers of each link, and how fast each origin may go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from peerloom.protocol.flood_history import History
from peerloom.protocol.flood_messages import Batch, Head, Segment
from peerloom.protocol.flood_pace import Pace
from peerloom.protocol.limits import MAX_SEGMENT
from peerloom.protocol.types import PeerId


@dataclass(slots=True)
class Link:
    """One link: `known` is how far the peer is with each origin, as far as can be told."""

    peer: PeerId
    pace: Pace = field(default_factory=Pace)  # the peer's, whatever link it has
    known: dict[PeerId, int] = field(default_factory=dict)
    sent: dict[PeerId, int] = field(default_factory=dict)  # where the last segment sent to it ended
    agreed: dict[PeerId, int] = field(default_factory=dict)  # where the last one from it ended, if it was ours too
    heads: dict[PeerId, Head] = field(default_factory=dict)  # its version vector
    heard: bool = False  # whether it has told its versions
    doubts: int = 0
    convicted: set[PeerId] = field(default_factory=set)  # whose proof it was sent in answer to their messages
    proved: set[PeerId] = field(default_factory=set)  # whose proof it was told of in the present turn through all
    outbox: list[Segment] = field(default_factory=list)

    def knows(self, origin: PeerId, end: int) -> None:
        """The peer has all below `end`."""
        if end > self.known.get(origin, 0):
            self.known[origin] = end

    def put(self, segment: Segment, prev: Callable[[], bytes]) -> None:
        """Queues a segment; `prev` is asked for where the peer cannot tell itself."""
        batch = segment.batch
        last = self.outbox[-1] if self.outbox else None
        self.knows(batch.origin, batch.end)
        if last is not None and (joined := merged(last, segment)) is not None:
            self.outbox[-1] = joined
        else:
            follows = self.sent.get(batch.origin) == batch.sequence
            self.outbox.append(Segment(batch, segment.signature, b"" if follows else prev()))
        self.sent[batch.origin] = batch.end

    def take(self) -> tuple[Segment, ...]:
        """What is queued, and nothing is any more."""
        taken, self.outbox = tuple(self.outbox), []
        return taken


def merged(first: Segment, second: Segment) -> Segment | None:
    """Both under the second's signature, if the second is the first's continuation and they are not too long."""
    one, two = first.batch, second.batch
    if one.origin != two.origin or one.end != two.sequence or one.end_step != two.step:
        return None
    if len(one.scalars) + len(two.scalars) > MAX_SEGMENT:
        return None
    batch = Batch(one.origin, one.sequence, one.step, one.scalars + two.scalars)
    return Segment(batch, second.signature, first.prev)


def in_rows(segments: Iterable[Segment]) -> list[list[Segment]]:
    """The segments by rows of one origin, each the continuation of the one before it, and not too long to be one.

    One that names the chain before itself begins a row: its sender may mean another history.
    """
    rows: list[list[Segment]] = []
    open_rows: dict[PeerId, tuple[list[Segment], int]] = {}  # by origin, with the messages in it
    for segment in segments:
        batch = segment.batch
        row, count = open_rows.get(batch.origin, ([], 0))
        last = row[-1].batch if row else None
        follows = last is not None and (last.end, last.end_step) == (batch.sequence, batch.step) and not segment.prev
        if not follows or count + len(batch.scalars) > MAX_SEGMENT:
            row, count = [], 0
            rows.append(row)
        row.append(segment)
        open_rows[batch.origin] = row, count + len(batch.scalars)
    return rows


def joined(row: Sequence[Segment]) -> Segment:
    """A row as one segment, under the last one's signature: that covers all."""
    first = row[0].batch
    scalars = tuple(scalar for segment in row for scalar in segment.batch.scalars)
    return Segment(Batch(first.origin, first.sequence, first.step, scalars), row[-1].signature, row[0].prev)


@dataclass(slots=True)
class Allowance:
    """How many messages an origin may send now: `rate` a second, `burst` at once."""

    rate: float
    burst: int
    left: float
    at: float

    def take(self, count: int, now: float) -> bool:
        """Takes `count` if they may pass: a row longer than the burst may once it is full, and is owed then."""
        if not self.holds(min(count, self.burst), now):
            return False
        self.left -= count
        return True

    def holds(self, count: int, now: float) -> bool:
        """Whether `count` may pass now and nothing is owed for them."""
        self.left = min(self.burst, self.left + self.rate * max(0.0, now - self.at))
        self.at = now
        return self.left >= count


@dataclass(slots=True)
class Source:
    """An origin: what is held of it, and what it may send."""

    history: History
    allowance: Allowance


class Outgoing:
    """Segments that wait for a stream to take them: what follows on what is merged, so a slow link costs little.

    Past `most` messages new ones are left out; the receiver then misses some and asks.
    """

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._waiting: list[Segment] = []
        self._last: dict[PeerId, int] = {}  # by origin: where its newest one waits
        self._messages = 0

    def __len__(self) -> int:
        return self._messages

    def put(self, segments: Iterable[Segment]) -> int:
        """Adds them; returns how many messages were left out."""
        left_out = 0
        for segment in segments:
            batch = segment.batch
            if self._messages + len(batch.scalars) > self._most:
                left_out += len(batch.scalars)
                continue
            self._messages += len(batch.scalars)
            at = self._last.get(batch.origin)
            joined = merged(self._waiting[at], segment) if at is not None else None
            if at is not None and joined is not None:
                self._waiting[at] = joined
            else:
                self._last[batch.origin] = len(self._waiting)
                self._waiting.append(segment)
        return left_out

    def take(self, most_segments: int, most_messages: int) -> tuple[Segment, ...]:
        """What goes into one message, the oldest first."""
        count = messages = 0
        for segment in self._waiting[:most_segments]:
            messages += len(segment.batch.scalars)
            if count and messages > most_messages:
                messages -= len(segment.batch.scalars)
                break
            count += 1
        taken, self._waiting = tuple(self._waiting[:count]), self._waiting[count:]
        self._messages -= messages
        self._last = {segment.batch.origin: at for at, segment in enumerate(self._waiting)}
        return taken
