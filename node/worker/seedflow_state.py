"""SeedFlow's sums as bytes, on the wire and on disk, and the model that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from peerloom.node.durable import replace_file, storage_errors
from peerloom.node.worker.model import layout_digest
from peerloom.optim.subcge import SubCGE
from peerloom.optim.subcge_targets import Target, targets_of
from peerloom.protocol.errors import CheckpointError, MalformedMessage, RunMismatch, SpecError
from peerloom.protocol.flood_messages import Batch, origin_key
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerId

FILE = "sums.safetensors"
HEADER_BYTES = 1 << 12  # more than safetensors' header of four tensors takes


def open_flow(model: nn.Module, spec: RunSpec, base: dict[str, Tensor], anchor: dict[str, Tensor] | None) -> SubCGE:
    """The run's SubCGE over `model`, with no message; a message weighs learning_rate / clients. Raises SpecError."""
    flow = spec.seedflow
    return SubCGE(
        model,
        rank=flow.rank,
        period=flow.period,
        eps=flow.eps,
        lr=flow.learning_rate / flow.clients,
        run_seed=spec.seed,
        trainable=flow.trainable,
        bound=flow.scalar_limit(),
        base=base,
        anchor=anchor,
        fraction_bits=flow.fraction_bits,
    )


def trainable(model: nn.Module, spec: RunSpec) -> list[Target]:
    """The tensors that the run trains; raises SpecError where there is none."""
    try:
        return targets_of(model, spec.seedflow.trainable, spec.seed, True)
    except (ValueError, re.error) as error:
        raise SpecError([f"seedflow.trainable: {error}"]) from error


def rows_of(batches: tuple[Batch, ...]) -> list[tuple[int, int, int, int]]:
    """SubCGE's messages: the origin's key as a signed 64-bit integer."""
    rows = []
    for batch in batches:
        key = signed_key(batch.origin)
        rows += [(key, sequence, step, scalar) for _, sequence, step, scalar in batch.messages()]
    return rows


def signed_key(origin: PeerId) -> int:
    """The origin's key, in the range of int64."""
    key = origin_key(origin)
    return key - 2**64 if key >= 2**63 else key


def base_digest(model: nn.Module) -> str:
    """BLAKE3 in hex over all parameters' bytes in order, tied ones once."""
    digest = blake3()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sums_digest(flow: SubCGE, model: nn.Module) -> str:
    """What two nodes' sums must have in common to be of one run: the trained tensors and the rank."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    layout = tuple((name, shapes[name]) for name in flow.names)
    return layout_digest((*layout, ("rank", flow.state.shape[1:])))


def most_bytes(flow: SubCGE, periods: int) -> int:
    """How long an exported state of so many periods can be."""
    matrices, rank, _ = flow.state.shape
    return 8 * (periods * (matrices * rank * rank + 2) + flow.state.small.numel()) + HEADER_BYTES


def pack(flow: SubCGE) -> bytes:
    """The sums as a safetensors file; equal sums give equal bytes."""
    return safetensors.torch.save(flow.export_state())


def unpack(state: bytes, flow: SubCGE, periods: int) -> dict[str, Tensor]:
    """The tensors of a packed state, none for b"".

    Raises MalformedMessage for bytes that are no state of this run's shape, whatever they claim.
    """
    if not state:
        return {name: torch.zeros(size, dtype=torch.int64) for name, size in _empty(flow).items()}
    if len(state) > most_bytes(flow, periods):
        raise MalformedMessage(f"{len(state)} bytes are more than the sums of {periods} periods take")
    try:
        found = safetensors.torch.load(state)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise MalformedMessage(f"{len(state)} bytes that are no sums: {error}") from error
    if set(found) != set(_empty(flow)) or any(tensor.dtype != torch.int64 for tensor in found.values()):
        raise MalformedMessage("the sums are of other tensors than this run's")
    opened = found["periods"]
    if opened.numel() and int(opened.max()) >= periods:
        raise MalformedMessage("the sums are of later periods than this run's")
    return found


def _empty(flow: SubCGE) -> dict[str, tuple[int, ...]]:
    return {"periods": (0,), "counts": (0,), "sums": (0, *flow.state.shape), "small": tuple(flow.state.small.shape)}


def write(run_dir: Path, flow: SubCGE, about: dict[str, object]) -> Path:
    """Writes the sums in place of the ones before, whole or not at all; raises StorageError."""
    path = run_dir / FILE
    text = {"about": json.dumps({**about, "state_hash": flow.state_hash().hex()})}
    with storage_errors(f"the sums {path}"):
        replace_file(path, safetensors.torch.save(flow.export_state(), text))
    return path


def restored(model: nn.Module, spec: RunSpec, about: Mapping[str, object], sums: Mapping[str, Tensor]) -> nn.Module:
    """The base model with what read() found in it; raises RunMismatch for another base, CheckpointError for damage."""
    if base_digest(model) != about.get("init_digest"):
        raise RunMismatch("the base model is another one now than when the sums were made; put the former one back")
    base = {target.name: target.parameter.detach().clone() for target in trainable(model, spec)}
    flow = open_flow(model.requires_grad_(False), spec, base, None)
    try:
        flow.load_state(sums)
    except ValueError as error:
        raise CheckpointError(f"the sums are damaged ({error}); take them from another node") from error
    if flow.state_hash().hex() != about.get("state_hash"):
        raise CheckpointError("the sums are damaged: their hash is not the one written with them")
    return model


def read(run_dir: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """What write() was told, and the sums; raises CheckpointError where there are none or they are damaged."""
    path = run_dir / FILE
    if not path.exists():
        raise CheckpointError(f"no sums in {run_dir}: a node writes them as it trains and when it stops")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            if not isinstance(about, dict) or not isinstance(about.get("step"), int):
                raise ValueError("it does not say of which step it is")
            return about, {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"the sums {path} are damaged ({error}); take them from another node") from error
