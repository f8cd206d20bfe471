"""A Llama of SmolLM2-135M's sizes, untrained, for what does not depend on its weights: time and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RANK, PERIOD = 32, 1000
WIDE_RANK = 128  # what a high one costs
BATCH, LENGTH = 16, 40  # MeZO's batch; the paper of SeedFlood says none


def llama() -> Any:
    """30 layers, width 576, a vocabulary of 49,152, embeddings tied; in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def tokens(batch: int) -> Tensor:
    """(batch, LENGTH) ids."""
    return torch.randint(49152, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    """The loss of a prompt's last token, as classification has it."""
    return lambda: F.cross_entropy(model(input_ids=ids, logits_to_keep=1).logits[:, -1], ids[:, 0])
