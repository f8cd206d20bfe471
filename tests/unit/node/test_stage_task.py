from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from peerloom.node import checkpoint
from peerloom.node.worker import messages
from peerloom.node.worker.inner import InnerLoop
from peerloom.node.worker.memory import PAGE
from peerloom.node.worker.model import model_config
from peerloom.node.worker.schedule import learning_rate
from peerloom.node.worker.stage_costs import stage_train
from peerloom.node.worker.stage_memory import stage_memory
from peerloom.node.worker.stage_model import build_stage, stage_outline
from peerloom.node.worker.tasks.common import NonFiniteLoss
from peerloom.node.worker.tasks.stage import MEMORY_SHARE, StageTask
from peerloom.optim.basis_rotation import stage_frequencies
from peerloom.protocol.errors import ConfigError, SpecError
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.runspec import ModelSpec, RunSpec
from peerloom.protocol.spec_gasloc import GaslocSpec
from tests.unit.node.stage_tasks import LANE, LocalPipeline, batches, open_stage, reference, stage_spec
from tests.unit.node.tiny import write_text

UPDATES = 50


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "corpus")


def farthest(tasks: list[StageTask], stages: list[torch.nn.Module]) -> float:
    return max(
        float((ours - theirs).detach().abs().max())
        for task, stage in zip(tasks, stages, strict=True)
        for ours, theirs in zip(task._model.parameters(), stage.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "keys", [{}, {"optimizer": "basis_rotated"}, {"microbatches": 2}, {"schedule": "sync", "microbatches": 4}]
)
def test_four_stages_are_the_delayed_gradient_reference(source: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    spec = stage_spec(source, **keys)
    pipeline = LocalPipeline(spec, tmp_path, limit=UPDATES, seed=3)
    pipeline.run()
    stages, losses = reference(spec, tmp_path / "cache", UPDATES)
    # the mean of several microbatches is rounded otherwise than that of the whole batch
    assert farthest(pipeline.tasks, stages) < (1e-6 if spec.pipeline.microbatches == 1 else 1e-4)
    assert pipeline.losses == pytest.approx(losses, abs=1e-4)
    assert losses[-1] < losses[0] - 0.5
    lag = {stage: spec.pipeline.lag(stage) for stage in range(4)}
    assert all(delay == min(update, lag[stage]) for stage, update, delay in pipeline.delays)
    assert len(pipeline.delays) == 4 * UPDATES


@pytest.mark.parametrize("keys", [{}, {"stages": 1}, {"stash": False}, {"schedule": "sync", "microbatches": 4}])
def test_weights_that_are_proposed_amid_passes_leave_them_as_they_are(
    source: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    """Where a backward pass is still to come, its forward pass's weights must not change under it."""
    spec = replace(stage_spec(source, **keys), gasloc=GaslocSpec(gamma=0.0))
    plain, mixing = (LocalPipeline(spec, tmp_path / name, limit=12, seed=3) for name in ("plain", "mixing"))
    mixing.mix(60)
    plain.run()
    mixing.run()
    assert mixing.mixed >= 60
    if spec.pipeline.stash:  # without it what a pass is computed with depends on when it comes
        assert farthest(mixing.tasks, [task._model for task in plain.tasks]) < 1e-4
    assert all(machine.applied == 12 for machine in mixing.machines)


@pytest.mark.parametrize("optimizer", ["adamw", "basis_rotated"])
def test_one_stage_is_plain_training_bit_for_bit(source: Path, tmp_path: Path, optimizer: str) -> None:
    """That of a transformers model with the stage's first weights, with a refresh of bases amid it."""
    spec = stage_spec(source, stages=1, optimizer=optimizer)
    model = AutoModelForCausalLM.from_config(model_config(spec))
    model.load_state_dict(build_stage(spec, 0).state_dict())
    pipeline = LocalPipeline(spec, tmp_path, limit=12)
    pipeline.run()
    loop, data = InnerLoop(model, spec.train), batches(spec, tmp_path / "cache")
    plain = [
        float(loop.step(torch.from_numpy(data[update]), learning_rate(update, spec.train))) for update in range(12)
    ]
    assert pipeline.losses == plain
    theirs = dict(model.named_parameters())
    for name, parameter in pipeline.tasks[0]._model.named_in_whole():
        assert torch.equal(parameter, theirs.pop(name)), name
    assert not theirs


DIVERGED = r"diverged at update 0 of stage 0: a gradient is not finite; lower train\.learning_rate"


def test_a_first_stage_takes_no_gradient_that_is_not_finite(source: Path, tmp_path: Path) -> None:
    """It sends no gradient on that would show it, and AdamW trains on whatever comes."""
    task = open_stage(stage_spec(source, stages=2), tmp_path, 0)
    task.obey(messages.Forward(Microbatch(LANE, 0), 0, 0), lambda round: False)
    task._inbox[0, 3, 5] = torch.nan
    with pytest.raises(NonFiniteLoss, match=DIVERGED):
        task.obey(messages.Backward(Microbatch(LANE, 0)), lambda round: False)
    assert not task._sums


def test_bases_are_not_turned_by_a_sum_that_overflowed(source: Path, tmp_path: Path) -> None:
    task = open_stage(stage_spec(source, stages=2, optimizer="basis_rotated"), tmp_path, 0)
    before = task._flat.flat.clone()
    task.obey(messages.Forward(Microbatch(LANE, 0), 0, 0), lambda round: False)
    task._inbox.fill_(1.0)
    task.obey(messages.Backward(Microbatch(LANE, 0)), lambda round: False)
    for grad in task._sums[0]:
        grad.fill_(torch.inf)
    with pytest.raises(NonFiniteLoss, match=DIVERGED):
        task.obey(messages.Update(0, 0), lambda round: False)
    assert torch.equal(before, task._flat.flat)


def test_the_more_delayed_a_stage_the_more_often_its_bases_are_refreshed(source: Path) -> None:
    spec = stage_spec(source, optimizer="basis_rotated")
    found = [stage_train(spec, stage).rotation_freq for stage in range(4)]
    assert found == stage_frequencies(4, spec.train.rotation_freq) == sorted(found) and found[0] < found[-1]
    sync = stage_spec(source, optimizer="basis_rotated", schedule="sync")
    assert {stage_train(sync, stage).rotation_freq for stage in range(4)} == {spec.train.rotation_freq}


def test_without_a_stash_the_backward_pass_sees_the_newest_weights(source: Path, tmp_path: Path) -> None:
    spec = stage_spec(source, stages=2, stash=False)
    pipeline = LocalPipeline(spec, tmp_path, limit=30, seed=None)  # whose delays are those of a warm pipeline
    pipeline.run()
    stages, _ = reference(spec, tmp_path / "cache", 30)
    assert farthest(pipeline.tasks, stages) < 1e-6
    kept = LocalPipeline(stage_spec(source, stages=2), tmp_path / "kept", limit=30)
    kept.run()
    assert farthest(kept.tasks, stages) > 1e-4


def test_theta_0_is_the_same_however_it_is_cut(source: Path) -> None:
    def parameters(stages: int) -> dict[str, torch.Tensor]:
        spec = stage_spec(source, stages=stages)
        return {n: p for stage in range(stages) for n, p in build_stage(spec, stage).named_in_whole()}

    one, two, four = parameters(1), parameters(2), parameters(4)
    assert two.keys() == four.keys() == one.keys() | {"lm_head.weight"}
    assert all(torch.equal(one[name], four[name]) and torch.equal(two[name], four[name]) for name in one)
    assert torch.equal(four["lm_head.weight"], one["model.embed_tokens.weight"])  # else tied


def test_stages_are_balanced_and_built_from_their_own_layers(source: Path) -> None:
    spec = stage_spec(source)
    sizes = [sum(p.numel() for p in stage_outline(spec, stage).parameters()) for stage in range(4)]
    layer = build_stage(spec, 1)
    assert sizes[1] == sizes[2] == sum(parameter.numel() for parameter in layer.parameters())
    stages = [build_stage(spec, stage) for stage in range(4)]
    assert [stage.span for stage in stages] == stages[0].spans == stages[3].spans == [range(k, k + 1) for k in range(4)]


def test_a_stored_model_is_cut_from_its_own_numbers(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from peerloom.node.worker.model import build_model

    base = stage_spec(source, stages=2)
    whole = build_model(base)
    whole.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    spec = RunSpec(method="pipeline", model=ModelSpec(path=str(tmp_path / "model")), pipeline=base.pipeline)
    ids = torch.randint(0, 256, (2, 12))
    hidden: torch.Tensor = ids
    for stage in range(2):
        hidden = build_stage(spec, stage)(hidden)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(input_ids=ids).logits
    assert torch.allclose(hidden, expected, atol=1e-5)


def test_a_stage_goes_on_from_its_checkpoint(source: Path, tmp_path: Path) -> None:
    spec = stage_spec(source, stages=2)
    pipeline = LocalPipeline(spec, tmp_path, limit=5)
    pipeline.run()
    for task in pipeline.tasks:
        task.obey(messages.SaveStage({LANE: (5, [7])}, LANE), lambda round: False)
    again = open_stage(spec, tmp_path, 0)
    ready = again.ready()
    assert (ready.resumed, ready.step) == (True, 5)
    assert ready.pipeline == {"stage": 0, "lane": LANE, "ledger": [[LANE, 5, [7]]]}
    assert torch.equal(again._flat.flat, pipeline.tasks[0]._flat.flat)
    found, _ = checkpoint.newest_intact(checkpoint.stage_folder(tmp_path / "peer-0", 0))
    assert found is not None and found.meta.tokens == 5 * 4 * 16


@pytest.mark.parametrize("spoil", ["layout", "shape", "moments"])
def test_a_copy_that_does_not_fit_is_passed_over(source: Path, tmp_path: Path, spoil: str) -> None:
    spec = stage_spec(source, stages=2)
    pipeline = LocalPipeline(spec, tmp_path, limit=3)
    pipeline.run()
    for task in pipeline.tasks:
        task.obey(messages.SaveStage({LANE: (3, [])}, LANE), lambda round: False)
    folder = checkpoint.stage_folder(tmp_path / "peer-0", 0)
    good, _ = checkpoint.newest_intact(folder)
    assert good is not None
    newer = replace(good, meta=replace(good.meta, round=9, step=9))
    match spoil:
        case "layout":
            newer = replace(newer, meta=replace(newer.meta, layout_digest="00" * 32))
        case "shape":
            newer = replace(newer, theta=good.theta[:-1].clone(), previous=good.previous)
        case "moments":
            newer = replace(newer, optimizer={name: torch.zeros(3, 3, 3) for name in good.optimizer})
    checkpoint.save(folder, newer)
    again = open_stage(spec, tmp_path, 0)
    assert (again.ready().step, "passed over" in again.ready().note) == (3, True)
    assert torch.equal(again._flat.flat, pipeline.tasks[0]._flat.flat)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "soap", "basis_rotated"])
@pytest.mark.parametrize("encoding", ["fp32", "bf16", "int8"])
def test_the_memory_of_a_stage_is_what_it_holds(source: Path, tmp_path: Path, optimizer: str, encoding: Any) -> None:
    spec = replace(stage_spec(source, stages=2, optimizer=optimizer), gasloc=GaslocSpec(encoding=encoding))
    pipeline = LocalPipeline(spec, tmp_path, limit=3)
    pipeline.run()
    for stage, task in enumerate(pipeline.tasks):
        task.obey(messages.Mixing("propose", 0), lambda round: False)
        task._replica._partner.copy_(task._replica._proposal)
        task.obey(messages.Mixing("mix", 0), lambda round: False)
        task.obey(messages.Mixing("propose", 1), lambda round: False)
        exchanges, weights = task._replica._exchanges, task._flat.flat.nbytes
        assert exchanges is not None
        state = sum(value.nbytes for name, value in task._inner.state().items() if not name.startswith("step/"))
        block = task.layout.total_bytes - task.layout.span("proposal")[0]
        method = exchanges._method
        own = {tensor.data_ptr(): tensor.nbytes for tensor in (method.theta, method.previous, exchanges._flat)}
        own.pop(task._replica._proposal.data_ptr(), None)  # fp32: it lies in the block
        memory = stage_memory(spec, stage, on_cpu=True)
        assert memory.versions == len(task._weights._copies) == (2 if stage == 0 else 0)
        assert memory.training == (2 + memory.versions) * weights + state
        assert memory.shared == pytest.approx(sum(own.values()) + block, abs=2 * PAGE)
        assert memory.passing >= max(weights, state)


@pytest.mark.parametrize("lacking", ["for training it", "for sharing it"])
def test_a_stage_that_memory_does_not_hold_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    spec = stage_spec(source)
    memory = stage_memory(spec, 0, on_cpu=True)
    there = memory.training - 1 if lacking == "for training it" else memory.total - 1
    free = psutil.virtual_memory()._replace(available=there / MEMORY_SHARE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(ConfigError, match=r"stage 0 takes .* GB with 4 versions of its weights and .* GB for sharing"):
        open_stage(spec, tmp_path, 0)


def test_a_model_of_another_family_is_refused(source: Path) -> None:
    spec = stage_spec(source)
    with pytest.raises(SpecError, match="gpt2 cannot be cut into stages"):
        build_stage(replace(spec, model=replace(spec.model, architecture="gpt2")), 0)


def test_held_out_microbatches_leave_no_trace(source: Path, tmp_path: Path) -> None:
    with_them = LocalPipeline(stage_spec(source, eval_every=2), tmp_path / "a", limit=6, held_out=2)
    with_them.run()
    without = LocalPipeline(stage_spec(source, eval_every=2), tmp_path / "b", limit=6)
    without.run()
    assert len(with_them.held_out) == 4 and with_them.held_out[-1] < with_them.held_out[0]
    assert all(
        torch.equal(ours._flat.flat, theirs._flat.flat)
        for ours, theirs in zip(with_them.tasks, without.tasks, strict=True)
    )


def test_a_microbatch_run_again_gives_its_gradient_and_counts_no_more(source: Path, tmp_path: Path) -> None:
    last = open_stage(stage_spec(source, stages=2), tmp_path, 1)
    before = last._flat.flat.clone()
    last._inbox.normal_()
    answers = []
    for update in (0, None):
        last.obey(messages.Forward(Microbatch(LANE, 0), 0, update), lambda round: False)
        answers.append(last._outbox.clone())
    assert torch.equal(answers[0], answers[1]) and float(answers[0].abs().sum()) > 0
    assert len(last._sums) == 1
    counted = [grad.clone() for grad in last._sums[0]]
    last.obey(messages.Forward(Microbatch(LANE, 0), 0, None), lambda round: False)
    assert all(torch.equal(a, b) for a, b in zip(counted, last._sums[0], strict=True))
    assert torch.equal(before, last._flat.flat)


def test_a_version_that_is_not_kept_is_not_replaced_by_another(source: Path, tmp_path: Path) -> None:
    task = open_stage(stage_spec(source), tmp_path, 0)
    with pytest.raises(KeyError):
        task.obey(messages.Forward(Microbatch(LANE, 0), 3, 3), lambda round: False)
