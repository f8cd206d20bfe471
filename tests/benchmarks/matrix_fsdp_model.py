"""The decoder that the MatrixFSDP benchmark trains: Llama's blocks in plain torch, on random tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Widths of the decoder and tokens a rank and step."""

    layers: int
    width: int
    mlp: int
    heads: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.layers} blocks, width {self.width}, MLP {self.mlp}, {self.tokens} tokens a rank"


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self._heads = size.width, size.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, size.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(size.mlp, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_1(x)
        batch, length, width = x.shape
        q, k, v = (
            each(normed).view(batch, length, self._heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm_2(x)
        grown: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return grown


class Decoder(nn.Module):
    """Next-token loss of a batch of windows."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, windows: Tensor) -> Tensor:
        x = self.embedding(windows[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), windows[:, 1:].flatten())


def make_model(size: Size) -> Decoder:
    """The same on every rank."""
    torch.manual_seed(1)
    return Decoder(size)


def hidden_matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What Muon trains: the matrices of the blocks."""
    return [(name, p) for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")]
