"""All that is held of one origin: its messages, packed, and the places of its chain that it signed."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

from peerloom.protocol.flood_messages import Batch, Head, Mark, Segment, fold
from peerloom.protocol.limits import MAX_SEGMENT
from peerloom.protocol.types import PeerId

STRIDE = 32  # messages: a peer that asks for one chain within a long segment, again and again, costs little


class History:
    """An unbroken row of one origin's messages from `base` on; `chain` is the chain before it.

    Some 4 bytes a message, and 120 a signed place. Places lie at most MAX_SEGMENT messages apart, one wherever the
    steps jump and one at the end, so that every message can be passed on with a signature.
    """

    def __init__(self, origin: PeerId, chain: bytes, *, base: int = 0, step: int = 0, signature: bytes = b"") -> None:
        self.origin = origin
        self.base = self.next = base
        self.chain = chain
        self.end_step = step
        self._scalars = array("i")
        self._run_starts = array("q")  # sequences at which a run of consecutive steps begins
        self._run_steps = array("q")
        self._places = array("q", [base])
        self._chains = [chain]
        self._signatures = [signature]
        self._between: dict[int, bytes] = {}  # chains between places, at multiples of STRIDE, where one was asked for

    def append(self, batch: Batch, chain: bytes, signature: bytes) -> None:
        """Adds the batch that comes next; `chain` is the one after it, as signed."""
        if batch.sequence != self.next or not 1 <= len(batch.scalars) <= MAX_SEGMENT:
            raise ValueError(f"a batch of {len(batch.scalars)} at {batch.sequence} cannot follow {self.next}")
        if not self._run_starts or batch.step != self.end_step:
            self._run_starts.append(batch.sequence)
            self._run_steps.append(batch.step)
        self._scalars.extend(batch.scalars)
        self.next, self.end_step, self.chain = batch.end, batch.end_step, chain
        self._places.append(batch.end)
        self._chains.append(chain)
        self._signatures.append(signature)

    def head(self) -> Head:
        """For a version vector."""
        return Head(self.origin, self.next, self.chain, self.base)

    def mark(self) -> Mark:
        """For a snapshot."""
        return Mark(self.origin, self.next, self.end_step, self.chain, self._signatures[-1])

    def batches(self, first: int, last: int) -> list[Batch]:
        """Messages `first` to `last` - 1, both from `base` to `next`."""
        found = []
        while first < last:
            run = bisect_right(self._run_starts, first) - 1
            end = min(last, self._run_end(run))
            step = self._run_steps[run] + first - self._run_starts[run]
            scalars = tuple(self._scalars[first - self.base : end - self.base])
            found.append(Batch(self.origin, first, step, scalars))
            first = end
        return found

    def chain_at(self, sequence: int) -> bytes:
        """The chain before message `sequence`, from `base` to `next`; once worked out near there, STRIDE hashes."""
        place = bisect_right(self._places, sequence) - 1
        at, chain = self._places[place], self._chains[place]
        nearest = sequence - sequence % STRIDE
        if nearest > at and nearest in self._between:
            at, chain = nearest, self._between[nearest]
        while at < sequence:
            end = min(sequence, at - at % STRIDE + STRIDE)
            for batch in self.batches(at, end):
                chain = fold(chain, batch)
            if end % STRIDE == 0:
                self._between[end] = chain
            at = end
        return chain

    def segment(self, sequence: int, most: int = MAX_SEGMENT) -> Segment | None:
        """From `sequence` on as many as one signature covers, at most `most` if it can be; None at the end."""
        first = bisect_right(self._places, sequence)
        if first == len(self._places):
            return None
        run_end = self._run_end(bisect_right(self._run_starts, sequence) - 1)
        place = max(first, bisect_right(self._places, min(sequence + most, run_end)) - 1)
        return self._to_place(sequence, place)

    def branch(self, sequence: int) -> Segment | None:
        """What proves this history from `sequence` on: as little as one signature covers, nothing at the very end.

        None where nothing is signed yet.
        """
        place = bisect_right(self._places, sequence)
        if place == len(self._places):
            place -= 1
        return self._to_place(sequence, place) if self._signatures[place] else None

    def differs(self, batch: Batch) -> int | None:
        """The first sequence at which the batch says something else than this history, as far as both go."""
        for own in self.batches(max(batch.sequence, self.base), min(batch.end, self.next)):
            other = batch.since(own.sequence)
            if own.step != other.step:
                return own.sequence
            if own.scalars != other.scalars[: len(own.scalars)]:
                pairs = zip(own.scalars, other.scalars, strict=False)
                return own.sequence + next(index for index, (a, b) in enumerate(pairs) if a != b)
        return None

    def _to_place(self, sequence: int, place: int) -> Segment:
        rows = self.batches(sequence, self._places[place])
        batch = rows[0] if rows else Batch(self.origin, sequence, self.end_step, ())
        return Segment(batch, self._signatures[place], self.chain_at(sequence))

    def _run_end(self, run: int) -> int:
        return self._run_starts[run + 1] if run + 1 < len(self._run_starts) else self.next

    def is_place(self, sequence: int) -> bool:
        """Whether the chain before `sequence` is signed."""
        place = bisect_left(self._places, sequence)
        return place < len(self._places) and self._places[place] == sequence and bool(self._signatures[place])
