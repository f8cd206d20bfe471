"""A pipeline's stages as one Hugging Face folder: a file a stage and an index, so that no machine holds the whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import safetensors.torch
import torch

from peerloom.node import checkpoint
from peerloom.protocol.errors import CheckpointError, RunMismatch
from peerloom.protocol.runspec import RunSpec


def newest_stages(run_dirs: Iterable[Path], spec: RunSpec) -> tuple[list[checkpoint.Checkpoint], list[str]]:
    """The newest intact checkpoint of every stage, and a sentence for each damaged one passed over.

    Raises CheckpointError that names the stages without one, RunMismatch for one of another run.
    """
    folders, notes = list(run_dirs), []
    found: dict[int, checkpoint.Checkpoint] = {}
    for stage in range(spec.pipeline.stages):
        for folder in folders:
            state, damaged = checkpoint.newest_intact(checkpoint.stage_folder(folder, stage), read_only=True)
            notes += damaged
            if state is not None and (stage not in found or state.meta.step > found[stage].meta.step):
                found[stage] = state
    missing = [str(stage) for stage in range(spec.pipeline.stages) if stage not in found]
    if missing:
        raise CheckpointError(
            f"no intact checkpoint of stage{'s' * (len(missing) > 1)} {', '.join(missing)} of {spec.pipeline.stages} "
            "here; gather them from the swarm with --from INVITE, or name the homes that have them with --stages-from"
        )
    if any(state.meta.spec_hash != spec.spec_hash() for state in found.values()):
        raise RunMismatch("the checkpoints belong to another run; export with that run's spec")
    return [found[stage] for stage in range(spec.pipeline.stages)], notes


def write_stages(stages: list[checkpoint.Checkpoint], spec: RunSpec, folder: Path) -> None:
    """Writes weights, configuration and tokenizer; raises RunMismatch when the model is built otherwise here."""
    from peerloom.node.worker.model import layout_digest
    from peerloom.node.worker.stage_model import stage_outline, whole_config
    from peerloom.node.worker.tokenizer import HuggingFaceTokenizer, save_byte_tokenizer

    config = whole_config(spec)
    places: dict[str, str] = {}
    for stage, state in enumerate(stages):
        outline = stage_outline(spec, stage)
        layout = tuple((name, tuple(parameter.shape)) for name, parameter in outline.named_in_whole())
        if layout_digest(layout) != state.meta.layout_digest:
            made_with = state.meta.versions.get("transformers", "another version")
            raise RunMismatch(f"this transformers builds stage {stage} otherwise than the one that trained {made_with}")
        file = "model.safetensors" if len(stages) == 1 else f"model-{stage + 1:05d}-of-{len(stages):05d}.safetensors"
        sizes = [parameter.numel() for _, parameter in outline.named_in_whole()]
        tensors = {
            name: flat.view(shape).clone()
            for (name, shape), flat in zip(layout, torch.split(state.theta, sizes), strict=True)
        }
        safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        config.architectures = [outline.architecture]
    if len(stages) > 1:
        total = sum(4 * state.theta.numel() for state in stages)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config.use_cache = True  # off while training
    config.save_pretrained(folder)
    if spec.data.tokenizer == "bytes":
        save_byte_tokenizer(folder)
    else:
        HuggingFaceTokenizer(spec.data.tokenizer).inner.save_pretrained(folder)
