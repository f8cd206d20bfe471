"""GASLoC of a model in fragments: each a `GASLoC` of its own over a part of the parameters, with rounds of its own.

A fragment's round goes from its exchange to its next one, so that fragments exchanged at different local steps share
the traffic out over a round (as Streaming DiLoCo does, arXiv 2501.18512). One fragment is the plain method, to the bit.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from peerloom.optim.fragments import ALIGNMENT, fragments
from peerloom.optim.gasloc import GASLoC, Momentum
from peerloom.optim.overlap import OverlappedGASLoC


def cut(numel: int, count: int, each: int, alignment: int = ALIGNMENT) -> list[slice]:
    """`count` fragments of `each` pieces, in order; ValueError where there are too few numbers."""
    spans = []
    for part in fragments(numel, count, alignment):
        inside = fragments(part.stop - part.start, each, alignment)
        spans += [slice(part.start + piece.start, part.start + piece.stop) for piece in inside]
    return spans


class FragmentedGASLoC:
    """One worker's outer optimizer over `params`, flat fp32, in `count` parts: `parts[f]` covers `slices[f]`.

    `start_round()`, then for each fragment in turn local steps, `propose(f)`, exchanges and `mix` on `parts[f]`,
    `settled(f)`. `buffers` (theta, previous) are flat fp32 as `GASLoC`'s. With `y`, flat fp32 too, proposals live there
    and `params` train on while they are exchanged (`OverlappedGASLoC`). Raises ValueError where the model is too small
    to cut.
    """

    def __init__(
        self,
        params: Tensor,
        count: int,
        *,
        eta: float,
        alpha: float,
        gamma: float,
        momentum: Momentum,
        buffers: tuple[Tensor, Tensor],
        alignment: int = ALIGNMENT,
        y: Tensor | None = None,
    ) -> None:
        self.slices = fragments(params.numel(), count, alignment)
        self._params, self._momentum = params.detach(), momentum
        self.theta, self.previous = (tensor.detach() for tensor in buffers)
        hyper: dict[str, Any] = {"eta": eta, "alpha": alpha, "gamma": gamma, "momentum": momentum}
        self.parts: list[GASLoC] = []
        for part in self.slices:
            hyper["buffers"] = (self.theta[part], self.previous[part])
            live = self._params[part]
            self.parts.append(GASLoC(live, **hyper) if y is None else OverlappedGASLoC(live, y[part], **hyper))
        self._running = [False] * count  # in local steps or at the exchange

    def start_round(self) -> None:
        """The local steps of a round begin; a fragment settled within the last round is in its own round already."""
        for fragment in range(len(self.parts)):
            self._start(fragment)

    def propose(self, fragment: int) -> Tensor:
        """Ends a fragment's local steps: its y, a view of `params`, or of `y`."""
        self._start(fragment)  # overlapped steps have begun before their round did
        return self.parts[fragment].proposal()

    def settled(self, fragment: int) -> None:
        """The fragment's `mix` was called: but for the last, its next round starts at once."""
        self._running[fragment] = False
        if fragment + 1 < len(self.parts):
            self._start(fragment)

    def adopt(self, theta: Tensor) -> None:
        """Starts over from another worker's theta: params = theta = previous; rounds under way are dropped."""
        for part, span in zip(self.parts, self.slices, strict=True):
            part.adopt(theta[span])
        self._running = [False] * len(self.parts)

    def state_dict(self) -> dict[str, Any]:
        """The state between two rounds, not copied; with fragments `params` are not theta and belong to it."""
        state = {"theta": self.theta, "previous": self.previous, "momentum": self._momentum}
        return state if len(self.parts) == 1 else {**state, "params": self._params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up `state_dict()`'s state; without `params` they become theta. Raises ValueError as `GASLoC` does."""
        numel = self._params.numel()
        for name in ("theta", "previous", "params"):
            if name in state and state[name].shape != (numel,):
                raise ValueError(f"the state's {name} has the shape {tuple(state[name].shape)}, not ({numel},)")
        for part, span in zip(self.parts, self.slices, strict=True):
            part.load_state_dict(
                {name: value if name == "momentum" else value[span] for name, value in state.items()}
            )
        self._running = [False] * len(self.parts)
        if len(self.parts) > 1 and "params" in state:
            for fragment in range(len(self.parts) - 1):
                self._start(fragment)
            self._params.copy_(state["params"])

    def _start(self, fragment: int) -> None:
        if not self._running[fragment]:
            self.parts[fragment].start_round()
            self._running[fragment] = True
