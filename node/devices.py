"""The devices of a node: how a user names several, and which methods can use more than one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from peerloom.protocol.errors import ConfigError
from peerloom.protocol.runspec import RunSpec

ALLOWED = "GPU numbers, each once, as in 0,1,2,3, or cpu:N for N processes on the CPU, N from 1 to 64"
MOST_CPU = 64
_GPU = re.compile(r"(?:cuda:)?(\d{1,3})")
_CPU = re.compile(r"cpu:(\d{1,2})")

_WHY_NOT = {
    "seedflow": "SeedFlow cannot use several devices: its steps are two forward passes of the whole model on one; "
    "start a node for each device instead",
    "pipeline": "a pipeline's stage cannot be spread over several devices: its weight versions in flight are whole; "
    "start a node for each device, and the run's stages are shared out over them",
}


def parse_devices(parts: Sequence[str]) -> tuple[str, ...]:
    """A device for each process, by torch's names; ValueError for what ALLOWED does not allow."""
    found: list[str] = []
    for part in parts:
        if (cpu := _CPU.fullmatch(part)) and len(parts) == 1 and 1 <= int(cpu[1]) <= MOST_CPU:
            return ("cpu",) * int(cpu[1])
        gpu = _GPU.fullmatch(part)
        if gpu is None or (name := f"cuda:{int(gpu[1])}") in found:
            raise ValueError(part)
        found.append(name)
    return tuple(found)


def check_devices(spec: RunSpec, devices: Sequence[str]) -> None:
    """Raises ConfigError when the run's method cannot use as many devices."""
    if len(devices) > 1 and spec.method in _WHY_NOT:
        raise ConfigError(f"--devices: {_WHY_NOT[spec.method]}")
