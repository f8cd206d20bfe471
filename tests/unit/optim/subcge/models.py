"""Small models with every kind of tensor that SubCGE meets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCAB, WIDTH = 11, 6


class Tied(nn.Module):
    """Embedding, hidden layer with bias and norm, a convolution, a head tied to the embedding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.dropout(self.norm(torch.tanh(self.hidden(x)) + x))
        logits: Tensor = self.head(x)
        return logits


def tied(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> Tied:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Tied(dropout).to(dtype)


IDS = torch.arange(14).view(2, 7) % VOCAB


def loss_of(model: nn.Module) -> Tensor:
    """Cross-entropy of the next id."""
    logits = model(IDS)[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())


def bits(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
