"""MeZO's estimates of all clients on the last decoder layer, without touching a weight.

(W + eps Z) x = W x + eps Z x: so W x is computed once for all clients and both signs, and Z x for a client from where
its direction lies. Less is rounded than where eps Z is added to the weights and taken off again.

Shapes: c clients, s signs (1 where the input is the same for both, else 2: plus, minus), e rows of each client, t
positions, g key groups, h heads of each, d the head's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks.seedflow_upper import Cached, LastInputs, UpperLayers, rotated

Directions = Sequence[Mapping[str, Tensor]]  # of each client: Z by the parameter's name


class TableLast:
    """An `UpperLayers` of one layer over fixed examples, and what it loses to either side of its weights."""

    def __init__(self, upper: UpperLayers, data: Cached) -> None:
        (layer,) = upper.layers
        self._layer: Any = layer
        self._upper: Any = upper
        self._inputs = LastInputs.of(upper, data)
        self._lengths, self._labels = data.lengths, data.labels

    def slopes(self, rows: Tensor, directions: Directions, eps: float) -> list[float]:
        """(f(W + eps Z) - f(W - eps Z)) / 2 eps of each client on its rows (c, e)."""
        with torch.no_grad():
            logits = self._logits(rows, directions, eps)
        labels = self._labels[rows].unsqueeze(1).expand(-1, 2, -1)
        losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
        plus, minus = losses.mean(2).unbind(1)
        found: list[float] = ((plus - minus) / (2 * eps)).tolist()
        return found

    def _logits(self, rows: Tensor, directions: Directions, eps: float) -> Tensor:
        """(c, 2, e, labels)."""

        def linear(x: Tensor, part: str, name: str) -> Tensor:
            """(c, 2, ...) of x (c, s, ...)."""
            weight = self._layer.get_submodule(part).get_submodule(name).weight
            found = F.linear(x, weight).expand(-1, 2, *x.shape[2:-1], -1).contiguous()
            for client, z in enumerate(directions):
                if (direction := z.get(f"layers.0.{part}.{name}.weight")) is not None:
                    moved = F.linear(x[client], direction)
                    found[client, 0].add_(moved[0], alpha=eps)
                    found[client, 1].sub_(moved[-1], alpha=eps)
            return found

        mlp, made = self._layer.mlp, self._inputs
        normed = made.normed[rows, : int(self._lengths[rows].max())].unsqueeze(1)
        q = self._heads(linear(made.normed_last[rows].unsqueeze(1), "self_attn", "q_proj"))
        k, v = (self._heads(linear(normed, "self_attn", name)) for name in ("k_proj", "v_proj"))
        mixed = self._attention(rows, q, k, v)
        last = made.last[rows].unsqueeze(1) + linear(mixed, "self_attn", "o_proj")
        normed = self._layer.post_attention_layernorm(last)
        inner = mlp.act_fn(linear(normed, "mlp", "gate_proj")).mul_(linear(normed, "mlp", "up_proj"))
        return F.linear(self._upper.norm(last + linear(inner, "mlp", "down_proj")), self._upper.words)

    def _attention(self, rows: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(c, 2, e, g h d) for the last positions: q (c, 2, e, g h, d), k and v (c, 2, e, t, g, d)."""
        groups, width = k.shape[4], k.shape[3]
        ends = self._lengths[rows] - 1
        cos, sin = (table[ends].unsqueeze(1).unsqueeze(3) for table in (self._inputs.cos, self._inputs.sin))
        q = rotated(q, cos, sin).unflatten(3, (groups, -1))
        k = rotated(k, self._inputs.cos[:width, None], self._inputs.sin[:width, None])
        scores = torch.einsum("csegxd,csetgd->csegxt", q, k).mul_(self._upper.head_dim**-0.5)
        unseen = (torch.arange(width) > ends.unsqueeze(2)).view(len(rows), 1, -1, 1, 1, width)
        shares = scores.masked_fill_(unseen, -torch.inf).softmax(5)
        return torch.einsum("csegxt,csetgd->csegxd", shares, v).flatten(3)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._upper.head_dim))
