"""The RunSpec: one frozen dataclass a TOML table, `check()` on each, and the run id.

Every field of the spec is the run's business and the same for all nodes; what belongs to one node is in its config.
A field's rule (type, range) stands in the field; faults between fields come from `cross()`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from peerloom.protocol import spec_toml
from peerloom.protocol.errors import SpecError
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.spec_pipeline import PipelineSpec
from peerloom.protocol.spec_rules import Fault, choice, faults, number, text
from peerloom.protocol.spec_seedflow import SeedflowSpec
from peerloom.protocol.spec_table import Table
from peerloom.protocol.spec_task import TaskSpec
from peerloom.protocol.types import RunId

MAX_PARAMETERS = 10**11  # 400 GB of fp32: above it a size is a slip of the keyboard
MAX_BATCH_TOKENS = 2**26
BYTE_TOKENS = 256
_DIGEST = re.compile("[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Table):
    """A transformers causal LM: built from `config`-style keys, or loaded from a local folder or hub name (`path`)."""

    architecture: str = text("llama", "transformers model_type", slug=True)
    path: str = text("", "a local folder or hub name to load instead of building from the sizes below", empty=True)
    digest: str = text(
        "",
        "BLAKE3 of the parameters at path, as `peer run check --base` prints it: a node that has others there stops,\n"
        "one that fetches them takes no others; empty: it takes those that most trainers announce. Not for pipelines",
        empty=True,
    )
    vocab_size: int = number(256, 2, 2**20, "tokens")
    hidden_size: int = number(128, 2, 2**16, "a multiple of heads")
    intermediate_size: int = number(352, 1, 2**18, "width of the feed-forward part")
    layers: int = number(2, 1, 1024, "transformer blocks")
    heads: int = number(4, 1, 1024, "attention heads")
    kv_heads: int = number(4, 1, 1024, "key and value heads; divides heads")
    tie_embeddings: bool = choice(True, "input and output embeddings are one matrix")

    def cross(self) -> Iterator[Fault]:
        if self.digest and not _DIGEST.fullmatch(self.digest):
            yield Fault(("digest",), f"{self.digest!r:.80}: must be empty or the 64 hex digits of a BLAKE3 digest")
        elif self.digest and not self.path:
            yield Fault(("digest", "path"), f"{self.digest!r}: must be empty without a path")
        if self.hidden_size % self.heads:
            yield Fault(
                ("hidden_size", "heads"), f"{self.hidden_size}: must be a multiple of heads, which is {self.heads}"
            )
        elif self.hidden_size // self.heads % 2:
            yield Fault(
                ("hidden_size", "heads"),
                f"{self.hidden_size}: hidden_size / heads ({self.heads}) must be even, as rotary positions need",
            )
        if self.heads % self.kv_heads:
            yield Fault(("kv_heads", "heads"), f"{self.kv_heads}: must divide heads, which is {self.heads}")
        if self.parameters() > MAX_PARAMETERS:
            yield Fault(
                ("layers", "hidden_size", "intermediate_size", "vocab_size"),
                f"{self.layers}: these sizes make about {self.parameters():.1e} parameters; "
                f"must be sizes that make at most {MAX_PARAMETERS:.0e}",
            )

    def parameters(self) -> int:
        """Number of weights of a Llama of these sizes, norms left out."""
        attention = 2 * self.hidden_size**2 * (1 + self.kv_heads / self.heads)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return int(self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)) + embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec(Table):
    """Text, tokenized once into memory-mapped shards."""

    source: str = text("stdlib", '"stdlib", a local file or folder of .txt/.jsonl/.parquet, or "datasets:NAME"')
    text_field: str = text("text", "of JSONL and Parquet rows and `datasets` rows", most=128)
    tokenizer: str = text("bytes", '"bytes", or a local folder or hub name of a tokenizer')
    sequence_length: int = number(128, 2, 2**20, "tokens")
    held_out: float = number(
        0.05, 0, 0.5, "share of documents kept for evaluation, chosen by hash", open_low=True, open_high=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec(Table):
    """The inner optimizer and what a step is."""

    optimizer: Literal["adamw", "muon", "soap", "basis_rotated"] = choice(
        "adamw",
        "muon, soap, basis_rotated: for hidden matrices, with AdamW for embeddings, head and vectors; "
        "basis_rotated bears a pipeline's late gradients",
    )
    batch_size: int = number(8, 1, 2**16, "sequences a step")
    learning_rate: float = number(5e-3, 0, 10, "at the top of the schedule", open_low=True)
    warmup_steps: int = number(40, 0, 10**9, "steps of linear warm-up; below total_steps")
    total_steps: int = number(4000, 1, 10**9, "end of the cosine; the rate stays at its floor after it")
    min_lr_ratio: float = number(0.1, 0, 1, "the floor as a share of learning_rate")
    muon_learning_rate: float = number(0.02, 0, 10, "Muon's, at the top of the same schedule", open_low=True)
    muon_momentum: float = number(0.95, 0, 1, "Muon's, Nesterov", open_high=True)
    rotation_source: Literal["1st", "2nd"] = choice(
        "2nd", "basis_rotated's: the moment whose eigenvectors are the basis; 1st needs half the memory"
    )
    rotation_geometry: Literal["unilateral", "bilateral"] = choice(
        "bilateral", "basis_rotated's: rotates the smaller side of a matrix, or both"
    )
    rotation_freq: int = number(10, 1, 10**6, "basis_rotated's and soap's: steps between refreshes of a basis")
    beta1: float = number(0.9, 0, 1, "AdamW's, first moment", open_high=True)
    beta2: float = number(
        0.95, 0, 1, "AdamW's, second moment; soap's bases too, and basis_rotated's, there 0.999", open_high=True
    )
    eps: float = number(1e-8, 0, 1, "AdamW's", open_low=True)
    weight_decay: float = number(0.1, 0, 10, "decoupled; of matrices only")
    clip_norm: float = number(1.0, 0, 10**6, "of the gradient; 0: no clipping")
    eval_batches: int = number(4, 1, 10**4, "held-out batches an evaluation")
    eval_every_rounds: int = number(2, 1, 10**6, "rounds")

    def cross(self) -> Iterator[Fault]:
        if self.warmup_steps >= self.total_steps:
            yield Fault(
                ("warmup_steps", "total_steps"),
                f"{self.warmup_steps}: must be below total_steps, which is {self.total_steps}",
            )


class _Remembered:
    """A place for a digest beside the fields: neither compared, nor copied by replace(), nor pickled."""

    __slots__ = ("_spec_hash",)  # without an annotation, which would make it look like a key of the spec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec(Table, _Remembered):
    """A whole run."""

    name: str = text("stdlib-llama", "of the run, for people", slug=True)
    seed: int = number(1, 0, 2**63 - 1, "of theta_0, data order and pairing")
    method: Literal["gasloc", "seedflow", "pipeline"] = choice("gasloc", "how nodes train together")
    token_budget: int = number(0, 0, 2**63 - 1, "tokens of the whole swarm after which the run is done; 0: none")
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    task: TaskSpec = field(default_factory=TaskSpec)
    gasloc: GaslocSpec = field(default_factory=GaslocSpec)
    seedflow: SeedflowSpec = field(default_factory=SeedflowSpec)
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)

    def cross(self) -> Iterator[Fault]:
        built, vocab = not self.model.path, self.model.vocab_size
        if built and self.data.tokenizer == "bytes" and vocab < BYTE_TOKENS:
            yield Fault(
                ("model.vocab_size", "data.tokenizer", "model.path"),
                f'{vocab}: must be at least {BYTE_TOKENS} with data.tokenizer = "bytes"',
            )
        if self.task.kind == "classification" and self.method != "seedflow":
            yield Fault(
                ("task.kind", "method"), f'"classification": must be "text" with method = "{self.method}"'
            )
        if self.train.batch_size * self.data.sequence_length > MAX_BATCH_TOKENS:
            yield Fault(
                ("train.batch_size", "data.sequence_length"),
                f"{self.train.batch_size}: must be at most {MAX_BATCH_TOKENS // self.data.sequence_length} "
                f"with data.sequence_length = {self.data.sequence_length}",
            )
        if self.method == "pipeline":
            yield from self._cross_pipeline()

    def _cross_pipeline(self) -> Iterator[Fault]:
        stages, parts = self.pipeline.stages, self.pipeline.microbatches
        if not self.model.path and stages > self.model.layers:
            yield Fault(
                ("pipeline.stages", "model.layers", "method"),
                f"{stages}: must be at most model.layers, which is {self.model.layers}",
            )
        if self.train.batch_size % parts:
            yield Fault(
                ("pipeline.microbatches", "train.batch_size", "method"),
                f"{parts}: must divide train.batch_size, which is {self.train.batch_size}",
            )
        if self.model.digest:
            yield Fault(
                ("model.digest", "method"),
                f'{self.model.digest!r}: must be empty with method = "pipeline", where no node holds the whole model',
            )
        yield from self._cross_replicas()

    def _cross_replicas(self) -> Iterator[Fault]:
        """Several hosts of a stage exchange by rendezvous, beneath the updates that go on; round_s has no use there."""
        for name, value, allowed in (
            ("pairing", self.gasloc.pairing, "rendezvous"),
            ("fragments", self.gasloc.fragments, 1),
        ):
            if value != allowed:
                yield Fault((f"gasloc.{name}", "method"), f'{value!r}: must be {allowed!r} with method = "pipeline"')
                return
        if not self.gasloc.overlap:
            for fault in replace(self.gasloc, overlap=True).cross():
                yield Fault(tuple(f"gasloc.{key}" for key in fault.keys), fault.sentence)

    @classmethod
    def from_toml(cls, source: str) -> RunSpec:
        """The spec that a TOML text describes, keys left out at their defaults.

        Raises SpecError whose problems name every unknown key, bad type and bad range, with key and line.
        """
        spec, found, lines = spec_toml.read(cls, source)
        found += faults(spec)
        if found:
            raise SpecError(spec_toml.sentences(found, lines))
        return spec

    def canonical(self) -> str:
        """The one TOML text of this spec: its keys in fixed order; equal specs have equal text. Raises SpecError.

        Every key but those that came later and change nothing here: run ids of the time before them stay.
        """
        self.check()
        return spec_toml.write(self, without=self._unsaid({"model.digest"} if not self.model.digest else set()))

    def _unsaid(self, keys: set[str]) -> frozenset[str]:
        return frozenset(keys | ({"seedflow.version"} if self.method != "seedflow" else set()))

    def template(self) -> str:
        """All keys of the method, each with a comment before it: what it is, its unit, what it may hold."""
        self.check()
        return spec_toml.write(self, comments=True, without=self._unsaid(set()))

    def spec_hash(self) -> str:
        """SHA-256 of the canonical text, hex; of one object it is made once."""
        made: str | None = getattr(self, "_spec_hash", None)
        if made is None:
            made = hashlib.sha256(self.canonical().encode()).hexdigest()
            object.__setattr__(self, "_spec_hash", made)
        return made

    @property
    def run_id(self) -> RunId:
        """The first 16 hex digits of `spec_hash()`."""
        return RunId(self.spec_hash()[:16])
