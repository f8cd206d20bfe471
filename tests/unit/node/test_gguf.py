"""GGUF files: opened as plain models that can be saved, and faults that name the remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from peerloom.node.worker import gguf as ours
from peerloom.node.worker.model import build_model
from peerloom.node.worker.tokenizer import load_tokenizer
from peerloom.protocol.errors import DataError, SpecError
from peerloom.protocol.runspec import ModelSpec, RunSpec

WIDTH, HIDDEN, HEADS, VOCAB = 16, 32, 2, 48


def write(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A Llama of one layer with random weights; returns them."""
    draw = np.random.default_rng(1)
    shapes = {
        "token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,), "output": (VOCAB, WIDTH),
        "blk.0.attn_norm": (WIDTH,), "blk.0.ffn_norm": (WIDTH,),
        "blk.0.attn_q": (WIDTH, WIDTH), "blk.0.attn_k": (WIDTH, WIDTH),
        "blk.0.attn_v": (WIDTH, WIDTH), "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_gate": (HIDDEN, WIDTH), "blk.0.ffn_up": (HIDDEN, WIDTH), "blk.0.ffn_down": (WIDTH, HIDDEN),
    }  # fmt: skip
    weights = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCAB)
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_run_starts_from_a_gguf_file_and_its_model_can_be_saved(tmp_path: Path) -> None:
    weights = write(tmp_path / "tiny.gguf")
    model: Any = build_model(replace(RunSpec(), model=ModelSpec(path=str(tmp_path / "tiny.gguf"))))
    state = model.state_dict()
    assert torch.equal(state["model.embed_tokens.weight"], torch.from_numpy(weights["token_embd"]))
    assert torch.equal(state["model.layers.0.mlp.down_proj.weight"], torch.from_numpy(weights["blk.0.ffn_down"]))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.save_pretrained(tmp_path / "saved")
    again: Any = build_model(replace(RunSpec(), model=ModelSpec(path=str(tmp_path / "saved"))))
    ids = torch.arange(6).view(1, 6)
    assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)


def test_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = str(tmp_path / "none.gguf")
    with pytest.raises(SpecError, match=r"model\.path: .*none\.gguf cannot be loaded: there is no file"):
        build_model(replace(RunSpec(), model=ModelSpec(path=absent)))
    with pytest.raises(DataError, match="there is no file"):
        load_tokenizer(absent)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(SpecError, match="bad.gguf cannot be loaded: bad.gguf is damaged"):
        build_model(replace(RunSpec(), model=ModelSpec(path=str(tmp_path / "bad.gguf"))))
    monkeypatch.setattr(ours, "_NEEDED", ("gguf", "a_package_that_is_not"))
    with pytest.raises(SpecError, match=r"takes a_package_that_is_not; install with: pip install"):
        build_model(replace(RunSpec(), model=ModelSpec(path=absent)))
