"""What the tasks of all methods have in common."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

from peerloom.node.worker_seams import WorkerSetup
from peerloom.protocol.errors import ConfigError

HELD_OUT = "held-out"  # who draws the evaluation windows: the same on every node


class NonFiniteLoss(Exception):
    """Training diverged in this round; nothing of it may be kept."""


def chosen_device(setup: WorkerSetup, name: str) -> torch.device:
    """The device of that name, and the CPU threads of a setup set; raises ConfigError."""
    if setup.threads:
        torch.set_num_threads(setup.threads)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device: {name!r} is no device; use "cpu", "cuda" or "cuda:1"') from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device: {name!r} is not supported; use "cpu", "cuda" or "cuda:1"')
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            key, remedy = ("devices", "cpu:N for N processes on the CPU") if setup.devices else ("device", "cpu")
            raise ConfigError(f"{key}: {name!r} is not there ({count} CUDA devices are); use another, or {remedy}")
    return device


def library_versions() -> dict[str, str]:
    """What made a checkpoint."""
    names = ("peerloom", "torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
