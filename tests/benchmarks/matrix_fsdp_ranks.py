"""One rank of the MatrixFSDP benchmark: all methods in one process, timed one after the other between barriers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.benchmarks.matrix_fsdp_methods import METHODS, Method, newton_schulz
from tests.benchmarks.matrix_fsdp_model import VOCABULARY, Size
from tests.benchmarks.matrix_fsdp_peak import peak_of

COUNTED = ("ours", "wires", "fsdp2")  # whose memory and bytes are compared


@dataclass(slots=True)
class Figures:
    """Of one rank and method."""

    passes_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    loss: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0  # at once in a step, held_bytes among them
    step_bytes: int = 0  # received in one optimizer step


def work(pipe: Connection[Any, Any], rank: int, world_size: int, store: str, size: Size) -> None:
    """Answers ("turn", methods) with {method: Figures} of one step each, ("costs",) with what the simulation needs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames all_gather_into_tensor, which older ones need
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cuda" if cuda else "cpu", (world_size,))
    methods = {name: method(size, mesh) for name, method in METHODS.items()}
    windows = windows_of(rank, size).to(mesh.device_type)
    for method in methods.values():
        _step(method, windows, Figures())  # the first allocates moments and buffers
    pipe.send("ready")
    while True:
        message = pipe.recv()
        if message[0] == "turn":
            pipe.send({name: _timed(methods[name], windows) for name in message[1]})
        elif message[0] == "counts":
            pipe.send({name: counted(methods[name], windows) for name in COUNTED})
        else:
            pipe.send(_costs(size, mesh.device_type))
        if message[0] == "costs":
            break
    dist.destroy_process_group()


def windows_of(rank: int, size: Size) -> Tensor:
    """One of random tokens, another on each rank."""
    return torch.randint(0, VOCABULARY, (1, size.tokens + 1), generator=torch.Generator().manual_seed(rank))


def _timed(method: Method, windows: Tensor) -> Figures:
    figures = Figures()
    _step(method, windows, figures)
    return figures


def _step(method: Method, windows: Tensor, figures: Figures) -> None:
    begin = _now(method)
    loss = method.model(windows)
    loss.backward()
    between = _now(method)
    with torch.no_grad():
        method.optimize()
    end = _now(method)
    method.clear()
    figures.passes_s.append(between - begin)
    figures.optimizer_s.append(end - between)
    figures.loss = float(loss.detach())


def _now(method: Method) -> float:
    """The time at which all ranks have come here."""
    dist.barrier(group=method.group)
    if method.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def counted(method: Method, windows: Tensor) -> Figures:
    """What a method holds between steps, what it allocates in one, and what it receives in the optimizer's part."""
    figures = Figures()
    with peak_of(method.device) as peak:
        loss = method.model(windows)
        loss.backward()
        del loss
        with torch.no_grad(), _Received(method.world_size) as received:
            method.optimize()
        method.clear()
    figures.held_bytes = method.held_bytes()
    figures.peak_bytes = figures.held_bytes + method.buffer_bytes() + peak.bytes
    figures.step_bytes = received.count
    return figures


class _Received(TorchDispatchMode):
    """Bytes that the collectives started inside bring to this rank."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        name = str(function)
        if "c10d" in name and "wait" not in name:
            self.count += self._received(name, args)
        return found

    def _received(self, name: str, args: Sequence[Any]) -> int:
        share = (self._world_size - 1) / self._world_size
        tensors = [each for value in args for each in (value if isinstance(value, list) else [value])]
        sizes = [tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)]
        if "all_gather_into_tensor" in name:  # (input, ...)
            return sizes[0] * (self._world_size - 1)
        if "allgather_base" in name or "alltoall_base" in name:  # (output, input, ...)
            return int(sizes[0] * share)
        return int(sum(sizes) * share)  # a broadcast: each rank is the source of its share


def _costs(size: Size, device: str) -> dict[str, float]:
    """Seconds of Newton-Schulz for each kind of matrix, and of an all-gather beside its bytes."""
    costs: dict[str, float] = {}
    for shape in ((size.width, size.width), (size.mlp, size.width)):
        update = torch.randn(shape, device=device)
        newton_schulz(update)
        took = [_seconds(lambda update=update: newton_schulz(update)) for _ in range(5)]  # type: ignore[misc]
        costs[f"ns_{shape[0]}"] = sorted(took)[2]
    for name, count in (("small", 1 << 8), ("large", 1 << 20)):
        mine = torch.zeros(count, device=device)
        everyone = mine.new_empty(dist.get_world_size() * count)
        took = [_seconds(lambda a=everyone, b=mine: dist.all_gather_into_tensor(a, b)) for _ in range(7)]  # type: ignore[misc]
        costs[f"gather_{name}_s"], costs[f"gather_{name}_bytes"] = sorted(took)[3], float(everyone.nbytes - mine.nbytes)
    return costs


def _seconds(what: Any) -> float:
    begin = time.perf_counter()
    what()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
