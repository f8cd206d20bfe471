"""One process of the memory rows: `python -m tests.benchmarks.seedflow_memory infer|train`; prints peak bytes as JSON.

What counts is memory of the process's own (RssAnon): pages of the mapped base can be dropped by the kernel at any time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from peerloom.optim.subcge import SubCGE
from tests.benchmarks.seedflow_llama import BATCH, PERIOD, RANK, llama, loss_of, tokens

POLL_S = 0.002


def own_bytes() -> int:
    """RssAnon of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def peak_during(work: Callable[[], None]) -> int:
    """The most that `own_bytes` shows while the work is done."""
    peak, done = [own_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            peak[0] = max(peak[0], own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return peak[0]


def mapped(folder: Path, name: str, shape: torch.Size) -> Tensor:
    """A float32 tensor in a file."""
    return torch.from_file(str(folder / name), shared=True, size=shape.numel()).view(shape)


def main(what: str) -> dict[str, int]:
    torch.set_num_threads(1)
    model = llama()
    loss = loss_of(model, tokens(BATCH))
    with tempfile.TemporaryDirectory(prefix="peerloom-seedflow-") as folder:
        base = {name: mapped(Path(folder), f"base.{name}", p.shape) for name, p in model.named_parameters()}
        anchor = {name: mapped(Path(folder), f"anchor.{name}", p.shape) for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            base[name].copy_(parameter.detach())

        def infer() -> None:
            with torch.no_grad():
                for _ in range(2):
                    loss()

        def train() -> None:
            flow = SubCGE(model, rank=RANK, period=PERIOD, eps=1e-3, lr=1e-6, run_seed=1, base=base, anchor=anchor)
            for step in (0, PERIOD):
                flow.advance(step)
                flow.apply([(1, step, step, flow.estimate(loss, flow.seed_of(1, step)))])

        peak = peak_during(infer if what == "infer" else train)
    return {"peak": peak, "factors": factor_bytes(model)}


def factor_bytes(model: torch.nn.Module) -> int:
    """Of one period's factors in float32, and the integer sums of two periods and of small tensors."""
    shapes = [parameter.shape for parameter in model.parameters()]
    matrices = [shape for shape in shapes if len(shape) > 1]
    small = sum(shape.numel() for shape in shapes if len(shape) < 2)
    return sum(4 * RANK * (shape[0] + shape[-1]) + 2 * 8 * RANK**2 for shape in matrices) + 8 * small


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
