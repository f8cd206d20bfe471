"""A node on several devices: the same rounds, the same files, one death for all, and what is refused."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from peerloom.node import checkpoint, checkpoint_parts
from peerloom.node.config import load_config
from peerloom.node.devices import check_devices, parse_devices
from peerloom.node.export import export
from peerloom.node.worker.group import STORE, Group
from peerloom.node.worker.memory import BlockLayout, SharedBlock, anonymous_file
from peerloom.node.worker.model import build_model, model_over
from peerloom.node.worker.rank import wait_for
from peerloom.node.worker.shard import Place, Shard, join, loopback, rows_of
from peerloom.node.worker.tasks import open_task
from peerloom.node.worker.tasks.gasloc import GaslocTask
from peerloom.node.worker.tasks.gasloc_group import GaslocGroupTask
from peerloom.optim.matrix_fsdp import RankLost
from peerloom.protocol.errors import ConfigError, StorageError
from peerloom.protocol.runspec import RunSpec
from tests.unit.node.on_devices import apart, on_cpus, quiet, spec_of
from tests.unit.node.tiny import Optimizer, never, setup, task, tiny_spec, write_text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a group of one rank in this process."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, loopback())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def group_task(spec: RunSpec, home: Path) -> GaslocGroupTask:
    return GaslocGroupTask(on_cpus(setup(spec, home), 1), anonymous_file(), quiet, ())


# ---- in this process: a group of one rank, whose parameters lie apart from the block all the same


def rounds(worker: GaslocTask, first: int = 0) -> list[Tensor]:
    """y and theta of three rounds, by fragments, with a partner a little off."""
    seen = []
    for number in range(first, first + 3):
        for fragment in range(worker._spec.gasloc.fragments):
            worker.train(number, never, fragment, lambda: None)
            theirs = worker._outbox if worker._outbox is not None else worker._block.view("outbox")
            seen.append(theirs.clone())
            span = worker._exchanges._layout.bytes_of(worker._exchanges._layout.whole(fragment))
            worker._inbox[span] = theirs[span]
            if fragment + 1 < worker._spec.gasloc.fragments:
                worker.take(fragment, 1.0, worker._exchanges._layout.whole(fragment), False)
                worker.settle(fragment)
        worker.finish(mix=True)
        seen.append(worker._host_theta.clone())
    return seen


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "soap", "basis_rotated"])
def test_each_optimizer_is_set_up_as_on_one_device(
    source: Path, tmp_path: Path, optimizer: Optimizer, alone: None
) -> None:
    """Then each goes on from the other's checkpoint."""
    spec = spec_of(source, optimizer)
    spec = replace(spec, train=replace(spec.train, clip_norm=0.0))  # the two clips round otherwise
    plain, group = task(spec, tmp_path / "plain"), group_task(spec, tmp_path / "group")
    assert plain.ready() == replace(group.ready(), owners="")
    assert apart(rounds(plain), rounds(group)) <= 1e-6
    ours, theirs = (checkpoint.load(worker.save()) for worker in (group, plain))
    assert ours.meta == theirs.meta
    assert ours.optimizer.keys() == theirs.optimizer.keys()
    for key, value in theirs.optimizer.items():
        torch.testing.assert_close(ours.optimizer[key], value, rtol=1e-3, atol=1e-6, msg=key)
    dist.destroy_process_group()
    swapped = task(spec, tmp_path / "group"), group_task(spec, tmp_path / "plain")
    for worker, origin in zip(swapped, (group, plain), strict=True):
        assert worker.ready().resumed and torch.equal(worker._host_theta, origin._host_theta)
    assert apart(*(rounds(worker, 3) for worker in swapped)) <= 1e-6


@pytest.mark.parametrize("optimizer", ["adamw", "soap", "basis_rotated"])
def test_each_is_clipped_as_on_one_device(source: Path, tmp_path: Path, optimizer: Optimizer, alone: None) -> None:
    """Seen in the first step's moments, or for SOAP, which makes its bases by it, in these."""
    spec = spec_of(source, optimizer)
    spec = replace(spec, train=replace(spec.train, clip_norm=0.5))
    plain, group = task(spec, tmp_path / "plain"), group_task(spec, tmp_path / "group")
    for worker in (plain, group):
        for number, parameter in enumerate(worker._model.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + number)
    plain._loop.update(1e-3)
    group._group._shard._update(1e-3)
    ours, theirs = (checkpoint.load(worker.save()).optimizer for worker in (group, plain))
    seen = [key for key in theirs if key.startswith(("exp_avg/", "left_cov/", "right_cov/"))]
    assert seen and ours.keys() == theirs.keys()
    for key in seen:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-9, msg=key)


@pytest.mark.parametrize("gasloc", [{"fragments": 2}, {"overlap": True, "eta": 0.9}], ids=["fragments", "overlap"])
def test_fragments_and_overlap_are_those_of_one_device(
    source: Path, tmp_path: Path, gasloc: dict[str, Any], alone: None
) -> None:
    spec = spec_of(source, **gasloc)
    assert apart(rounds(task(spec, tmp_path / "plain")), rounds(group_task(spec, tmp_path / "group"))) <= 1e-6


def test_too_little_memory_is_told_before_a_weight_is_touched(source: Path, tmp_path: Path, alone: None) -> None:
    spec = spec_of(source)
    model = build_model(spec)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    mesh = join(Place(rank=0, devices=("cpu",), store=tmp_path / STORE))
    block = SharedBlock(anonymous_file(), BlockLayout(sum(map(Tensor.numel, before.values())), 4, False), create=True)
    with pytest.raises(ConfigError, match=r"^devices: rank 0: the model takes .* GiB where 0.00 GiB are free; use"):
        Shard(model, spec.train, mesh, torch.device("cpu"), block, memory_limit=1000)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_the_other_ranks_take_the_model_out_of_the_block(source: Path, tied: bool) -> None:
    spec = tiny_spec(source)
    spec = replace(spec, model=replace(spec.model, tie_embeddings=tied))
    whole = build_model(spec)
    flat = torch.cat([parameter.detach().view(-1) for parameter in whole.parameters()])
    over = model_over(spec, memoryview(flat.numpy()).cast("B"))
    assert [name for name, _ in over.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert all(torch.equal(*pair) for pair in zip(over.parameters(), whole.parameters(), strict=True))
    assert all(torch.equal(*pair) for pair in zip(over.buffers(), whole.buffers(), strict=True))
    flat.zero_()
    assert not any(parameter.any() for parameter in over.parameters())  # not a copy
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert torch.isfinite(over(input_ids=tokens).logits).all()


# ---- what is refused, and what is shared out


def test_devices_are_named_in_two_ways() -> None:
    assert parse_devices(["0", "cuda:2"]) == ("cuda:0", "cuda:2")
    assert parse_devices(["cpu:3"]) == ("cpu",) * 3
    assert load_config(devices="cpu:2").devices == ("cpu", "cpu")
    assert load_config(devices="cpu:1").devices == ("cpu",)


@pytest.mark.parametrize("bad", ["0,0", "cpu", "cpu:0", "cpu:65", "0,cpu:2", "cpu:2,cpu:2", "tpu:1", "-1"])
def test_what_is_no_list_of_devices_is_named(bad: str) -> None:
    with pytest.raises(ConfigError, match=f"--devices = .*{bad}.*must be GPU numbers, each once, as in 0,1,2,3"):
        load_config(devices=bad)


@pytest.mark.parametrize(("method", "why"), [("seedflow", "of the whole model on one"), ("pipeline", "are whole")])
def test_methods_that_cannot_use_several_devices_say_why(source: Path, method: Any, why: str) -> None:
    spec = replace(tiny_spec(source), method=method)
    check_devices(spec, ("cpu",))
    with pytest.raises(ConfigError, match=f"^--devices: .*{why}; start a node for each device"):
        check_devices(spec, ("cpu", "cpu"))


def test_a_gpu_that_is_not_there_is_named_before_any_rank_is_told(source: Path, tmp_path: Path) -> None:
    there = torch.cuda.device_count()
    given = replace(setup(tiny_spec(source), tmp_path), devices=("cuda:98", "cuda:99"))
    sentence = f"^devices: 'cuda:98' is not there \\({there} CUDA devices are\\); use another, or cpu:N"
    with pytest.raises(ConfigError, match=sentence):
        GaslocGroupTask(given, anonymous_file(), quiet, ())
    assert not (tmp_path / "peer-a").exists()


def test_a_model_too_large_for_the_machine_is_refused_before_it_is_built(source: Path, tmp_path: Path) -> None:
    spec = tiny_spec(source)
    huge = replace(spec, model=replace(spec.model, hidden_size=1 << 16, intermediate_size=1 << 18, layers=64))
    with pytest.raises(ConfigError, match=r"^devices: the model takes \d+\.\d GiB of memory on 2 devices where"):
        GaslocGroupTask(on_cpus(setup(huge, tmp_path), 2), anonymous_file(), quiet, ())
    assert not (tmp_path / "peer-a").exists()


def test_one_device_is_the_task_without_a_group(source: Path, tmp_path: Path) -> None:
    given = on_cpus(setup(tiny_spec(source), tmp_path), 1)
    assert type(open_task(given, anonymous_file(), quiet)) is GaslocTask


@pytest.mark.parametrize(("rows", "ranks"), [(4, 2), (5, 3), (2, 3), (1, 4)])
def test_every_row_goes_to_one_rank(rows: int, ranks: int) -> None:
    windows = torch.arange(rows * 3).view(rows, 3).numpy()
    parts = [rows_of(windows, rank, ranks) for rank in range(ranks)]
    assert sum(share for _, share in parts) == pytest.approx(1.0)
    assert all(len(part) for part, _ in parts)
    kept = [torch.from_numpy(part) for part, share in parts if share]
    assert torch.equal(torch.cat(kept), torch.from_numpy(windows))


# ---- what is lost, and what is written


def test_a_rank_that_is_silent_is_lost_within_a_minute(source: Path, tmp_path: Path, alone: None) -> None:
    """In gloo's waits, in NCCL's watchdog, which has no limit but the group's, and in rank 0's own."""
    group = group_task(spec_of(source), tmp_path)
    assert group._setup.lost_s <= 60.0
    links = group._group._shard._sharded.links
    assert links.timeout.total_seconds() == group._setup.lost_s
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == group._setup.lost_s


@pytest.mark.parametrize("signalled", [signal.SIGSTOP, signal.SIGKILL])
def test_a_slow_disk_and_a_busy_leader_are_waited_for_and_those_stopped_are_not(
    source: Path, tmp_path: Path, signalled: signal.Signals
) -> None:
    ours, theirs = Pipe()
    with ours, theirs, subprocess.Popen(["sleep", "60"]) as other:
        group = Group(replace(setup(spec_of(source), tmp_path), lost_s=0.02), [ours])
        group._pids = [os.getpid(), other.pid]
        late = threading.Timer(0.3, theirs.send, ["written"])
        late.start()
        assert group._hear(1, ours, patient=True) == "written"
        late.join()
        late = threading.Timer(0.3, theirs.send, ["a call"])
        late.start()
        wait_for(ours, other.pid, 0.02)
        assert ours.recv() == "a call"
        late.join()
        other.send_signal(signalled)
        with pytest.raises(RankLost, match="rank 0 did not answer .* is stopped"):
            wait_for(ours, other.pid, 0.02)
        with pytest.raises(RankLost, match="rank 1 did not answer"):
            group._hear(1, ours, patient=True)
        other.kill()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_what_a_rank_cannot_write_is_told_and_the_group_goes_on(
    source: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A full disk is made room on, by the older of two checkpoints; any other refusal leaves both."""
    group = group_task(spec_of(source), tmp_path)
    saved = [group.save()]
    for number in range(2):
        group.train(number, never)
        group.finish(mix=False)
        if number == 0:
            saved.append(group.save())
    refusals = [code]

    def refuse(path: Path) -> None:
        if refusals:
            refused = refusals.pop()
            raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(checkpoint_parts, "fsync_file", refuse)
    if code == errno.ENOSPC:
        third = group.save()
        assert sorted(saved[0].parent.iterdir()) == [saved[1], third]
    else:
        with pytest.raises(StorageError, match="permission denied"):
            group.save()
        assert sorted(saved[0].parent.iterdir()) == saved
        third = group.save()
    assert checkpoint.load(third).meta.round == 2


def test_transformers_and_the_export_read_what_ranks_have_written(source: Path, tmp_path: Path, alone: None) -> None:
    from transformers import AutoModelForCausalLM

    spec = spec_of(source, fragments=3)
    group = group_task(spec, tmp_path)
    rounds(group)
    saved = group.save()
    exported = export(tmp_path / "peer-a", spec, tmp_path / "exported")
    assert exported.round == 3 and exported.notes == ()
    for folder in (saved, exported.folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
        flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
        assert torch.equal(flat, group._host_theta)
    params = checkpoint.load(saved).params
    assert params is not None and not torch.equal(group._host_theta, params), "with fragments the two differ"
