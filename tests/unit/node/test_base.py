"""A base model written by one node and opened by another that has none: the same model, or none at all."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peerloom.node import base_folder
from peerloom.node.base_donor import BaseDonor
from peerloom.node.cli_files import check
from peerloom.node.clock import SystemClock
from peerloom.node.export import export
from peerloom.node.specs import load_spec
from peerloom.node.worker.base import numel_of, open_base, write_base
from peerloom.node.worker.memory import anonymous_file
from peerloom.node.worker.model import build_model
from peerloom.node.worker.seedflow_state import base_digest
from peerloom.node.worker.tasks.gasloc import GaslocTask
from peerloom.node.worker.tasks.seedflow import SeedflowTask
from peerloom.node.worker.tokenizer import ByteTokenizer, save_byte_tokenizer
from peerloom.protocol.base import BaseFiles, unpack_files
from peerloom.protocol.errors import BaseMissing, ConfigError, RunMismatch, SpecError
from peerloom.protocol.flood_messages import Batch
from peerloom.protocol.messages import FetchRequest, StateManifest, StatePiece
from peerloom.protocol.runspec import ModelSpec, RunSpec
from peerloom.protocol.types import PeerId
from tests.unit.node.test_gguf import write as write_gguf
from tests.unit.node.test_seedflow_task import task, text_spec
from tests.unit.node.tiny import never, setup

FOREIGN = Batch(PeerId("peer-b"), 0, 3, (500, -700))


def folder_spec(home: Path, kind: str) -> RunSpec:
    """A run whose base and tokenizer lie in a folder."""
    plain = text_spec(home)
    model: Any = build_model(plain)
    model.to(torch.bfloat16 if kind == "bf16" else torch.float32).save_pretrained(home / "named")
    save_byte_tokenizer(home / "named")
    path = str(home / "named")
    return replace(plain, model=ModelSpec(path=path), data=replace(plain.data, tokenizer=path))


def handed_over(donor: SeedflowTask, home: Path) -> tuple[Path, str]:
    """What a joiner's daemon leaves in the folder of its run, and the encoding."""
    run_dir = home / "peer-c"
    folder = base_folder.empty(run_dir)
    donor.write_base(folder)
    found = unpack_files((folder / base_folder.PACKED).read_bytes())
    digest = donor.ready().init_digest
    assert base_folder.weights_digest(folder / base_folder.WEIGHTS, found.encoding) == digest
    numel = numel_of(folder)
    assert numel == donor.ready().numel
    assert (folder / base_folder.WEIGHTS).stat().st_size == numel * (2 if found.encoding == "bf16" else 4)
    kept = base_folder.keep(run_dir, folder, found.encoding, digest, 1)
    assert base_folder.fetched(run_dir) == kept and not list(run_dir.glob(".base-*"))
    return run_dir, found.encoding


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_joiner_trains_on_what_another_node_wrote(tmp_path: Path, kind: str) -> None:
    spec = folder_spec(tmp_path, kind)
    donor = task(spec, tmp_path)
    donor.steps(5, 0, 0, never)  # its weights are not the base's any more
    named = Path(spec.model.path)
    named.rename(tmp_path / "elsewhere")
    with pytest.raises(BaseMissing, match=r"model\.path: .* cannot be loaded"):
        task(spec, tmp_path, "peer-c")
    run_dir, encoding = handed_over(donor, tmp_path)
    assert encoding == ("bf16" if kind == "bf16" else "fp32")
    joiner = task(spec, tmp_path, "peer-c")
    assert joiner.ready() == donor.ready()
    joiner.adopt_state(donor.export_state())
    for worker in (joiner, donor):
        worker.apply((FOREIGN,))
    assert joiner.state_hash() == donor.state_hash() and joiner.evaluate() == donor.evaluate()
    joiner.save(5)
    exported = export(run_dir, spec, tmp_path / "out").folder
    again: Any = build_model(replace(spec, model=ModelSpec(path=str(exported))))
    assert all(map(torch.equal, again.parameters(), donor.model.parameters()))
    again_handed = base_folder.empty(tmp_path / "peer-d")
    joiner.write_base(again_handed)
    packed = (run_dir / base_folder.FOLDER / base_folder.PACKED).read_bytes()
    assert (again_handed / base_folder.PACKED).read_bytes() == packed, "a base goes on from hand to hand as it was"


def test_a_base_that_the_run_does_not_name_is_refused_and_the_command_says_which_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, path = folder_spec(tmp_path, "fp32"), tmp_path / "run.toml"
    path.write_text(plain.canonical())
    assert check(path, base=True) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    digest = task(plain, tmp_path).ready().init_digest
    assert line == f'digest = "{digest}"'
    path.write_text(plain.canonical().replace("[model]\n", f"[model]\n{line}\n"))
    assert check(path, base=True) == 0 and "is the one that model.digest names" in capsys.readouterr().out
    named = load_spec(path)
    assert named.run_id != plain.run_id and task(named, tmp_path).ready().init_digest == digest
    other: Any = build_model(plain)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-6
    other.save_pretrained(tmp_path / "named")
    with pytest.raises(RunMismatch, match=r"model\.digest names .*put the run's own files there, or none: then a peer"):
        task(named, tmp_path, "peer-b")
    with pytest.raises(RunMismatch, match=r"has the digest .*, and model\.digest names"):
        check(path, base=True)
    gasloc = replace(named, method="gasloc")
    with pytest.raises(RunMismatch, match=r"put the run's own files there$"):
        GaslocTask(setup(gasloc, tmp_path, "peer-c"), anonymous_file(), lambda what, share: None)
    path.write_text("")
    with pytest.raises(ConfigError, match="has no base to name"):
        check(path, base=True)


def test_a_gguf_base_is_handed_over_as_plain_weights(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    model = build_model(replace(RunSpec(), model=ModelSpec(path=str(tmp_path / "tiny.gguf"))))
    digest, folder = base_digest(model), base_folder.empty(tmp_path / "run")
    write_base(folder, model, {}, ByteTokenizer(), digest)
    opened = open_base(base_folder.keep(tmp_path / "run", folder, "fp32", digest, 1))
    ids = torch.arange(6).view(1, 6)
    assert torch.equal(opened(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_damaged_copy_is_not_trained_on(tmp_path: Path) -> None:
    spec = folder_spec(tmp_path, "fp32")
    donor = task(spec, tmp_path)
    run_dir, _ = handed_over(donor, tmp_path)
    weights = run_dir / base_folder.FOLDER / base_folder.WEIGHTS
    good = weights.read_bytes()
    weights.write_bytes(good[:100] + b"\1\2\3\4" + good[104:])
    with pytest.raises(BaseMissing, match="is damaged: it has another digest"):
        task(spec, tmp_path, "peer-c")
    weights.write_bytes(good[:-4])
    with pytest.raises(BaseMissing, match="ends early"):
        task(spec, tmp_path, "peer-c")
    base_folder.discard(run_dir)
    assert base_folder.fetched(run_dir) is None


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"model_type": "no_such"}, "makes no model"),
        ({"model_type": 7}, "makes no model"),
        ({"model_type": "llama", "hidden_size": "wide"}, "makes no model"),
        ({"model_type": "llama", "hidden_size": -4}, "makes no model"),
        ({"model_type": "llama", "hidden_act": "__import__('os')"}, "makes no model"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "batch_norm_has_buffers"}, "makes no model"),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused(tmp_path: Path, about: dict[str, Any], why: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(SpecError, match=why):
        numel_of(tmp_path)


@pytest.mark.parametrize("content", [b"{}", b"\0", b'{"version": "1.0", "model": {"type": "BPE", "vocab": 7}}'])
def test_a_tokenizer_that_does_not_open_or_fit_is_refused(tmp_path: Path, content: bytes) -> None:
    about = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**about, "vocab_size": 255, "num_hidden_layers": 1}))
    save_byte_tokenizer(tmp_path)
    with pytest.raises(SpecError, match="has 256 words, its model 255"):
        numel_of(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(SpecError, match="tokenizer does not open"):
        numel_of(tmp_path)


def test_sizes_come_without_memory_for_them_and_without_foreign_code(tmp_path: Path) -> None:
    """Some 10^14 parameters; and what would have code fetched is not even looked at."""
    code = {"AutoConfig": "evil/repo--config.Evil", "AutoModelForCausalLM": "evil/repo--model.Evil"}
    about = {
        "model_type": "llama", "hidden_size": 1 << 20, "intermediate_size": 1 << 22, "num_attention_heads": 8,
        "vocab_size": 1000, "num_hidden_layers": 2, "auto_map": code, "attn_implementation": "evil/kernels",
        "_attn_implementation": "evil/kernels", "quantization_config": {"quant_method": "bitsandbytes"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert numel_of(tmp_path) > 10**13


def test_a_model_that_its_configuration_does_not_rebuild_is_not_handed_over(tmp_path: Path) -> None:
    donor = task(text_spec(tmp_path), tmp_path)
    donor.model.config.hidden_size = 8  # type: ignore[union-attr, assignment]
    with pytest.raises((RunMismatch, SpecError)):
        donor.write_base(base_folder.empty(tmp_path / "peer-c"))


def test_files_are_those_of_the_list_alone(tmp_path: Path) -> None:
    found = BaseFiles("fp32", {"config.json": b"{}", "../../evil.py": b"x", "model.py": b"x"})
    folder = base_folder.empty(tmp_path)
    packed = base_folder.pack_files(found)
    base_folder.write_files(folder, unpack_files(packed))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", base_folder.PACKED]


async def test_a_donor_goes_on_writing_when_its_joiner_leaves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    written, begun = asyncio.Event(), asyncio.Event()
    calls: list[bool] = []

    async def write(folder: Path, weights: bool) -> None:
        calls.append(weights)
        begun.set()
        await written.wait()
        (folder / base_folder.WEIGHTS).write_bytes(b"weights!")

    donor = BaseDonor(SystemClock(), "ab" * 32, tmp_path, write)
    request = FetchRequest("ab" * 32, kind="base")

    async def served() -> list[object]:
        return [message async for message in donor.serve(request)]

    leaving = asyncio.create_task(served())
    await begun.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    written.set()
    manifest, piece = await served()
    assert isinstance(manifest, StateManifest) and manifest.total_bytes == 8
    assert piece == StatePiece(0, b"weights!") and calls == [True]
    await donor.close()
    assert base_folder.fetched(tmp_path) is None and os.listdir(tmp_path) == []
