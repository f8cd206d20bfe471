"""The end of a round, the same in every worker: a partner's proposal cut where it lies too far off, and mixed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from peerloom.optim.gasloc import GASLoC
from peerloom.optim.robust import MedianClip, distance
from peerloom.protocol.spec_gasloc import GaslocSpec

FAR_SHARE = 0.5  # a partner cut to less does not train along: honest ones were within 2.1 medians where measured
RECENT = 16  # meetings, of which ...
FEW = 4  # ... so many were with partners far off: were there more, this node would be the odd one, or a swarm parted

LEAST_WAY = 1e-12  # of a part in a round: a part that has not moved at all has no length to measure by


class Mixed(NamedTuple):
    """`share` is 1, or how much nearer the partner would have had to be; `far_off`: enough is known to blame it."""

    share: float = 1.0
    far_off: bool = False


class _Judge:
    """Holds partners' distances against those before: `radius` 0 lets all pass."""

    def __init__(self, radius: float, distances: Iterable[float] = ()) -> None:
        self._clip = MedianClip(radius, distances=distances) if radius else None
        self._far: deque[bool] = deque(maxlen=RECENT)

    def of(self, own: Tensor, theirs: Tensor, way: float, scale: float = 1.0) -> Mixed:
        """What a proposal counts for; two drifts like the node's `way` apart is usual, whatever was before.

        `scale` makes distances of parts comparable: in lengths of the way themselves, they need no `way`.
        """
        if self._clip is None:
            return Mixed()
        first = len(self._clip.state()) < MedianClip.LEAST  # what is usual has to be seen first
        share = self._clip.update(scale * distance(own, theirs), math.sqrt(2) * scale * way)
        if first:
            return Mixed(share)
        self._far.append(share < FAR_SHARE)
        return Mixed(share, self._far[-1] and sum(self._far) <= FEW)

    def state(self) -> list[float]:
        """The distances behind the median."""
        return self._clip.state() if self._clip is not None else []


class Mixer:
    """Calls `mix` of one node's GASLoC; `distances` are those that `state()` gave in an earlier life."""

    def __init__(self, method: GASLoC, spec: GaslocSpec, distances: Iterable[float] = ()) -> None:
        self._method = method
        self._whole = _Judge(spec.clip_radius, distances)
        self._legs: dict[tuple[bool, int], _Judge] = {}  # of a group, by what goes over them
        self._radius = spec.clip_radius

    def close(self) -> Mixed:
        """Ends the round with what was taken in, or averaged in a group; with neither, the edge is dropped.

        A group's mean that lies too far off draws this node less, and nobody in it is blamed for that.
        """
        if (averaged := self._method.averaged) is None:
            self._method.mix([])
            return Mixed()
        own, mean = averaged
        share = self._whole.of(own, mean, self._way(own)).share
        self._method.mix([], share=share**2)
        return Mixed(share)

    def mix(self, y: Tensor, theirs: Tensor, own: Tensor | None) -> Mixed:
        """Mixes with a partner's proposal, `y` being this node's; `own` is y as the partner decodes it, if lossy.

        A partner at `cut` times the distance that `clip_radius` allows counts by the weight 1 / cut^2. Were it 1 / cut,
        every lie would move this node to the limit; so one that is farther off counts for less.
        """
        mixed = self._whole.of(y if own is None else own, theirs, self._way(y))
        self._method.mix([(mixed.share**2, theirs)], own=own)
        return mixed

    def take(self, weight: float, y: Tensor, theirs: Tensor, own: Tensor | None) -> Mixed:
        """As `mix` for one partner of several, over an edge of that weight; `close` follows."""
        mixed = self._whole.of(y if own is None else own, theirs, self._way(y))
        self._method.take(weight * mixed.share**2, theirs, own)
        return mixed

    def average(
        self, y: Tensor, theirs: Tensor, part: slice, own: Tensor | None, *, replace: bool
    ) -> tuple[Tensor, Mixed]:
        """As `take` for a part of x in a group, `y` being where x lives; returns x.

        A member's lie stops at who meets it: were only the group's mean judged, one member could spoil it for all, and
        of 8 nodes 3 meet a liar in every round. Parts of a model move by different lengths, so a distance is measured
        in lengths of the node's own way from theta; and averages lie nearer each other than proposals, so each kind of
        leg has a median of its own. Who is far off in the first leg, where halves go both ways, sent what is his own
        and is blamed for it; later legs carry averages, perhaps with another's lie in them, and blame nobody.
        """
        x = y[part] if own is None or self._method.averaged is not None else own[part]
        cut = round(y.numel() / max(1, theirs.numel()))
        judge = self._legs.setdefault((replace, cut), _Judge(self._radius))
        share, far_off = judge.of(x, theirs, 0.0, 1 / max(self._way(x, part), LEAST_WAY))
        taken = self._method.average(theirs, part, replace=replace, own=own, share=share**2)
        return taken, Mixed(share, far_off and cut == 2 and not replace)

    def _way(self, y: Tensor, part: slice = slice(None)) -> float:
        """How far the node went from theta in this round; 0 where nothing is judged by it."""
        return distance(y, self._method.theta[part]) if self._radius else 0.0

    def state(self) -> list[float]:
        """The distances behind the median, for a checkpoint."""
        return self._whole.state()
