"""The last decoder layer over examples that stay: what a SubCGE step needs, at the least cost.

The inputs of q, k and v never change, and within a period their weights only move by left^T A right. So W x at the
period's start and right x are computed once a period, and a step works in the subspace: r columns for a token instead
of d. What comes after attention is computed for the last position alone, of all clients and both signs in one pass.

Shapes: s signs (1, or 2: plus, minus), c clients, e rows of each, n = c e rows, t positions, g key groups, h heads of
each, d the head's size, r the rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerloom.optim.subcge import FRACTION_BITS, SubCGE
from peerloom.optim.subcge_estimate import fixed
from tests.benchmarks.seedflow_upper import Cached, LastInputs, UpperLayers, rotated

CACHED = ("q_proj", "k_proj", "v_proj")


@dataclass(slots=True)
class Projection:
    """W x of one matrix for all examples: `start` (examples, t, rows) when the period began, the rest since then.

    `places` (examples, t, r) is right x, `moved` (r, rows) takes it to the change of W x; None while nothing moves.
    """

    start: Tensor
    places: Tensor
    left: Tensor | None = None
    moved: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Rank-one directions of one matrix, of each client: u (c, rows), v (c, columns), and v's number q (c,)."""

    u: Tensor
    v: Tensor
    q: Tensor
    signed: Tensor  # (2,): eps and -eps

    @classmethod
    def of(cls, flow: SubCGE, name: str, p: Tensor, q: Tensor) -> Change:
        """The places' directions."""
        subspace = flow.subspace(name)
        return cls(subspace.left[p], subspace.right[q], q, torch.tensor([flow.eps, -flow.eps]))

    def along(self, places: Tensor) -> Tensor:
        """(c, e, t): v . x, of places (n, t, r)."""
        split = places.unflatten(0, (len(self.q), -1))
        return split.gather(3, self.q.view(-1, 1, 1, 1).expand(*split.shape[:3], 1)).squeeze(3)


class LastLayer:
    """An `UpperLayers` of one layer over fixed examples: the same logits, from its weights and a SubCGE's sums.

    `weight` is what a unit of a scalar weighs, the learning rate of one message over 2^FRACTION_BITS. `begin` when a
    period begins, `follow` when messages were applied.
    """

    def __init__(self, upper: UpperLayers, data: Cached, weight: float = 0.0) -> None:
        (layer,) = upper.layers
        self._layer: Any = layer
        self._upper: Any = upper
        self._weight = weight
        made = LastInputs.of(upper, data)
        self._inputs, self._last, self._normed_last = made.normed, made.last, made.normed_last.unsqueeze(1)
        self._cos, self._sin = made.cos, made.sin  # (t, d)
        self.lengths, self.labels = data.lengths, data.labels
        self._projections: dict[str, Projection] = {}
        self.begin()

    def begin(self, flow: SubCGE | None = None) -> None:
        """Computes q, k and v of all examples anew, and their places in the subspaces that now hold."""
        for name in CACHED:
            inputs = self._normed_last if name == "q_proj" else self._inputs
            whole = _name(name)
            with torch.no_grad():
                start = F.linear(inputs, self._layer.self_attn.get_submodule(name).weight)
                if name == "k_proj":
                    start = self._rotated(self._grouped(start)).flatten(2)
                made = Projection(start, inputs[..., :0])
                if flow is not None and whole in flow.names:
                    subspace = flow.subspace(whole)
                    made.places, made.left = inputs @ subspace.right.T, subspace.left
            self._projections[name] = made

    def follow(self, flow: SubCGE, period: int) -> None:
        """Takes over the sums of the period, which was empty at `begin`."""
        for name, made in self._projections.items():
            if made.left is not None:
                sums = flow.state.sums[period][flow.matrices.index(_name(name))]
                made.moved = (sums.T.double() * -self._weight).float() @ made.left

    def logits(self, rows: Tensor) -> Tensor:
        """(n, labels) of these examples."""
        with torch.no_grad():
            return self._rest(rows, {}, 1)

    def measure(self) -> tuple[float, float]:
        """(loss, accuracy) over all examples."""
        scores = torch.cat([self.logits(rows) for rows in torch.arange(len(self.labels)).split(128)])
        right = (scores.argmax(1) == self.labels).float().mean()
        return float(F.cross_entropy(scores, self.labels)), float(right)

    def estimate(self, flow: SubCGE, rows: Tensor, seeds: Sequence[int], share: float = 1.0) -> list[int]:
        """What `flow.estimate` gives for each seed on its equal share of the rows."""
        changes = {name: Change.of(flow, name, p, q) for name, (p, q) in flow.places(seeds).items()}
        with torch.no_grad():
            labels = self.labels[rows].repeat(2)
            losses = F.cross_entropy(self._rest(rows, changes, 2), labels, reduction="none")
        plus, minus = losses.view(2, len(seeds), -1).mean(2)
        slopes = ((plus - minus) / (2 * flow.eps)).tolist()
        return [fixed(slope, flow.state.bound, FRACTION_BITS, share) for slope in slopes]

    def _rest(self, rows: Tensor, changes: Mapping[str, Change], signs: int) -> Tensor:
        """(s n, labels)."""
        mlp = self._layer.mlp
        mixed = self._attention(rows, changes, signs)
        last = self._last[rows].repeat(signs, 1)
        last = last + _linear(self._layer.self_attn.o_proj, mixed, changes.get(_name("o_proj")))
        normed = self._layer.post_attention_layernorm(last)
        gate = _linear(mlp.gate_proj, normed, changes.get(_name("gate_proj", "mlp")))
        up = _linear(mlp.up_proj, normed, changes.get(_name("up_proj", "mlp")))
        last = last + _linear(mlp.down_proj, mlp.act_fn(gate).mul_(up), changes.get(_name("down_proj", "mlp")))
        return F.linear(self._upper.norm(last), self._upper.words)

    def _attention(self, rows: Tensor, changes: Mapping[str, Change], signs: int) -> Tensor:
        """(s n, g h d): what the last positions gather; k and v are the same for both signs, but for the changes."""
        lengths = self.lengths[rows]
        width = int(lengths.max())
        q = self._queries(rows, changes.get(_name("q_proj")), signs)
        scores = self._scores(q, rows, width, changes.get(_name("k_proj")))
        seen = (torch.arange(width) < lengths.unsqueeze(1)).view(-1, 1, 1, width)
        shares = scores.mul_(self._upper.head_dim**-0.5).masked_fill_(~seen, -torch.inf).softmax(4)
        return self._mixed(shares, rows, changes.get(_name("v_proj"))).flatten(2).flatten(0, 1)

    def _queries(self, rows: Tensor, change: Change | None, signs: int) -> Tensor:
        """(s, n, g, h, d)."""
        made = self._projections["q_proj"]
        found = made.start[rows]
        if made.moved is not None:
            found = found + made.places[rows] @ made.moved
        q = found.squeeze(1).expand(signs, -1, -1)
        if change is not None:
            along = change.along(made.places[rows]).squeeze(2)
            q = q + torch.einsum("s,ce,cm->scem", change.signed, along, change.u).flatten(1, 2)
        groups = self._projections["k_proj"].start.shape[2] // self._upper.head_dim
        at = self.lengths[rows] - 1
        shape = (-1, 1, 1, self._upper.head_dim)
        return rotated(q.unflatten(2, (groups, -1, shape[-1])), self._cos[at].view(shape), self._sin[at].view(shape))

    def _scores(self, q: Tensor, rows: Tensor, width: int, change: Change | None) -> Tensor:
        """(s, n, g, h, t)."""
        made = self._projections["k_proj"]
        k = self._grouped(made.start[rows, :width])
        places = made.places[rows, :width]
        if made.moved is not None:
            k = k + self._rotated(self._grouped(places @ made.moved))
        scores = torch.einsum("snghd,ntgd->snght", q, k)
        if change is not None:
            u = self._rotated(self._grouped(change.u.unsqueeze(1)).expand(-1, width, -1, -1))
            own = torch.einsum("sceghd,ctgd->sceght", q.unflatten(1, (len(u), -1)), u)
            weight = torch.einsum("s,cet->scet", change.signed, change.along(places))
            scores += own.mul_(weight[:, :, :, None, None]).flatten(1, 2)
        return scores

    def _mixed(self, shares: Tensor, rows: Tensor, change: Change | None) -> Tensor:
        """(s, n, g, h, d): the values of the positions, by their shares (s, n, g, h, t)."""
        made, width = self._projections["v_proj"], shares.shape[4]
        mixed = torch.einsum("snght,ntgd->snghd", shares, self._grouped(made.start[rows, :width]))
        places = made.places[rows, :width]
        if made.moved is not None:
            gathered = torch.einsum("snght,ntr->snghr", shares, places)
            mixed += torch.einsum("snghr,rgd->snghd", gathered, self._grouped(made.moved))
        if change is not None:
            along = torch.einsum("sceght,cet->scegh", shares.unflatten(1, (len(change.u), -1)), change.along(places))
            mixed += torch.einsum("s,scegh,cgd->sceghd", change.signed, along, self._grouped(change.u)).flatten(1, 2)
        return mixed

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._upper.head_dim))

    def _rotated(self, x: Tensor) -> Tensor:
        """Of (n, t, g, d), the positions from 0."""
        width = x.shape[1]
        return rotated(x, self._cos[:width, None], self._sin[:width, None])


def _name(matrix: str, part: str = "self_attn") -> str:
    return f"layers.0.{part}.{matrix}.weight"


def _linear(module: nn.Module, x: Tensor, change: Change | None) -> Tensor:
    """W x of (s n, columns), and with a change + eps (v . x) u for the plus half, - eps (v . x) u for the other."""
    weight: Any = module.weight
    found = F.linear(x, weight)
    if change is not None:
        split = x.view(2, len(change.u), -1, x.shape[1])
        along = torch.einsum("scen,cn,s->sce", split, change.v, change.signed)
        found.view(2, len(change.u), -1, found.shape[1]).addcmul_(along.unsqueeze(3), change.u.unsqueeze(1))
    return found
