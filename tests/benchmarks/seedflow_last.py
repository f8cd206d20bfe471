"""The last decoder layer over examples that stay: what a SubCGE step needs, at the least cost.

The inputs of q, k and v never change, and within a period their weights only move by left^T A right. So W x at the
period's start and right x are computed once a period, and a step works in the subspace: r columns for a token instead
of d. What comes after attention is computed for the last position alone, of all clients and both signs in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerloom.optim.subcge import FRACTION_BITS, SCALAR_LIMIT, SubCGE
from tests.benchmarks.seedflow_upper import Cached, UpperLayers, rotated

CACHED = ("q_proj", "k_proj", "v_proj")


@dataclass(slots=True)
class Projection:
    """W x of one matrix for all examples: `start` (n, t, rows) when the period began, `places` (n, t, r) right x."""

    start: Tensor
    places: Tensor | None = None
    left: Tensor | None = None
    moved: Tensor | None = None

    def of(self, rows: Tensor, width: int) -> Tensor:
        """(k, width, rows) as the weights are now."""
        found = self.start[rows, :width]
        if self.places is None or self.left is None or self.moved is None:
            return found
        return found + self.places[rows, :width] @ (self.moved.T @ self.left)


class LastLayer:
    """An `UpperLayers` of one layer over fixed examples: the same logits, from its weights and a SubCGE's sums.

    `weight` is what a unit of a scalar weighs, the learning rate of one message over 2^FRACTION_BITS. `begin` when a
    period begins, `follow` when messages were applied.
    """

    def __init__(self, upper: UpperLayers, data: Cached, weight: float = 0.0) -> None:
        (self._layer,) = upper.layers
        self._upper, self._weight = upper, weight
        width = data.hidden.shape[1]
        with torch.no_grad():
            columns = torch.arange(width) + width - data.lengths.unsqueeze(1)  # of each position
            index = columns.clamp_max(width - 1).unsqueeze(2).expand_as(data.hidden)
            self._inputs = self._layer.input_layernorm(data.hidden.float().gather(1, index))
            self._last = data.hidden[:, -1].float()
            self._normed_last = self._layer.input_layernorm(self._last).unsqueeze(1)
            self._angles = upper.rotary(self._inputs, torch.arange(width).unsqueeze(0))
        self.lengths, self.labels = data.lengths, data.labels
        self._projections: dict[str, Projection] = {}
        self.begin()

    def begin(self, flow: SubCGE | None = None) -> None:
        """Computes q, k and v of all examples anew, and their places in the subspaces that now hold."""
        for name in CACHED:
            inputs = self._normed_last if name == "q_proj" else self._inputs
            whole = f"layers.0.self_attn.{name}.weight"
            with torch.no_grad():
                made = Projection(F.linear(inputs, self._layer.self_attn.get_submodule(name).weight))
                if flow is not None and whole in flow.names:
                    subspace = flow.subspace(whole)
                    made.places, made.left = inputs @ subspace.right.T, subspace.left
            self._projections[name] = made

    def follow(self, flow: SubCGE, period: int) -> None:
        """Takes over the sums of the period, which was empty at `begin`."""
        for name, made in self._projections.items():
            if made.places is not None:
                index = flow.names.index(f"layers.0.self_attn.{name}.weight")
                made.moved = (flow.state.sums[period][index].double() * -self._weight).float()

    def logits(self, rows: Tensor) -> Tensor:
        """(k, labels) of these examples."""
        with torch.no_grad():
            return self._rest(rows, {}, 1)

    def measure(self) -> tuple[float, float]:
        """(loss, accuracy) over all examples."""
        scores = torch.cat([self.logits(rows) for rows in torch.arange(len(self.labels)).split(128)])
        right = (scores.argmax(1) == self.labels).float().mean()
        return float(F.cross_entropy(scores, self.labels)), float(right)

    def estimate(self, flow: SubCGE, rows: Tensor, seeds: Sequence[int], share: float = 1.0) -> list[int]:
        """What `flow.estimate` gives for each seed on its equal share of the rows."""
        each = len(rows) // len(seeds)
        changes = {
            name.removeprefix("layers.0.").removesuffix(".weight"): Change.of(flow, name, p, q, each)
            for name, (p, q) in flow.places(seeds).items()
        }
        with torch.no_grad():
            labels = self.labels[rows].repeat(2)
            losses = F.cross_entropy(self._rest(rows, changes, 2), labels, reduction="none")
        plus, minus = losses.view(2, len(seeds), each).mean(2)
        slopes = ((plus - minus) / (2 * flow.eps) * share).tolist()
        return [round(max(-SCALAR_LIMIT, min(SCALAR_LIMIT, slope * 2**FRACTION_BITS))) for slope in slopes]

    def _rest(self, rows: Tensor, changes: dict[str, Change], signs: int) -> Tensor:
        """Logits of the rows; with changes (signs = 2) of all at plus, then of all at minus."""
        attention, mlp = self._layer.self_attn, self._layer.mlp
        width = int(self.lengths[rows].max())
        q, k, v = (self._project(name, rows, width, changes, signs) for name in CACHED)
        last = self._last[rows].repeat(signs, 1)
        lengths = self.lengths[rows].repeat(signs)
        mixed = self._attend(q.squeeze(1), k, v, lengths)
        last = last + _linear(attention.o_proj, mixed, changes.get("self_attn.o_proj"))
        normed = self._layer.post_attention_layernorm(last)
        gate = _linear(mlp.gate_proj, normed, changes.get("mlp.gate_proj"))
        up = _linear(mlp.up_proj, normed, changes.get("mlp.up_proj"))
        last = last + _linear(mlp.down_proj, mlp.act_fn(gate).mul_(up), changes.get("mlp.down_proj"))
        return F.linear(self._upper.norm(last), self._upper.words)

    def _project(self, name: str, rows: Tensor, width: int, changes: dict[str, Change], signs: int) -> Tensor:
        made = self._projections[name]
        width = min(width, made.start.shape[1])
        found = made.of(rows, width)
        change = changes.get(f"self_attn.{name}")
        if change is None or made.places is None:
            return found.repeat(signs, 1, 1)
        along = made.places[rows, :width].gather(2, change.q.view(-1, 1, 1).expand(-1, width, 1))
        extra = along * (change.u.unsqueeze(1) * change.eps)
        return torch.cat([found + extra, found - extra])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """(k, d): what the last position of each row gathers."""
        size = self._upper.head_dim
        groups = k.shape[2] // size
        cos, sin = (angle[0] for angle in self._angles)
        at = lengths - 1
        q = rotated(q.unflatten(1, (groups, -1, size)), cos[at].view(-1, 1, 1, size), sin[at].view(-1, 1, 1, size))
        k = rotated(k.unflatten(2, (groups, size)), cos[: k.shape[1], None], sin[: k.shape[1], None])
        scores = q @ k.permute(0, 2, 3, 1) * size**-0.5
        seen = torch.arange(k.shape[1]) < lengths.view(-1, 1, 1, 1)
        shares = scores.masked_fill_(~seen, -torch.inf).softmax(3)
        return (shares @ v.unflatten(2, (groups, size)).transpose(1, 2)).flatten(1)


@dataclass(frozen=True, slots=True)
class Change:
    """Rank-one directions of one matrix for rows: u (k, rows), v (k, columns), and q of v in the subspace."""

    u: Tensor
    v: Tensor
    q: Tensor
    eps: float

    @classmethod
    def of(cls, flow: SubCGE, name: str, p: Tensor, q: Tensor, each: int) -> Change:
        """Each place's, for `each` rows."""
        subspace = flow.subspace(name)
        p, q = p.repeat_interleave(each), q.repeat_interleave(each)
        return cls(subspace.left[p], subspace.right[q], q, flow.eps)


def _linear(module: nn.Module, x: Tensor, change: Change | None) -> Tensor:
    """W x, and for the rows' first half + eps (v . x) u, for the second - eps (v . x) u."""
    weight: Any = module.weight
    found = F.linear(x, weight)
    if change is not None:
        half = len(change.u)
        for part, sign in ((slice(half), 1), (slice(half, None), -1)):
            along = (x[part] * change.v).sum(1, keepdim=True)
            found[part].addcmul_(along, change.u, value=sign * change.eps)
    return found
