"""The RunSpec: one frozen dataclass a TOML table, `check()` on each, and the run id.

Every field of the spec is the run's business and the same for all nodes; what belongs to one node is in its config.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from peerloom.protocol.types import Encoding


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A transformers causal LM: built from `config`-style keys, or loaded from a local folder or hub name (`path`)."""

    architecture: str = "llama"  # transformers model_type
    path: str = ""  # a local folder or hub name instead of the sizes below
    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 3
    heads: int = 4
    kv_heads: int = 4
    tie_embeddings: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Text, tokenized once into memory-mapped shards."""

    source: str = "stdlib"  # "stdlib", a local file or folder of .txt/.jsonl/.parquet, or "datasets:NAME"
    text_field: str = "text"  # of JSONL and Parquet rows and `datasets` rows
    tokenizer: str = "bytes"  # "bytes", or a local folder or hub name of a tokenizer
    sequence_length: int = 128
    held_out: float = 0.05  # share of documents kept for evaluation, chosen by hash


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The inner optimizer (AdamW) and what a step is."""

    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 40
    total_steps: int = 4000  # end of the cosine; the rate stays at its floor after it
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # 0: no clipping
    eval_batches: int = 8
    eval_every_rounds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GaslocSpec:
    """GASLoC in its basic form: one partner a round."""

    local_steps: int = 20  # H
    eta: float = 1.0
    alpha: float = 1.0
    gamma: float = 0.2
    momentum: Literal["pre", "post"] = "pre"
    pairing: Literal["rendezvous", "scheduled"] = "rendezvous"
    encoding: Encoding = "fp32"
    match_timeout_s: float = 10.0
    max_round_skew: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A whole run."""

    name: str = "stdlib-llama"
    seed: int = 1
    method: Literal["gasloc"] = "gasloc"
    token_budget: int = 0  # of the whole swarm; 0: none
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    gasloc: GaslocSpec = field(default_factory=GaslocSpec)
