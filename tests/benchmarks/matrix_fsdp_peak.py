"""The most memory that torch has allocated at once in a step, over what was there before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(slots=True)
class Peak:
    """Bytes over what was allocated at the start; 0 until the measurement has ended."""

    bytes: int = 0


@contextmanager
def peak_of(device: torch.device) -> Iterator[Peak]:
    """Counts what is allocated inside: on the CPU every allocation and release of torch's allocator in this thread."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13 writes to stderr when a profile begins and ends
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield peak
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = 0
    for _, change in changes:
        now += change
        peak.bytes = max(peak.bytes, now)
