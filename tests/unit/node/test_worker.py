"""The training task: exact resume, both encodings, adoption, interrupts, divergence. All in this process."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peerloom.node import checkpoint
from peerloom.node.worker.memory import BlockLayout
from peerloom.node.worker.tasks.common import NonFiniteLoss
from peerloom.node.worker.tasks.gasloc import GaslocTask
from peerloom.optim.encode import decode, encoded_bytes
from peerloom.protocol.errors import ConfigError, RunMismatch, SpecError, StorageError
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import Encoding, PeerId
from tests.unit.node.tiny import never, setup, task, tiny_spec

pytestmark = pytest.mark.usefixtures("one_thread")


def rounds(worker: GaslocTask, first: int, end: int) -> None:
    for round in range(first, end):
        worker.train(round, never)
        worker.finish(mix=False)


def state(worker: GaslocTask) -> dict[str, torch.Tensor]:
    saved = {name: getattr(worker._method, name).clone() for name in ("theta", "previous")}
    return saved | {name: tensor.clone() for name, tensor in worker._inner.state().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_resume_is_exact(source: Path, tmp_path: Path) -> None:
    spec = tiny_spec(source)
    straight = task(spec, tmp_path / "straight")
    rounds(straight, 0, 5)
    first = task(spec, tmp_path / "broken")
    rounds(first, 0, 2)
    first.save()
    second = task(spec, tmp_path / "broken")
    ready = second.ready()
    assert (ready.resumed, ready.round, ready.step, ready.tokens, ready.note) == (True, 2, 6, 6 * 2 * 16, "")
    rounds(second, 2, 5)
    assert_equal(state(second), state(straight))
    assert second._position == straight._position


def test_training_lowers_the_held_out_loss(source: Path, tmp_path: Path) -> None:
    worker = task(tiny_spec(source, local_steps=10), tmp_path)
    before = worker.ready().held_out_loss
    rounds(worker, 0, 4)
    after = worker._position.held_out_loss
    assert before is not None and after is not None
    assert before == pytest.approx(5.55, abs=0.1) and after < before - 1.5


def test_nodes_start_equal_and_draw_their_own_batches(source: Path, tmp_path: Path) -> None:
    one, other = (task(tiny_spec(source), tmp_path, peer) for peer in ("peer-a", "peer-b"))
    assert one.ready().init_digest == other.ready().init_digest
    assert one.ready().layout_digest == other.ready().layout_digest
    assert one.ready().held_out_loss == other.ready().held_out_loss
    assert one.train(0, never).train_loss != other.train(0, never).train_loss


@pytest.mark.parametrize("encoding", ["fp32", "bf16", "int8"])
def test_the_exact_mean_of_the_pair_at_both_ends(source: Path, tmp_path: Path, encoding: Encoding) -> None:
    spec = tiny_spec(source, encoding=encoding)
    spec = replace(spec, gasloc=replace(spec.gasloc, gamma=0.0))
    pair = [task(spec, tmp_path, peer) for peer in ("peer-a", "peer-b")]
    for worker in pair:
        worker.train(0, never)
    sent = [worker._outbox.clone() for worker in pair]
    assert len(sent[0]) == pair[0].ready().payload_bytes == encoded_bytes(pair[0].ready().numel, encoding)
    y = [worker._flat.flat.clone() for worker in pair]
    for worker, received in zip(pair, reversed(sent), strict=True):
        worker._inbox.copy_(received)
        assert worker.finish(mix=True).round == 1
    gap = (decode(sent[0], encoding) - decode(sent[1], encoding)) * 0.5
    assert torch.equal(pair[0]._method.theta, y[0] - gap)
    assert torch.equal(pair[1]._method.theta, y[1] + gap)
    if encoding == "fp32":
        assert torch.allclose(pair[0]._method.theta, pair[1]._method.theta, atol=1e-7)


def test_evaluation_when_due_and_without_a_trace(source: Path, tmp_path: Path) -> None:
    worker = task(tiny_spec(source), tmp_path)
    worker.train(0, never)
    assert worker.finish(mix=False).held_out_loss is None
    worker.train(1, never)
    evaluated = worker.finish(mix=False).held_out_loss
    before = state(worker)
    assert evaluated is not None and worker._evaluate() == evaluated
    assert_equal(state(worker), before)


def test_an_interrupt_ends_the_round_early_and_gives_the_batches_back(source: Path, tmp_path: Path) -> None:
    worker = task(tiny_spec(source, local_steps=50), tmp_path)
    asked = iter([False, True])
    trained = worker.train(0, lambda: next(asked))
    assert (trained.batches, trained.step, trained.first_batch) == (2, 2, 0)
    worker.finish(mix=False)
    assert worker.train(1, lambda: True).first_batch == 2


def test_a_round_killed_half_way_repeats_no_batch(source: Path, tmp_path: Path) -> None:
    spec = tiny_spec(source)
    first = task(spec, tmp_path)
    rounds(first, 0, 2)
    first.save()
    first.train(2, never)  # killed at its exchange point
    again = task(spec, tmp_path)
    assert again.ready().round == 2
    assert again.train(2, never).first_batch == 9


def test_adopting_a_donor(source: Path, tmp_path: Path) -> None:
    spec = tiny_spec(source)
    donor, joiner = task(spec, tmp_path, "donor"), task(spec, tmp_path, "joiner")
    rounds(donor, 0, 6)
    rounds(joiner, 0, 1)
    joiner._host_theta.copy_(donor._host_theta)
    adopted = joiner.adopt(6, 18)
    assert adopted.round == 6 and adopted.held_out_loss == donor._position.held_out_loss
    assert torch.equal(joiner._flat.flat, donor._method.theta) and torch.equal(
        joiner._method.previous, donor._method.theta
    )
    assert joiner._inner.state() == {}
    assert joiner.train(6, never).step == 21
    joiner.finish(mix=False)
    joiner.save()
    saved, _ = checkpoint.newest_intact(tmp_path / "joiner" / "checkpoints")
    assert saved is not None and (saved.meta.adopted_at, saved.meta.adam_steps, saved.meta.tokens) == (18, 3, 6 * 32)


@pytest.mark.parametrize("optimizer", ["adamw", "basis_rotated"])
def test_divergence_is_said_in_a_sentence_and_nothing_of_it_is_kept(
    source: Path, tmp_path: Path, optimizer: Any
) -> None:
    spec = tiny_spec(source)
    spec = replace(spec, train=replace(spec.train, optimizer=optimizer))
    worker = task(spec, tmp_path)
    rounds(worker, 0, 2)
    worker.save()
    next(worker._model.parameters()).data.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match=r"diverged in round 2 \(step [69]\): .*lower train\.learning_rate"):
        worker.train(2, never)
    assert task(spec, tmp_path).ready().round == 2


def test_save_only_between_rounds(source: Path, tmp_path: Path) -> None:
    worker = task(tiny_spec(source), tmp_path)
    worker.train(0, never)
    with pytest.raises(RuntimeError, match=r"finish\(\) before save\(\)"):
        worker.save()


def test_only_the_next_round_is_trained(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="asked to train round 4 while round 0 is next"):
        task(tiny_spec(source), tmp_path).train(4, never)


def test_a_disk_that_refuses_the_cursor_stops_the_round_before_it_trains(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = task(tiny_spec(source), tmp_path)
    before = state(worker)

    def refuse(fd: int, content: bytes, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.pwrite", refuse)
    with pytest.raises(StorageError, match="I/O error"):
        worker.train(0, never)
    assert_equal(state(worker), before)
    monkeypatch.undo()
    assert worker.train(0, never).first_batch == 0


def test_what_start_reports(source: Path, tmp_path: Path) -> None:
    told: list[str] = []
    worker = task(tiny_spec(source), tmp_path, progress=lambda what, share: told.append(what))
    assert list(dict.fromkeys(told)) == ["model", "tokenizing", "checkpoint", "evaluation"]
    assert list(worker.phases) == ["model", "data", "checkpoint", "evaluation"]
    assert not worker.ready().resumed


def test_a_damaged_checkpoint_is_named_in_the_note(source: Path, tmp_path: Path) -> None:
    worker = task(tiny_spec(source), tmp_path)
    rounds(worker, 0, 1)
    worker.save()
    rounds(worker, 1, 2)
    (worker.save() / "theta.safetensors").write_bytes(b"")
    ready = task(tiny_spec(source), tmp_path).ready()
    assert (ready.resumed, ready.round) == (True, 1)
    assert "round-00000002 is damaged" in ready.note


def another_seed(spec: RunSpec) -> RunSpec:
    return replace(spec, seed=spec.seed + 1)


def test_checkpoints_of_another_run_are_refused(source: Path, tmp_path: Path) -> None:
    worker = task(tiny_spec(source), tmp_path)
    worker.save()
    with pytest.raises(RunMismatch, match="belong to another run"):
        task(another_seed(tiny_spec(source)), tmp_path)


@pytest.mark.parametrize("device", ["cuda:7", "tpu", "mps", "cuda:x"])
def test_a_device_that_is_not_there(source: Path, tmp_path: Path, device: str) -> None:
    wanted = replace(setup(tiny_spec(source), tmp_path), device=device)
    with pytest.raises(ConfigError, match=f"device: '{device}' is"):
        GaslocTask(wanted, -1, lambda what, share: None)


def test_a_tokenizer_larger_than_the_model(source: Path, tmp_path: Path) -> None:
    from peerloom.node.worker.tokenizer import save_byte_tokenizer

    save_byte_tokenizer(tmp_path / "tokenizer")
    spec = tiny_spec(source)
    data = replace(spec.data, tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(SpecError, match=r"model\.vocab_size: 200 is less than the tokenizer's 256"):
        task(replace(spec, data=data, model=replace(spec.model, vocab_size=200)), tmp_path)
    assert task(replace(spec, data=data), tmp_path, PeerId("b")).ready().held_out_loss is not None


@pytest.mark.parametrize("own_outbox", [False, True])
@pytest.mark.parametrize("numel", [1, 1024, 1025, 100_000])
def test_regions_do_not_overlap(numel: int, own_outbox: bool) -> None:
    replica_bytes = 4 * numel + 1 if own_outbox else 0
    layout = BlockLayout(numel, numel * 2 if own_outbox else numel * 4, own_outbox, replica_bytes=replica_bytes)
    regions = ("params", "theta", "previous", "inbox") + (("outbox", "proposal", "partner") if own_outbox else ())
    spans = [layout.span(region) for region in regions]  # type: ignore[arg-type]
    assert all(start % 4096 == 0 for start, _ in spans)
    assert all(start + length <= later for (start, length), (later, _) in zip(spans, spans[1:], strict=False))
    assert layout.total_bytes == sum(spans[-1])
    assert (layout.span("outbox") == layout.span("params")) is not own_outbox
