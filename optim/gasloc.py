"""GASLoC: local steps, then one gossip step with momentum (arXiv 2606.11081); `gasloc_stacked` is its plain reference.

For worker i with neighbours j, per element, in fp32, each operation rounded once and in this order:

    g   = params - theta                              drift of the local steps
    y   = theta + eta * g                             the proposal, which is what peers exchange
    s   = sum over j, as given, of (lambda_ij / 2) * (y_i - y_j)
    mix = y - alpha * s                               (s and its term are skipped without neighbours)
    "pre"  (the paper's equation):  theta' = mix + gamma * (y - previous),    previous' = y
    "post" (DiLoCo on an exact average): theta' = mix + gamma * (mix - previous),  previous' = mix

and previous starts as theta_0. A drift is not divided by its number of local steps, as in the paper: who takes more
moves the mean by more. "pre" is the default because it is the paper's equation; the values of its experiments
are not known, and DiLoCo's form is "post". Groups that take their mean pairwise, one pair after the other (`average`),
have

    x   = (x_i + x_j) / 2, or x_j, for parts of x and each partner in turn, from x = y
    mix = y - alpha * (y - x)                            (x itself where alpha is 1)

in place of s and mix. No multiply is fused with an add, so that CPUs and GPUs agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from peerloom.optim.gasloc_stacked import Momentum, check_hyperparameters, gossip_round, simulate_gossip

__all__ = ["Buffers", "GASLoC", "Momentum", "check_hyperparameters", "gossip_round", "simulate_gossip"]

CPU_CHUNK = 1 << 16  # elements mixed at a time, four fp32 scratch pieces: 1 MiB
ACCELERATOR_CHUNK = 1 << 21  # larger, since each piece costs a few kernel launches: 32 MiB

_Phase = Literal["between rounds", "in local steps", "at the exchange"]


class Buffers(NamedTuple):
    """Memory for GASLoC's two copies of the model: flat fp32, one the length of the parameters each."""

    theta: Tensor
    previous: Tensor


class GASLoC:
    """One worker's outer optimizer: `start_round()`, local steps on `params`, `proposal()`, exchange, `mix(...)`.

    `params` is the flat fp32 tensor that the model's parameters are views of: y and the next theta are then written in
    place, and the memory beyond it is `theta`, `previous` and about 1 MiB (32 MiB on an accelerator). Tensors of other
    shapes and dtypes, or several, work too, at the price of one more fp32 copy. `buffers` gives the memory for theta
    and previous, in shared memory for instance; both are overwritten. Arithmetic is in fp32 throughout. A fragment of
    the model with rounds of its own is a GASLoC over a slice of the flat tensor.

    `theta` (the point this round started from) and `previous` stay constant from `start_round` to `mix`. Raises
    ValueError for hyper-parameters outside eta > 0, alpha > 0, 0 <= gamma < 1, momentum "pre" or "post", and for
    tensors that do not fit; RuntimeError for a call out of order.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        *,
        eta: float,
        alpha: float,
        gamma: float,
        momentum: Momentum = "pre",
        buffers: Buffers | tuple[Tensor, Tensor] | None = None,
    ) -> None:
        check_hyperparameters(eta=eta, alpha=alpha, gamma=gamma, momentum=momentum)
        self.eta, self.alpha, self.gamma, self.momentum = eta, alpha, gamma, momentum
        self._y, self._scattered = _flat_or_gathered(params)
        self._gather()
        if buffers is None:
            buffers = Buffers(torch.empty_like(self._y), torch.empty_like(self._y))
        self.theta, self.previous = (tensor.detach() for tensor in buffers)
        for name, tensor in (("theta", self.theta), ("previous", self.previous)):
            _check_buffer(name, tensor, self._y)
        self._term: Tensor | None = None  # s, of the neighbours taken one by one
        self._before: Tensor | None = None  # y, once x stands in its place
        self._own: Tensor | None = None  # y as the others decode it, if not as it is
        self._phase: _Phase = "between rounds"
        self.theta.copy_(self._y)
        self.previous.copy_(self._y)

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return self._y.numel()

    def start_round(self) -> None:
        """Takes the parameters as they stand for this round's theta."""
        self._expect("between rounds", "start_round")
        self._gather()
        self.theta.copy_(self._y)
        self._phase = "in local steps"

    def proposal(self) -> Tensor:
        """Ends the local steps: y, flat fp32, to be sent and left unchanged until `mix`; flat `params` now hold it."""
        self._expect("in local steps", "proposal")
        self._gather()
        for chunk in _chunks(self._y):
            y, theta = self._y[chunk], self.theta[chunk]
            y.sub_(theta).mul_(self.eta).add_(theta)
        self._phase = "at the exchange"
        return self._y

    def take(self, weight: float, y_j: Tensor, own: Tensor | None = None) -> None:
        """Adds a neighbour's term to those of `mix`: for several that come one after the other. Costs one model copy.

        Nothing of y_j is kept; `own` as in `mix`.
        """
        self._expect("at the exchange", "take")
        self._check_neighbor(weight, y_j, own)
        if self._before is not None:
            raise RuntimeError("take() adds to terms of y, which average() has changed")
        fresh = self._term is None
        if self._term is None:
            self._term = torch.empty_like(self._y)
        for chunk in _chunks(self._y):
            part = self._part(chunk, weight, y_j, own)
            self._term[chunk] = part if fresh else self._term[chunk].add_(part)

    def average(
        self,
        x_j: Tensor,
        part: slice = slice(None),
        *,
        replace: bool = False,
        own: Tensor | None = None,
        share: float = 1.0,
    ) -> Tensor:
        """Averages a part of x with a group member's, or replaces it by theirs; x starts as y. Costs one model copy.

        Only `share` of the way there, where that is less than 1.

        log2(g) averages of the whole in turn, or as many over halves of halves and then the replacements that bring the
        other halves back, give a group of g its exact mean, the same bits at all. Returns x, to be sent on. `own` is
        the proposal as the others decode it where the encoding loses bits (one copy more): x then starts as `own`, and
        the caller writes back what the others decode of each average; y keeps what the encoding drops.
        """
        self._expect("at the exchange", "average")
        if self._term is not None:
            raise RuntimeError("average() changes y, to whose terms take() has added")
        if self._before is None:
            self._before = self._y.clone()
            if own is not None:
                _check_flat("own", own, self.numel)
                self._own = _fp32(own, self._y).clone()
                self._y.copy_(self._own)
        _check_flat("a member's part", x_j, self._y[part].numel())
        mine = self._y[part]
        for chunk in _chunks(mine):
            x, other = mine[chunk], _fp32(x_j[chunk], mine)
            if share < 1:
                x.lerp_(other, share if replace else share / 2)
            elif replace:
                x.copy_(other)
            else:
                x.add_(other).mul_(0.5)
        return self._y

    @property
    def averaged(self) -> tuple[Tensor, Tensor] | None:
        """(y as the others know it, x) once `average` was called in this round."""
        if self._before is None:
            return None
        return self._before if self._own is None else self._own, self._y

    def mix(
        self, neighbors: Sequence[tuple[float, Tensor]], own: Tensor | None = None, share: float = 1.0
    ) -> None:
        """Ends the round: params and theta become the next theta; after `average`, y moves only `share` of the way.

        `neighbors` are (lambda_ij, y_j) of this round, y_j flat, of any float dtype and device; none when the edge was
        dropped, which must then hold at its other end too. `own` is the proposal as the peers decoded it where the
        encoding loses bits: the mixing term is then alpha / 2 sum lambda (own - y_j), equal and opposite at both ends,
        and all the rest keeps y.
        """
        self._expect("at the exchange", "mix")
        for weight, y_j in neighbors:
            self._check_neighbor(weight, y_j, own)
        if self._before is None:
            return self._end_round(lambda chunk: self._draw_to_neighbors(chunk, neighbors, own))
        if neighbors:
            raise RuntimeError("mix() takes no neighbours after average()")
        x, seen = self._before, self._own
        for chunk in _chunks(self._y):  # y and x back in their places
            held = self._y[chunk].clone()
            self._y[chunk], x[chunk] = x[chunk], held
        self._end_round(lambda chunk: self._draw_to_mean(chunk, x, seen, share))

    def mix_mean(self, mean: Tensor, own: Tensor | None = None) -> None:
        """Ends the round with the mean over a group that this worker is in: mix = y - alpha (y - mean).

        It is `mix` with weight 2 / g for each of the g - 1 others. With alpha = 1 and no `own`, mix is `mean` bit for
        bit, so that "post" workers whose `previous` agrees stay equal. `mean` and `own` as in `mix`.
        """
        self._expect("at the exchange", "mix_mean")
        _check_flat("mean", mean, self.numel)
        if own is not None:
            _check_flat("own", own, self.numel)
        self._end_round(lambda chunk: self._draw_to_mean(chunk, mean, own))

    def adopt(self, theta: Tensor) -> None:
        """Starts over from another worker's theta (flat): params = theta = previous; a round under way is dropped."""
        _check_flat("theta", theta, self.numel)
        self._restore(theta, theta)

    def state_dict(self) -> dict[str, Any]:
        """The state at the start of the current round, whatever its phase; the tensors are not copied."""
        return {"theta": self.theta, "previous": self.previous, "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up `state_dict()`'s state: params = theta. ValueError if it is of another size or momentum variant."""
        missing = {"theta", "previous", "momentum"} - state.keys()
        if missing:
            raise ValueError(f"the state has no {', '.join(sorted(missing))}")
        if state["momentum"] != self.momentum:
            raise ValueError(
                f'the state was made with momentum "{state["momentum"]}", this run has "{self.momentum}":'
                " its previous iterate means something else"
            )
        for name in ("theta", "previous"):
            _check_flat(f"the state's {name}", state[name], self.numel)
        self._restore(state["theta"], state["previous"])

    def _end_round(self, mix: Callable[[slice], None]) -> None:
        """`mix` turns a chunk of y into mix; momentum and the next theta are the same for all forms of mixing."""
        for chunk in _chunks(self._y):
            y, previous = self._y[chunk], self.previous[chunk]
            if self.momentum == "pre":
                push = (y - previous).mul_(self.gamma)
                previous.copy_(y)
                mix(chunk)
            else:
                mix(chunk)
                push = (y - previous).mul_(self.gamma)
                previous.copy_(y)
            y.add_(push)
            self.theta[chunk].copy_(y)
        self._scatter()
        self._drop_round()

    def _draw_to_neighbors(self, chunk: slice, neighbors: Sequence[tuple[float, Tensor]], own: Tensor | None) -> None:
        y = self._y[chunk]
        term = None if self._term is None else self._term[chunk]
        for weight, y_j in neighbors:
            part = self._part(chunk, weight, y_j, own)
            term = part if term is None else term.add_(part)
        if term is not None:
            y.sub_(term.mul_(self.alpha))

    def _draw_to_mean(self, chunk: slice, mean: Tensor, own: Tensor | None, share: float = 1.0) -> None:
        y = self._y[chunk]
        target = _fp32(mean[chunk], y)
        if own is None and self.alpha * share == 1:
            y.copy_(target)
        else:
            y.sub_(((y if own is None else _fp32(own[chunk], y)) - target).mul_(self.alpha * share))

    def _part(self, chunk: slice, weight: float, y_j: Tensor, own: Tensor | None) -> Tensor:
        seen = self._y[chunk] if own is None else _fp32(own[chunk], self._y)
        return (seen - _fp32(y_j[chunk], self._y)).mul_(weight / 2)

    def _check_neighbor(self, weight: float, y_j: Tensor, own: Tensor | None) -> None:
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"a neighbour's weight is {weight}; it must be positive and finite")
        _check_flat("a neighbour's proposal", y_j, self.numel)
        if own is not None:
            _check_flat("own", own, self.numel)

    def _drop_round(self) -> None:
        self._term = self._before = self._own = None
        self._phase = "between rounds"

    def _restore(self, theta: Tensor, previous: Tensor) -> None:
        self.previous.copy_(previous)
        self.theta.copy_(theta)
        self._y.copy_(self.theta)
        self._scatter()
        self._drop_round()

    def _expect(self, phase: _Phase, call: str) -> None:
        if self._phase != phase:
            raise RuntimeError(f"{call}() is for a worker {phase}; this one is {self._phase}")

    def _gather(self) -> None:
        for view, tensor in self._pieces():
            view.copy_(tensor)

    def _scatter(self) -> None:
        for view, tensor in self._pieces():
            tensor.copy_(view)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for tensor in self._scattered:
            yield self._y[start : start + tensor.numel()].view(tensor.shape), tensor
            start += tensor.numel()


def _flat_or_gathered(params: Tensor | Iterable[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The flat fp32 tensor to compute in, and the tensors it is gathered from and scattered to, if not `params`."""
    if isinstance(params, Tensor):
        flat = params.detach()
        if flat.dim() == 1 and flat.dtype == torch.float32 and flat.is_contiguous():
            return flat, []
        params = [params]
    tensors = [tensor.detach() for tensor in params]
    if not tensors:
        raise ValueError("params is empty")
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"params must be floating point, got {tensor.dtype}")
    total = sum(tensor.numel() for tensor in tensors)
    return torch.empty(total, dtype=torch.float32, device=tensors[0].device), tensors


def _check_flat(name: str, tensor: Tensor, numel: int) -> None:
    if tensor.dim() != 1 or tensor.numel() != numel or not tensor.is_floating_point():
        raise ValueError(
            f"{name} must be flat floating point with {numel} elements,"
            f" not {tensor.dtype} of shape {tuple(tensor.shape)}"
        )


def _check_buffer(name: str, tensor: Tensor, like: Tensor) -> None:
    _check_flat(f"buffer {name}", tensor, like.numel())
    if tensor.dtype != torch.float32 or tensor.device != like.device:
        raise ValueError(f"buffer {name} must be float32 on {like.device}, not {tensor.dtype} on {tensor.device}")


def _chunks(flat: Tensor) -> Iterator[slice]:
    """Slices of the flat tensor that bound the scratch memory of a pass over it."""
    size = CPU_CHUNK if flat.device.type == "cpu" else ACCELERATOR_CHUNK
    return (slice(start, start + size) for start in range(0, flat.numel(), size))


def _fp32(piece: Tensor, like: Tensor) -> Tensor:
    return piece.detach().to(like.device, torch.float32)
