"""The upper layers of a Llama over cached activations of the frozen lower ones, for prompts scored at their last token.

The layers are the model's own modules. Below the last one, all positions are computed; in the last one, keys and values
for all positions and the rest for the last position alone, which is all that the label words are read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerloom.node.worker.classification import Batch, Example, PromptClassifier


@dataclass(frozen=True, slots=True)
class Cached:
    """What the lower layers give for examples: hidden (n, T, d), padded on the left; lengths (n,); labels (n,)."""

    hidden: Tensor
    lengths: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, rows: Tensor) -> Cached:
        """Some rows, without columns that none of them fills."""
        lengths = self.lengths[rows]
        hidden = self.hidden[rows, self.hidden.shape[1] - int(lengths.max()) :].float()
        return Cached(hidden, lengths, self.labels[rows])


class UpperLayers(nn.Module):
    """The top `count` decoder layers, the final norm, and the frozen rows of the label words. (n, labels) logits."""

    def __init__(self, model: Any, count: int, label_tokens: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(list(model.model.layers)[-count:])
        self.norm = model.model.norm
        self.rotary = model.model.rotary_emb
        self.register_buffer("words", model.lm_head.weight.detach()[label_tokens].clone())
        self.head_dim = model.model.layers[0].self_attn.head_dim

    def forward(self, batch: Cached) -> Tensor:
        hidden = batch.hidden
        width = hidden.shape[1]
        columns = torch.arange(width)
        padding = width - batch.lengths.unsqueeze(1)
        angles = self.rotary(hidden, (columns - padding).clamp_min(0))
        seen = (columns >= padding).view(-1, 1, 1, width)
        causal = columns.view(-1, 1) >= columns
        own = torch.eye(width, dtype=torch.bool)  # a padded row attends to itself: softmax of nothing is no number
        for layer in self.layers[:-1]:
            hidden = self._layer(layer, hidden, hidden, angles, (seen & causal) | own)
        last = self._layer(self.layers[-1], hidden[:, -1:], hidden, angles, seen)
        return F.linear(self.norm(last[:, 0]), self.words)

    def _layer(
        self, layer: Any, rows: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """One decoder layer for the last `rows` of `hidden`."""
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        count = rows.shape[1]
        q = self._rotate(self._heads(attention.q_proj(normed[:, -count:])), angles, count)
        k = self._rotate(self._heads(attention.k_proj(normed)), angles, hidden.shape[1])
        v = self._heads(attention.v_proj(normed))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        rows = rows + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return rows + layer.mlp(layer.post_attention_layernorm(rows))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    @staticmethod
    def _rotate(x: Tensor, angles: tuple[Tensor, Tensor], count: int) -> Tensor:
        return rotated(x, *(one[:, None, -count:] for one in angles))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@dataclass(frozen=True, slots=True)
class LastInputs:
    """What the last layer is given for all examples, which never changes: positions from 0, padded on the right.

    `normed` (n, T, d) and `normed_last` (n, d) are behind the layer's first norm, `last` (n, d) before it; `cos` and
    `sin` (T, head's d) are the rotary tables.
    """

    normed: Tensor
    last: Tensor
    normed_last: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, upper: UpperLayers, data: Cached) -> LastInputs:
        """The inputs of an `UpperLayers` of one layer."""
        (layer,) = upper.layers
        norm: Any = layer.input_layernorm
        width = data.hidden.shape[1]
        with torch.no_grad():
            columns = torch.arange(width) + width - data.lengths.unsqueeze(1)  # of each position
            index = columns.clamp_max(width - 1).unsqueeze(2).expand_as(data.hidden)
            normed = norm(data.hidden.gather(1, index))
            last = data.hidden[:, -1].clone()
            cos, sin = upper.rotary(normed, torch.arange(width).unsqueeze(0))
            return cls(normed, last, norm(last), cos[0], sin[0])


def lower_activations(model: Any, count: int, classifier: PromptClassifier, examples: Sequence[Example]) -> Cached:
    """The inputs of the top `count` layers; the layers above are not run. Examples of like length go together."""
    rows = [classifier.batch([one]) for one in examples]
    lengths = torch.cat([row.mask.sum(1) for row in rows])
    hidden = torch.zeros(len(rows), int(lengths.max()), model.config.hidden_size)
    for order in lengths.argsort().split(32):
        batch = classifier.batch([examples[index] for index in order.tolist()])
        found = _below(model, count, batch)
        hidden[order, hidden.shape[1] - found.shape[1] :] = found
    return Cached(hidden, lengths, torch.cat([row.labels for row in rows]))


def save(path: Path, cached: Cached) -> None:
    """Writes the cache whole or not at all."""
    temporary = path.with_suffix(".part")
    torch.save((cached.hidden, cached.lengths, cached.labels), temporary)
    temporary.rename(path)


def load(path: Path) -> Cached:
    """What `save` wrote, mapped into memory."""
    return Cached(*torch.load(path, weights_only=True, mmap=True))


class _Reached(Exception):
    """The first of the upper layers was called."""


def _below(model: Any, count: int, batch: Batch) -> Tensor:
    found: list[Tensor] = []

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    handle = model.model.layers[-count].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            model.model(
                input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
            )
    except _Reached:
        return found[0].float()
    finally:
        handle.remove()
    raise RuntimeError("the model never called its upper layers")
