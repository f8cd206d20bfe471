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


class Mixed(NamedTuple):
    """`share` is 1, or how much nearer the partner would have had to be; `far_off`: enough is known to blame it."""

    share: float = 1.0
    far_off: bool = False


class Mixer:
    """Calls `mix` of one node's GASLoC; `distances` are those that `state()` gave in an earlier life."""

    def __init__(self, method: GASLoC, spec: GaslocSpec, distances: Iterable[float] = ()) -> None:
        self._method = method
        self._clip = MedianClip(spec.clip_radius, distances=distances) if spec.clip_radius else None
        self._far: deque[bool] = deque(maxlen=RECENT)

    def close(self) -> Mixed:
        """Ends the round with what was taken in, or averaged in a group; with neither, the edge is dropped.

        A group's mean that lies too far off draws this node less, and nobody in it is blamed for that.
        """
        if (averaged := self._method.averaged) is None:
            self._method.mix([])
            return Mixed()
        share = self._judge(*averaged).share
        self._method.mix([], share=share**2)
        return Mixed(share)

    def mix(self, y: Tensor, theirs: Tensor, own: Tensor | None) -> Mixed:
        """Mixes with a partner's proposal, `y` being this node's; `own` is y as the partner decodes it, if lossy.

        A partner at `cut` times the distance that `clip_radius` allows counts by the weight 1 / cut^2. Were it 1 / cut,
        every lie would move this node to the limit; so one that is farther off counts for less.
        """
        mixed = self._judge(y if own is None else own, theirs)
        self._method.mix([(mixed.share**2, theirs)], own=own)
        return mixed

    def take(self, weight: float, y: Tensor, theirs: Tensor, own: Tensor | None) -> Mixed:
        """As `mix` for one partner of several, over an edge of that weight; `close` follows."""
        mixed = self._judge(y if own is None else own, theirs)
        self._method.take(weight * mixed.share**2, theirs, own)
        return mixed

    def _judge(self, own: Tensor, theirs: Tensor) -> Mixed:
        if self._clip is None:
            return Mixed()
        apart, known = distance(own, theirs), self._clip.state()
        if len(known) < MedianClip.LEAST:
            # what is usual has to be seen first; until then the nearest is the measure, so that a liar who is met twice
            # among the first does not become what is usual
            limit = self._clip.radius * min((each for each in known if each), default=math.inf)
            self._clip = MedianClip(self._clip.radius, distances=[*known, min(apart, limit)])
            return Mixed(1.0 if apart <= limit else limit / apart)
        share = self._clip.update(apart)
        self._far.append(share < FAR_SHARE)
        return Mixed(share, self._far[-1] and sum(self._far) <= FEW)

    def state(self) -> list[float]:
        """The distances behind the median, for a checkpoint."""
        return self._clip.state() if self._clip is not None else []
