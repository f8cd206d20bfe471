"""What a stage holds in memory, worked out before any of it is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from peerloom.node.worker.inner import hidden_matrices
from peerloom.node.worker.stage_model import stage_outline
from peerloom.optim import soap
from peerloom.optim.basis_rotation import MAX_SIDE
from peerloom.optim.eigenbasis import rotated_sides
from peerloom.optim.encode import encoded_bytes
from peerloom.protocol.runspec import RunSpec, TrainSpec

FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes, activations left out. Any node may come to share a stage, so what its hosts hold for that counts too."""

    training: int  # weights, gradients, the optimizer's state and the versions of the weights
    shared: int  # with another host: theta and the previous proposal, this one's, and both as they travel
    passing: int  # for a moment: proposals decoded, or the optimizer's state on its way to disk
    versions: int  # copies of the weights for the passes under way

    @property
    def total(self) -> int:
        return self.training + self.shared + self.passing


def stage_memory(spec: RunSpec, stage: int, *, on_cpu: bool) -> StageMemory:
    """Of that stage on its device: an accelerator holds neither what travels nor what goes to disk."""
    outline, lag = stage_outline(spec, stage), spec.pipeline.lag(stage)
    numel = sum(parameter.numel() for parameter in outline.parameters())
    versions = lag + 1 if spec.pipeline.stash and lag else 0
    optimizer = FP32 * optimizer_numel(outline, spec.train)
    model, encoding = FP32 * numel, spec.gasloc.encoding
    decoded = model if encoding == "fp32" else 2 * model + (model if encoding == "int8" else 0)
    shared = 3 * model  # the proposal itself is in the shared block where it is fp32 on the CPU
    if on_cpu:
        shared += (1 if encoding == "fp32" else 2) * encoded_bytes(numel, encoding)
    return StageMemory(
        training=(2 + versions) * model + optimizer,
        shared=shared,
        passing=max(decoded, optimizer if on_cpu else 0),
        versions=versions,
    )


def optimizer_numel(model: nn.Module, train: TrainSpec) -> int:
    """Elements of the optimizer's state of all of a model's parameters."""
    hidden = set() if train.optimizer == "adamw" else hidden_matrices(model)
    total = 0
    for name, parameter in model.named_parameters():
        moments = 1 if name in hidden and train.optimizer == "muon" else 2
        total += moments * parameter.numel()
        if name in hidden and train.optimizer in ("basis_rotated", "soap"):
            rows, columns = parameter.shape
            total += basis_numel(rows, columns, train)
    return total


def basis_numel(rows: int, columns: int, train: TrainSpec) -> int:
    """Elements of a matrix's bases, and of their covariances where these are kept."""
    if train.optimizer == "soap":
        return 2 * sum(size**2 for size in (rows, columns) if 1 < size <= soap.MAX_SIDE)
    sides = rotated_sides(rows, columns, train.rotation_geometry, MAX_SIDE)
    squares = sum(size**2 for size, rotated in zip((rows, columns), sides, strict=True) if rotated)
    return squares * (2 if train.rotation_source == "2nd" else 1)
