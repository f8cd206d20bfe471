"""A small Llama whose parameters are stacked over workers, and the text it learns: the source of the standard library.

Every matrix product carries a leading worker dimension, which is what torch.func.vmap over stacked parameters compiles
to; written out it runs 16 workers on one core without a tracing step.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

EMBEDDING = 0.1  # deviation of the embedding at the start; it is the head as well


@dataclass(frozen=True, slots=True)
class Shape:
    """The model: bytes in, bytes out, tied embedding, RMSNorm, rotary positions, SwiGLU."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    hidden: int = 160
    length: int = 64
    vocabulary: int = 256

    def parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) in the order of the flat vector."""
        w, h = self.width, self.hidden
        entries: list[tuple[str, tuple[int, ...]]] = [("embed", (self.vocabulary, w))]
        for k in range(self.layers):
            entries += [(f"{k}.norm1", (w,)), (f"{k}.qkv", (w, 3 * w)), (f"{k}.out", (w, w))]
            entries += [(f"{k}.norm2", (w,)), (f"{k}.up", (w, 2 * h)), (f"{k}.down", (h, w))]
        return [*entries, ("norm", (w,))]

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters())


class Stacked:
    """`flat` (n, numel) fp32: one row a worker; `gradients` alike. Leaves of autograd are views of both."""

    def __init__(self, shape: Shape, n: int, seed: int) -> None:
        self.shape, self.n = shape, n
        self.flat = initial(shape, seed).repeat(n, 1)
        self.gradients = torch.zeros_like(self.flat)
        self._leaves: dict[str, Tensor] = {}
        self._slots: list[Tensor] = []
        start = 0
        for name, size in shape.parameters():
            stop = start + math.prod(size)
            self._leaves[name] = self.flat[:, start:stop].view(n, *size).requires_grad_()
            self._slots.append(self.gradients[:, start:stop].view(n, *size))
            start = stop
        self._angles = rotary(shape)

    def losses_of(self, flat: Tensor, tokens: Tensor) -> Tensor:
        """Mean cross-entropy (m,) of each row of `flat` (m, numel), all on the same tokens (batch, length + 1)."""
        leaves, start = {}, 0
        for name, size in self.shape.parameters():
            stop = start + math.prod(size)
            leaves[name] = flat[:, start:stop].view(len(flat), *size)
            start = stop
        with torch.no_grad():
            return forward(leaves, self.shape, tokens.expand(len(flat), *tokens.shape), self._angles)

    def backward(self, tokens: Tensor) -> Tensor:
        """Fills `gradients` with each worker's own, returns the losses (n,)."""
        losses = forward(self._leaves, self.shape, tokens, self._angles)
        gradients = torch.autograd.grad(losses.sum(), list(self._leaves.values()))
        for slot, gradient in zip(self._slots, gradients, strict=True):
            slot.copy_(gradient)
        return losses.detach()


def initial(shape: Shape, seed: int) -> Tensor:
    """theta_0 (numel,): normal, of deviation 1 / sqrt(inputs) (smaller where it feeds the residual), norms one.

    Not the 0.02 of wide models: at this width little is learnt from there, and losses over the rate have two valleys.
    """
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for name, size in shape.parameters():
        deviation = EMBEDDING if name == "embed" else 1 / math.sqrt(size[0])
        if name.endswith(("out", "down")):
            deviation /= math.sqrt(2 * shape.layers)
        draw = torch.randn(size, generator=generator) * deviation
        pieces.append(torch.ones(size) if "norm" in name else draw)
    return torch.cat([piece.reshape(-1) for piece in pieces])


def rotary(shape: Shape) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (length, head width)."""
    half = shape.width // shape.heads // 2
    angles = torch.arange(shape.length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos(), angles.sin()


def forward(p: dict[str, Tensor], shape: Shape, tokens: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of each worker."""
    n, batch, _ = tokens.shape
    source, target = tokens[:, :, :-1], tokens[:, :, 1:]
    length, rows = source.shape[2], batch * source.shape[2]
    offsets = torch.arange(n)[:, None] * shape.vocabulary
    x = F.embedding((source.reshape(n, rows) + offsets), p["embed"].reshape(n * shape.vocabulary, shape.width))
    for k in range(shape.layers):
        qkv = torch.bmm(_norm(x, p[f"{k}.norm1"]), p[f"{k}.qkv"])
        heads = qkv.view(n * batch, length, 3, shape.heads, -1).permute(2, 0, 3, 1, 4)
        q, key = _turn(heads[0], angles), _turn(heads[1], angles)
        mixed = F.scaled_dot_product_attention(q, key, heads[2], is_causal=True)
        x = x + torch.bmm(mixed.transpose(1, 2).reshape(n, rows, -1), p[f"{k}.out"])
        gate, up = torch.bmm(_norm(x, p[f"{k}.norm2"]), p[f"{k}.up"]).chunk(2, dim=2)
        x = x + torch.bmm(F.silu(gate) * up, p[f"{k}.down"])
    logits = torch.bmm(_norm(x, p["norm"]), p["embed"].transpose(1, 2))
    each = F.cross_entropy(logits.view(n * rows, -1), target.reshape(-1), reduction="none")
    return each.view(n, rows).mean(1)


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-5) * scale[:, None]


def _turn(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat([-second, first], dim=-1) * angles[1]


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on and bytes held out (whole files, every 20th)."""

    train: Tensor
    held_out: Tensor

    def batch(self, n: int, batch: int, length: int, seed: int, step: int) -> Tensor:
        """Tokens (n, batch, length + 1) of one step: the same for every method that is run with this seed."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - length - 1, (n, batch, 1), generator=generator)
        return self.train[starts + torch.arange(length + 1)].long()

    def evaluation(self, length: int, count: int) -> Tensor:
        """`count` windows spread evenly over the held-out text, (count, length + 1)."""
        starts = torch.linspace(0, len(self.held_out) - length - 2, count).long()[:, None]
        return self.held_out[starts + torch.arange(length + 1)].long()


def read_text(limit: int = 4_000_000) -> Text:
    """The standard library's top-level modules in order of name, up to `limit` bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    train: list[bytes] = []
    held_out: list[bytes] = []
    size = 0
    for k, path in enumerate(sorted(folder.glob("*.py"))):
        data = path.read_bytes()
        (held_out if k % 20 == 0 else train).append(data)
        size += len(data)
        if size > limit:
            break
    return Text(*(torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in (train, held_out)))
