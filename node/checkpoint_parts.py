"""A checkpoint in parts: whole tensors by name, each in the file of the rank that owns it, as Hugging Face has shards.

    config.json                             where the model has one: AutoModelForCausalLM loads the folder
    model-00001-of-00004.safetensors        parameters; one a rank that owns some
    model.safetensors.index.json            the usual index of several files
    moments-00001-of-00004.safetensors      optimizer tensors, "parameter/what"; other kinds of tensors alike

No file depends on who wrote another, so ranks write side by side, and any number of ranks reads what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peerloom.node.checkpoint_manifest import CONFIG, INDEX, TENSORS, File, fingerprint
from peerloom.node.durable import fsync_file, storage_errors

MODEL, MOMENTS = "model", "moments"
_ONE_FILE = TENSORS[1]  # has "what/parameter"


def write_part(
    folder: Path, rank: int, world_size: int, kinds: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Any]]:
    """Writes one rank's tensors, a file a kind that has any; durable. What to list of each file: see `finish`.

    Raises StorageError.
    """
    written: dict[str, dict[str, Any]] = {}
    with storage_errors(f"the checkpoint {folder}", SafetensorError):
        for kind, tensors in kinds.items():
            if not tensors:
                continue
            path = folder / f"{kind}-{rank + 1:05d}-of-{world_size:05d}.safetensors"
            held = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            safetensors.torch.save_file(held, path, metadata={"format": "pt"})
            fsync_file(path)
            size = sum(tensor.nbytes for tensor in held.values())
            written[path.name] = {"keys": list(held), "tensor_bytes": size, **fingerprint(path, threads=1)}
    return written


def finish(folder: Path, written: Mapping[str, Mapping[str, Any]], config: Any = None) -> dict[str, File]:
    """Adds the index of what all ranks have written, and a transformers configuration; size and digest of each file.

    Raises OSError.
    """
    models = {name: found for name, found in sorted(written.items()) if name.startswith(f"{MODEL}-")}
    index = {
        "metadata": {"total_size": sum(found["tensor_bytes"] for found in models.values())},
        "weight_map": {key: name for name, found in models.items() for key in found["keys"]},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    files: dict[str, File] = {}
    for name, found in sorted(written.items()):
        files[name] = {"bytes": found["bytes"], "blake3": found["blake3"]}
    for name in (INDEX, CONFIG):
        if (folder / name).exists():
            fsync_file(folder / name)
            files[name] = fingerprint(folder / name)
    return files


class Parts:
    """The tensors of all files of one kind, read in part or whole; used in a `with`.

    Of optimizer tensors ("moments") also those of a state that one process wrote. Raises OSError, SafetensorError.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._alone = kind == MOMENTS and (folder / _ONE_FILE).exists()
        self._paths = [folder / _ONE_FILE] if self._alone else sorted(folder.glob(f"{kind}-*-of-*.safetensors"))
        self._stack = ExitStack()
        self._found: dict[str, tuple[Any, str]] = {}

    def __enter__(self) -> Parts:
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._found |= {turned(key) if self._alone else key: (file, key) for key in file.keys()}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keys(self) -> list[str]:
        return list(self._found)

    def shape(self, key: str) -> tuple[int, ...]:
        file, name = self._found[key]
        return tuple(file.get_slice(name).get_shape())

    def read(self, key: str, first: int = 0, rows: int | None = None) -> Tensor:
        file, name = self._found[key]
        if rows is None:
            whole: Tensor = file.get_tensor(name)
            return whole
        part: Tensor = file.get_slice(name)[first : first + rows]
        return part


def flat(folder: Path, kind: str, names: Iterable[str]) -> Tensor | None:
    """All tensors of a kind one after the other, fp32; None where there are none. KeyError for one that is missing."""
    with Parts(folder, kind) as parts:
        if not parts.keys():
            return None
        order = list(names)
        sizes = [torch.Size(parts.shape(name)).numel() for name in order]
        whole = torch.empty(sum(sizes), dtype=torch.float32)
        for name, place in zip(order, torch.split(whole, sizes), strict=True):
            place.copy_(parts.read(name).view(-1))
        return whole


def turned(key: str) -> str:
    """ "what/parameter" as "parameter/what" and back: no parameter's name has a slash."""
    first, second = key.split("/")
    return f"{second}/{first}"
