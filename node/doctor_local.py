"""The checks of `peer doctor` that ask nobody: disk, memory, files, GPU, versions, addresses, ports, identity."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import psutil

from peerloom.node.addresses import interface_addresses
from peerloom.node.config import NodeConfig
from peerloom.node.doctor import Finding
from peerloom.node.folders import ensure_writable
from peerloom.node.http_endpoint import parse_endpoint
from peerloom.node.identity import load_or_create
from peerloom.node.ports import RememberedPorts, hold_port
from peerloom.protocol.errors import PeerloomError

GIB = 1 << 30
DISK_LOW, DISK_LEAST = 5 * GIB, GIB
MEMORY_LOW, MEMORY_LEAST = 2 * GIB, GIB // 2
SHM_LOW = 256 << 20
FILES_LOW = 1024
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
PACKAGES = ("peerloom", "torch", "hivemind", "grpcio", "transformers")
Check = Callable[[NodeConfig], Iterator[Finding]]


def local_findings(config: NodeConfig) -> Iterator[Finding]:
    """All of them, in order; a check that fails in an unforeseen way is a finding too."""
    for check in CHECKS:
        try:
            yield from check(config)
        except (OSError, PeerloomError, ImportError) as error:
            yield Finding(check.__name__.strip("_"), "fail", str(error), "see the message")


def _versions(_: NodeConfig) -> Iterator[Finding]:
    found = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    yield Finding("versions", "ok", f"Python {platform.python_version()} on {platform.platform()}, {found}")


def _disk(config: NodeConfig) -> Iterator[Finding]:
    folder = config.folders.data
    free = shutil.disk_usage(_existing(folder)).free
    text = f"{_size(free)} free for {folder}"
    if free < DISK_LEAST:
        yield Finding("disk", "fail", text, "free some space, or keep the node elsewhere with --home")
    elif free < DISK_LOW:
        yield Finding("disk", "warn", text, "three checkpoints of the model must fit; free some space or use --home")
    else:
        yield Finding("disk", "ok", text)
    if folder.exists():
        ensure_writable(folder)


def _memory(_: NodeConfig) -> Iterator[Finding]:
    available, limit = psutil.virtual_memory().available, _cgroup_limit()
    room = min(available, limit) if limit is not None else available
    text = f"{_size(room)} available" + (f" (this container may use {_size(limit)})" if limit is not None else "")
    if room < MEMORY_LEAST:
        yield Finding("memory", "fail", text, "end other programs, or take a machine with more")
    elif room < MEMORY_LOW:
        yield Finding("memory", "warn", text, "a training process takes some five times the model's fp32 size")
    else:
        yield Finding("memory", "ok", text)


def _shared_memory(_: NodeConfig) -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if hasattr(os, "memfd_create"):
        text = "daemon and training process share anonymous memory, which RAM alone limits"
    else:
        text = "daemon and training process share a file without a name"
    if not folder.is_dir():
        yield Finding("shared memory", "ok", text)
        return
    size = shutil.disk_usage(folder).total
    text += f"; /dev/shm has {_size(size)}"
    if size < SHM_LOW:
        remedy = "several devices in one node (NCCL, gloo) want more: docker run --shm-size 1g"
        yield Finding("shared memory", "warn", text, remedy)
    else:
        yield Finding("shared memory", "ok", text)


def _open_files(_: NodeConfig) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files allowed"
    if 0 <= soft < FILES_LOW:
        yield Finding("open files", "warn", text, f"ulimit -n {min(65_536, hard) if hard > 0 else 65_536}")
    else:
        yield Finding("open files", "ok", text)


def _gpu(config: NodeConfig) -> Iterator[Finding]:
    import torch

    build = f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build")
    driver = NVIDIA_DRIVER.read_text().splitlines()[0].strip() if NVIDIA_DRIVER.exists() else ""
    if torch.cuda.is_available():
        names = [
            f"{torch.cuda.get_device_name(number)} ({_size(torch.cuda.mem_get_info(number)[1])})"
            for number in range(torch.cuda.device_count())
        ]
        yield Finding("GPU", "ok", f"{', '.join(names)}; {build}; {driver}")
    elif driver and not torch.version.cuda:
        remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally/"
        yield Finding("GPU", "warn", f"an NVIDIA driver is there, but {build}", remedy)
    elif driver:
        yield Finding("GPU", "fail", f"{build}, but it cannot use the driver: {driver}", "update the driver and reboot")
    elif config.device.startswith("cuda"):
        yield Finding("GPU", "fail", f"--device {config.device}, and no NVIDIA driver", "install it, or --device cpu")
    else:
        threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        yield Finding("GPU", "ok", f"none; trains on the CPU ({threads}); {build}")


def _addresses(_: NodeConfig) -> Iterator[Finding]:
    for version, family, far in ((4, socket.AF_INET, "192.0.2.1"), (6, socket.AF_INET6, "2001:db8::1")):
        own = [address for address in interface_addresses() if (":" in address) == (version == 6)]
        route = _route(family, far)
        name = f"IPv{version}"
        if route:
            yield Finding(name, "ok", f"leaves this machine from {route}; addresses: {', '.join(own) or route}")
        elif version == 4:
            yield Finding(name, "warn", "no route to the internet", "check the network; IPv6 alone reaches fewer peers")
        else:
            yield Finding(name, "ok", "no route; IPv4 is enough")


def _ports(config: NodeConfig) -> Iterator[Finding]:
    remembered = RememberedPorts(config.folders.ports_file)
    ports = [("port", "dht", config.port), ("gRPC port", "grpc", config.grpc_port)]
    if config.relay and (config.relay_port or remembered.known("relay")):  # one can do without
        ports.append(("relay port", "relay", config.relay_port))
    for name, kept, named in ports:
        port = named or remembered.known(kept)
        if port == 0:
            remedy = f"name one with --{name.lower().replace(' ', '-')} and open it in the firewall"
            yield Finding(name, "warn", "a free one is picked at the first start, and kept", remedy)
            continue
        try:
            hold_port(config.listen[0], port).release()
        except PeerloomError as error:
            remedy = "stop this node before its check, or the other program; or name another port"
            yield Finding(name, "warn", str(error), remedy)
        else:
            yield Finding(name, "ok", f"{port} is free on {config.listen[0]}")
    endpoint = parse_endpoint(config.http)
    if endpoint is not None and not endpoint.loopback:
        remedy = "anybody who reaches it can read it: close it in the firewall, or serve it on 127.0.0.1"
        yield Finding("page", "warn", f"served on {config.http}, beyond this machine", remedy)


def _identity(config: NodeConfig) -> Iterator[Finding]:
    file = config.folders.identity_file
    if not file.exists():
        yield Finding("identity", "ok", f"none yet; {file} is made at the first start: keep a copy of it")
        return
    yield Finding("identity", "ok", f"{load_or_create(file).peer_id} in {file}")


CHECKS: tuple[Check, ...] = (
    _versions, _disk, _memory, _shared_memory, _open_files, _gpu, _addresses, _ports, _identity
)  # fmt: skip


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


def _cgroup_limit() -> int | None:
    try:
        text = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _route(family: socket.AddressFamily, far: str) -> str:
    """The address packets to `far` would leave from; nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count >> 20} MiB"


