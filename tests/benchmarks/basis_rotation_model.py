"""Many runs of a small GPT in one process: parameters stacked over runs, kept by pipeline stage.

The model of the paper's code, made small: learned positions, separate query, key, value and output matrices without
bias, ReLU, an untied head, N(0, 0.02). The logits carry a fixed bias, the log frequency of each byte in the text: else
the start, in which every method learns just that, would be a good part of a short run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks.gasloc_model import Text

VOCABULARY = 256
Leaves = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """The model and its batch."""

    width: int = 32
    layers: int = 4
    heads: int = 2
    hidden: int = 96
    length: int = 32
    batch: int = 3

    def stages(self) -> list[list[tuple[str, tuple[int, ...]]]]:
        """(name, shape) of each stage's parameters: embeddings, then one stage a block, then the head."""
        w, h = self.width, self.hidden
        stages: list[list[tuple[str, tuple[int, ...]]]] = [[("embed", (VOCABULARY, w)), ("places", (self.length, w))]]
        for k in range(self.layers):
            matrices = [(f"{k}.{name}", (w, w)) for name in ("q", "k", "v", "out")]
            matrices += [(f"{k}.up", (h, w)), (f"{k}.down", (w, h))]
            stages.append([*matrices, (f"{k}.norm1", (w,)), (f"{k}.norm2", (w,))])
        return [*stages, [("norm", (w,)), ("head", (VOCABULARY, w))]]

    def numel(self) -> int:
        return sum(math.prod(shape) for stage in self.stages() for _, shape in stage)

    def delays(self, depth: int) -> list[int]:
        """Of each stage as if `depth` stages lay over the blocks: the embeddings go with the first, the head with the
        last, which has none."""
        last = max(1, self.layers - 1)
        blocks = [round((depth - 1) * (last - k) / last) for k in range(self.layers)]
        return [depth - 1, *blocks, 0]


class StackedRuns:
    """`flats[k]` (runs, numel of stage k) holds the weights, `gradients[k]` their gradients."""

    def __init__(self, size: Size, seeds: Sequence[int], frequencies: Tensor) -> None:
        self.size = size
        self.count = len(seeds)
        self._bias = frequencies.log()
        starts = {seed: initial(size, seed) for seed in set(seeds)}
        self.flats = [torch.stack([starts[seed][k] for seed in seeds]) for k in range(len(size.stages()))]
        self.gradients = [torch.zeros_like(flat) for flat in self.flats]
        self._leaves = self._views(self.flats)
        for leaf in self._leaves.values():
            leaf.requires_grad_()

    def loss(self, tokens: Tensor) -> Tensor:
        """The sum over runs of the mean cross-entropy, tokens (runs, batch, length + 1)."""
        return forward(self._leaves, self.size, tokens, self._bias).sum()

    def take_gradients(self) -> None:
        """Moves what autograd left in the leaves into `gradients`."""
        for name, slot in self._views(self.gradients).items():
            leaf = self._leaves[name]
            assert leaf.grad is not None
            slot.copy_(leaf.grad)
            leaf.grad = None

    def clip(self, most: float) -> None:
        """Scales each run's gradient of each stage to a norm of at most `most`, matrices of blocks and others apart, as
        the paper's code does: no norm over stages exists in a pipeline."""
        for gradient, stage in zip(self.gradients, self.size.stages(), strict=True):
            cut = sum(math.prod(shape) for name, shape in stage if is_rotated(name))
            for part in (gradient[:, :cut], gradient[:, cut:]):
                norm = part.norm(dim=1, keepdim=True)
                part.mul_((most / (norm + 1e-6)).clamp(max=1.0))

    def parameters(self, run: int, stage: int, *, rotated: bool) -> list[Tensor]:
        """One run's parameters of a stage, views of `flats`, with `.grad` a view of `gradients`.

        With `rotated`, its blocks' matrices (none where there are no blocks); those are left out of the others, which
        come as one flat piece, since what treats elements alike need not know shapes.
        """
        layout = self.size.stages()[stage]
        cut = sum(math.prod(shape) for name, shape in layout if is_rotated(name))
        pieces: list[tuple[slice, tuple[int, ...]]] = []
        if rotated:
            start = 0
            for name, shape in layout:
                if is_rotated(name):
                    pieces.append((slice(start, start + math.prod(shape)), shape))
                    start += math.prod(shape)
        else:
            pieces.append((slice(cut, None), (-1,)))
        return [self._piece(run, stage, part, shape) for part, shape in pieces]

    def whole(self, run: int, stage: int) -> Tensor:
        """One run's parameters of a stage in one flat piece."""
        return self._piece(run, stage, slice(None), (-1,))

    def _piece(self, run: int, stage: int, part: slice, shape: tuple[int, ...]) -> Tensor:
        piece = self.flats[stage][run, part].view(shape)
        piece.grad = self.gradients[stage][run, part].view(shape)
        return piece

    @torch.no_grad()
    def evaluate(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy (runs,) on the same windows (count, length + 1) for all."""
        return forward(self._leaves, self.size, windows.expand(self.count, *windows.shape), self._bias)

    def _views(self, flats: Sequence[Tensor]) -> Leaves:
        views: Leaves = {}
        for flat, stage in zip(flats, self.size.stages(), strict=True):
            start = 0
            for name, shape in stage:
                stop = start + math.prod(shape)
                views[name] = flat[:, start:stop].view(len(flat), *shape)
                start = stop
        return views


def is_rotated(name: str) -> bool:
    """The linear weights of the blocks; embeddings, head and norms are not."""
    return "." in name and "norm" not in name


def initial(size: Size, seed: int) -> list[Tensor]:
    """The weights of each stage, flat."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.cat([
            torch.ones(shape) if "norm" in name else (torch.randn(shape, generator=generator) * 0.02).flatten()
            for name, shape in stage
        ])
        for stage in size.stages()
    ]  # fmt: skip


def byte_frequencies(text: Text) -> Tensor:
    """(256,) of the training text, each byte counted once more than it stands there."""
    counts = torch.bincount(text.train.long(), minlength=VOCABULARY).float() + 1
    return counts / counts.sum()


def forward(p: Leaves, size: Size, tokens: Tensor, bias: Tensor) -> Tensor:
    """Mean cross-entropy of each run."""
    n, batch, _ = tokens.shape
    source, target = tokens[:, :, :-1], tokens[:, :, 1:]
    length, rows = source.shape[2], batch * source.shape[2]
    offsets = torch.arange(n)[:, None] * VOCABULARY
    x = F.embedding(source.reshape(n, rows) + offsets, p["embed"].reshape(n * VOCABULARY, size.width))
    x = (x.view(n, batch, length, -1) + p["places"][:, None, :length]).view(n, rows, -1)
    for k in range(size.layers):
        normed = _norm(x, p[f"{k}.norm1"])
        q, key, value = (_heads(torch.bmm(normed, p[f"{k}.{name}"].mT), size, n * batch) for name in "qkv")
        mixed = F.scaled_dot_product_attention(q, key, value, is_causal=True)
        x = x + torch.bmm(mixed.transpose(1, 2).reshape(n, rows, -1), p[f"{k}.out"].mT)
        inner = torch.bmm(_norm(x, p[f"{k}.norm2"]), p[f"{k}.up"].mT).relu()
        x = x + torch.bmm(inner, p[f"{k}.down"].mT)
    logits = torch.bmm(_norm(x, p["norm"]), p["head"].mT) + bias
    each = F.cross_entropy(logits.view(n * rows, -1), target.reshape(-1), reduction="none")
    return each.view(n, rows).mean(1)


def _heads(x: Tensor, size: Size, sequences: int) -> Tensor:
    return x.view(sequences, -1, size.heads, size.width // size.heads).transpose(1, 2)


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],)) * scale[:, None]
