"""SeedFlow's task in this very process: it learns, classifies, survives late messages, and its sums make the model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from peerloom.node.export import export
from peerloom.node.worker import messages
from peerloom.node.worker import seedflow_state as states
from peerloom.node.worker.classification import Example
from peerloom.node.worker.memory import anonymous_file
from peerloom.node.worker.model import build_model
from peerloom.node.worker.objectives import parts
from peerloom.node.worker.seedflow_port import SeedflowProcess
from peerloom.node.worker.tasks.seedflow import SeedflowTask
from peerloom.protocol.errors import CheckpointError, DataError, MalformedMessage, RunMismatch, SpecError
from peerloom.protocol.flood_messages import Batch, origin_key
from peerloom.protocol.runspec import ModelSpec, RunSpec
from peerloom.protocol.spec_seedflow import SeedflowSpec
from peerloom.protocol.spec_task import TaskSpec
from peerloom.protocol.types import PeerId
from tests.unit.node.test_gguf import write as write_gguf
from tests.unit.node.tiny import never, setup, tiny_spec, write_text

FLOW = SeedflowSpec(rank=4, period=50, max_steps=200, clients=1, learning_rate=3e-3)


def text_spec(home: Path, **changes: Any) -> RunSpec:
    return replace(tiny_spec(write_text(home / "text")), method="seedflow", seedflow=replace(FLOW, **changes))


def task(spec: RunSpec, home: Path, peer: str = "peer-a") -> SeedflowTask:
    return SeedflowTask(setup(spec, home, peer), anonymous_file(), lambda what, share: None)


def test_steps_lower_the_loss_and_are_the_same_again(tmp_path: Path) -> None:
    spec = text_spec(tmp_path)
    one, other = task(spec, tmp_path), task(spec, tmp_path)
    before = one.evaluate()
    taken = one.steps(150, 0, 0, never)
    assert len(taken.scalars) == 150 and taken.tokens == 150 * 2 * 16
    assert one.evaluate().loss < before.loss - 0.02
    other.apply((Batch(PeerId("peer-a"), 0, 0, taken.scalars),))  # what a node that starts again replays
    assert other.state_hash() == one.state_hash() and other.evaluate() == one.evaluate()


def test_a_decaying_learning_rate_is_in_the_scalars_and_who_applies_them_need_not_know(tmp_path: Path) -> None:
    plain = text_spec(tmp_path)
    decaying = replace(plain, seedflow=replace(plain.seedflow, decay="linear"))
    whole = task(plain, tmp_path).steps(1, 100, 0, never).scalars[0]
    worker = task(decaying, tmp_path)
    taken = worker.steps(1, 100, 0, never).scalars
    assert abs(whole) > 20 and abs(taken[0] - whole / 2) <= 1, "half of the 200 steps are done"
    for spec in (plain, decaying):
        other = task(spec, tmp_path)
        other.apply((Batch(PeerId("peer-a"), 0, 100, taken),))
        assert other.state_hash() == worker.state_hash() and other.evaluate() == worker.evaluate()


class Undisturbed:
    def interrupted(self, round: int) -> bool:
        return False

    def wait(self) -> None:
        return None


def daemon_end(worker: SeedflowTask, monkeypatch: pytest.MonkeyPatch) -> SeedflowProcess:
    """Of a worker that is in this very process."""

    async def call(command: messages.Command, _: object) -> object:
        return worker.obey(command, Undisturbed())

    port = SeedflowProcess()
    for name, value in (("_memory_fd", worker._memory_fd), ("_child", object()), ("_call", call)):
        monkeypatch.setattr(port, name, value)
    return port


async def test_sums_of_more_bytes_than_one_call_moves_are_handed_over_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call moves more than 1,000 bytes here, as none moves more than 2 GiB."""
    read, write = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read(fd, min(size, 1000), at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, memoryview(data)[:1000], at))
    spec = text_spec(tmp_path)
    donor, joiner = task(spec, tmp_path), task(spec, tmp_path, "peer-b")
    donor.apply((Batch(PeerId("peer-a"), 0, 0, (100, -200)),))
    state = await daemon_end(donor, monkeypatch).export_state()
    assert state == donor.export_state() and len(state) > 1000
    await daemon_end(joiner, monkeypatch).adopt_state(state)
    assert joiner.state_hash() == donor.state_hash()


def test_late_messages_are_summed_from_the_base_before_an_evaluation(tmp_path: Path) -> None:
    spec = text_spec(tmp_path)
    late, early = task(spec, tmp_path), task(spec, tmp_path)
    own = late.steps(60, 0, 0, never).scalars  # into the second period
    foreign = Batch(PeerId("peer-b"), 0, 3, (500, -700))
    late.apply((foreign,))
    early.apply((foreign, Batch(PeerId("peer-a"), 0, 0, own)))
    assert late.evaluate() == early.evaluate()


def test_only_what_is_trainable_changes(tmp_path: Path) -> None:
    worker = task(text_spec(tmp_path, trainable=r"mlp\.down"), tmp_path)
    before = {name: tensor.clone() for name, tensor in worker.model.named_parameters()}
    worker.steps(3, 0, 0, never)
    changed = {name for name, tensor in worker.model.named_parameters() if not torch.equal(tensor, before[name])}
    assert changed == {"model.layers.0.mlp.down_proj.weight"}
    with pytest.raises(SpecError, match=r"seedflow\.trainable: no parameter"):
        task(text_spec(tmp_path / "none", trainable="nothing"), tmp_path)


def test_nothing_but_sums_and_shards_is_left_on_disk(tmp_path: Path) -> None:
    worker = task(text_spec(tmp_path), tmp_path)
    assert not list((tmp_path / "peer-a").iterdir()), "base and anchor have no names"
    worker.save(0)
    assert [file.name for file in (tmp_path / "peer-a").iterdir()] == [states.FILE]


def test_periods_past_the_runs_are_no_state(tmp_path: Path) -> None:
    spec = text_spec(tmp_path)
    worker, other = task(spec, tmp_path), task(replace(spec, seedflow=replace(spec.seedflow, max_steps=50)), tmp_path)
    worker.apply((Batch(PeerId("peer-b"), 0, 60, (1,)),))
    with pytest.raises(MalformedMessage, match="later periods"):
        other.adopt_state(worker.export_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.float8_e4m3fn, torch.complex64])
def test_sums_in_other_numbers_are_no_state(tmp_path: Path, dtype: torch.dtype) -> None:
    worker = task(text_spec(tmp_path), tmp_path)
    worker.apply((Batch(PeerId("peer-b"), 0, 0, (1,)),))
    sums = safetensors.torch.load(worker.export_state())
    for name in sums:
        with pytest.raises(MalformedMessage, match="other tensors"):
            worker.adopt_state(safetensors.torch.save(sums | {name: sums[name].to(torch.float32).to(dtype)}))


@pytest.mark.parametrize("peer", ["peer-a", "peer-b", "peer-c", "peer-d"])
def test_keys_fit_the_sums(peer: str) -> None:
    key = states.signed_key(PeerId(peer))
    assert -(2**63) <= key < 2**63 and key % 2**64 == origin_key(PeerId(peer))


def reviews(folder: Path, rows: int = 80) -> Path:
    """TSV with a header; a row's label shows in its every letter."""
    folder.mkdir(parents=True)
    said = [("no", "x") if number % 2 else ("yes", "o") for number in range(rows)]
    lines = [f"{number}\t{label}\t{letter * 6}{number}" for number, (label, letter) in enumerate(said)]
    (folder / "rows.tsv").write_text("\n".join(["id\tlabel\ttext", *lines]))
    return folder / "rows.tsv"


def prompt_spec(home: Path) -> RunSpec:
    spec = text_spec(home, learning_rate=0.05)
    wanted = TaskSpec(kind="classification", template="{text} is ", labels="yes|no", label_words="good|bad")
    data = replace(spec.data, source=str(reviews(home / "rows")), sequence_length=24)
    return replace(spec, task=wanted, data=data, train=replace(spec.train, batch_size=8, eval_batches=4))


def test_a_classification_is_learnt(tmp_path: Path) -> None:
    worker = task(prompt_spec(tmp_path), tmp_path)
    before = worker.evaluate()
    worker.steps(200, 0, 0, never)
    after = worker.evaluate()
    assert after.loss < before.loss - 0.05
    assert before.accuracy is not None and after.accuracy is not None and after.accuracy >= before.accuracy


def test_parts_are_disjoint_and_large_enough() -> None:
    examples = [Example(f"text {number}", number % 2) for number in range(40)]
    train, held_out = parts(examples, 1, 0.25, 20)
    assert (len(train), len(held_out)) == (20, 10) and not {one.text for one in train} & {one.text for one in held_out}
    assert parts(examples, 1, 0.25, 0)[1] == held_out
    with pytest.raises(DataError, match="too few"):
        parts(examples, 1, 0.25, 31)


def test_an_export_is_the_base_with_the_sums(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = text_spec(tmp_path)
    worker = task(spec, tmp_path)
    worker.steps(60, 0, 0, never)
    path = worker.save(60)
    exported = export(tmp_path / "peer-a", spec, tmp_path / "out")
    assert exported.step == 60
    opened, ids = AutoModelForCausalLM.from_pretrained(exported.folder), torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(opened(input_ids=ids).logits, worker.model(input_ids=ids).logits)
    with pytest.raises(RunMismatch, match="another run"):
        export(tmp_path / "peer-a", replace(spec, seed=2), tmp_path / "other")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="damaged"):
        export(tmp_path / "peer-a", spec, tmp_path / "other")
    path.unlink()
    with pytest.raises(CheckpointError, match="no sums"):
        export(tmp_path / "peer-a", spec, tmp_path / "other")


def test_a_gguf_base_is_exported_as_a_plain_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "tiny.gguf")
    spec = replace(text_spec(tmp_path), model=ModelSpec(path=str(tmp_path / "tiny.gguf")))
    model = build_model(spec)
    base = {target.name: target.parameter.detach().clone() for target in states.trainable(model, spec)}
    flow = states.open_flow(model.requires_grad_(False), spec, base, None)
    about: dict[str, object] = {
        "step": 5, "spec_hash": spec.spec_hash(), "init_digest": states.base_digest(model)
    }
    flow.apply([(1, 0, 0, 10**5)])
    states.write(tmp_path, flow, about)
    export(tmp_path, spec, tmp_path / "out")
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())
    assert any(not torch.equal(found[name], tensor) for name, tensor in base.items())


def test_sums_over_another_base_are_not_exported(tmp_path: Path) -> None:
    spec = text_spec(tmp_path)
    worker = task(spec, tmp_path)
    states.write(tmp_path, worker._flow, {"step": 0, "spec_hash": spec.spec_hash(), "init_digest": "00"})
    with pytest.raises(RunMismatch, match="base model is another"):
        export(tmp_path, spec, tmp_path / "out")
