"""The base model of a run that a peer handed over: opened without its files' word for anything but numbers.

Weights are put into a model built from the configuration; no pickle is read, and no code but transformers' own runs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from peerloom.node import base_folder
from peerloom.node.durable import storage_errors
from peerloom.node.worker.model import build_model, placed
from peerloom.node.worker.seedflow_state import base_digest
from peerloom.node.worker.tokenizer import HuggingFaceTokenizer, Tokenizer
from peerloom.protocol.base import CONFIG, FILES, TOKENIZER, BaseFiles, cleaned, only_named
from peerloom.protocol.errors import BaseMissing, MalformedMessage, RunMismatch, SpecError
from peerloom.protocol.runspec import RunSpec

MAX_BUFFERS = 1 << 26  # numbers beyond as many as there are parameters: masks and tables that are made, not fetched


def base_of(spec: RunSpec, run_dir: Path) -> nn.Module:
    """The base as a peer handed it over, else as the spec names it.

    Raises BaseMissing where the spec names one that cannot be had here, or what a peer gave is damaged; SpecError.
    """
    if (folder := base_folder.fetched(run_dir)) is not None:
        return open_base(folder)
    try:
        return build_model(spec)
    except SpecError as error:
        if not spec.model.path:
            raise
        raise BaseMissing(error.problems) from error


def with_tokenizer(spec: RunSpec, run_dir: Path) -> RunSpec:
    """The spec with the tokenizer that came with the base, if one came."""
    if (folder := base_folder.fetched(run_dir)) is None:
        return spec
    named = base_folder.tokenizer_of(folder, spec.data.tokenizer)
    return replace(spec, data=replace(spec.data, tokenizer=named))


def numel_of(folder: Path) -> int:
    """How many parameters the folder's configuration makes, tied ones once, without memory for them; raises SpecError.

    A model with persistent buffers is refused, since the digest does not cover them, and so is a tokenizer that does
    not open or has more words than the model.
    """
    with torch.device("meta"):
        model = _built(_read_config(folder))
    _check_buffers(model)
    if (folder / TOKENIZER).is_file():
        _check_tokenizer(folder, model.config)
    return sum(parameter.numel() for parameter in model.parameters())


def _check_buffers(model: nn.Module) -> None:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if beside := sorted(set(model.state_dict()) - parameters):
        raise SpecError([f"model.path: the base has {beside[0]} beside its parameters, which no digest covers"])
    most = sum(parameter.numel() for parameter in model.parameters()) + MAX_BUFFERS
    if (found := sum(buffer.numel() for buffer in model.buffers())) > most:
        raise SpecError([f"model.path: the base's configuration makes buffers of {found} numbers"])


def _check_tokenizer(folder: Path, config: Any) -> None:
    try:
        words = HuggingFaceTokenizer(str(folder)).vocab_size
    except Exception as error:  # as with a configuration, whatever the libraries raise
        raise SpecError([f"data.tokenizer: the base's tokenizer does not open: {str(error)[:200]}"]) from error
    if words > config.vocab_size:
        raise SpecError([f"data.tokenizer: the base's tokenizer has {words} words, its model {config.vocab_size}"])


def open_base(folder: Path) -> nn.Module:
    """The model that lies in the folder; raises BaseMissing where it is not what was fetched."""
    try:
        encoding = base_folder.encoding_of(folder)
        model = placed(lambda: _built(_read_config(folder)), _reader(folder / base_folder.WEIGHTS, encoding))
        wanted = json.loads((folder / base_folder.ABOUT).read_bytes())["init_digest"]
    except (SpecError, MalformedMessage, OSError, ValueError, KeyError, TypeError) as error:
        raise BaseMissing([f"the base model in {folder} cannot be opened: {error}"]) from error
    if base_digest(model) != wanted:
        raise BaseMissing([f"the base model in {folder} is damaged: it has another digest than when it was fetched"])
    return model


def write_base(folder: Path, model: nn.Module, base: Mapping[str, Tensor], tokenizer: Tokenizer, digest: str) -> None:
    """Writes what open_base opens, from a model whose trained tensors were at first what `base` has of them.

    `digest` is the base's; without it no weights are written. Raises RunMismatch for a model that could not be built
    again from its configuration, or StorageError.
    """
    tensors = [base.get(name, parameter.detach()) for name, parameter in model.named_parameters()]
    encoding = "bf16" if all(map(_fits_bf16, tensors)) else "fp32"
    found = BaseFiles(encoding, only_named({CONFIG: _config_text(model), **_tokenizer_files(tokenizer)}))
    base_folder.write_files(folder, found)
    if _differs(folder, model) or numel_of(folder) != sum(tensor.numel() for tensor in tensors):
        raise RunMismatch("this node's base model cannot be handed over: its configuration alone does not rebuild it")
    if not digest:
        return
    path = folder / base_folder.WEIGHTS
    with storage_errors(f"the base model {path}"), open(path, "wb") as file:
        for tensor in tensors:
            file.write(_bytes(tensor, encoding))
    if base_folder.weights_digest(path, encoding) != digest:
        raise RunMismatch("this node's base model cannot be handed over: its weights have come to another digest")


def _differs(folder: Path, model: nn.Module) -> bool:
    with torch.device("meta"):
        other = _built(_read_config(folder))
    return [(name, one.shape) for name, one in other.named_parameters()] != [
        (name, one.shape) for name, one in model.named_parameters()
    ]


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(cleaned(CONFIG, (folder / CONFIG).read_bytes()))
    except (OSError, MalformedMessage) as error:
        raise SpecError([f"model.path: the base's configuration cannot be read: {error}"]) from error
    return found


def _built(about: dict[str, Any]) -> Any:
    """An untrained model of this configuration, of an architecture of transformers' own; raises SpecError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in about.items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(about.get("model_type"), **values)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever a peer's numbers make transformers raise: it is no fault of this process
        first = str(error).strip().split("\n")[0][:200]
        raise SpecError([f"model.path: the base's configuration makes no model: {first}"]) from error
    model.config.use_cache = False
    return model


def _config_text(model: Any) -> bytes:
    about = model.config.to_dict()
    return json.dumps({**about, "model_type": model.config.model_type}, default=str).encode()


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    with tempfile.TemporaryDirectory(prefix="peerloom-tokenizer-") as name:
        tokenizer.inner.save_pretrained(name)
        files = {file: (Path(name) / file).read_bytes() for file in FILES if (Path(name) / file).is_file()}
    files.pop(CONFIG, None)
    if TOKENIZER not in files:
        raise RunMismatch("this node's base model cannot be handed over: its tokenizer has no tokenizer.json")
    return files


def _fits_bf16(tensor: Tensor) -> bool:
    return not bool((tensor.float().contiguous().view(torch.int32) & 0xFFFF).any())


def _bytes(tensor: Tensor, encoding: str) -> bytes:
    plain = tensor.to("cpu", torch.float32).contiguous()
    if encoding == "fp32":
        return bytes(plain.view(-1).view(torch.uint8).numpy().data)
    halves = plain.view(-1).view(torch.int32) >> 16
    return bytes(halves.to(torch.int16).numpy().data)


def _reader(path: Path, encoding: str) -> Callable[[int], Tensor]:
    """Takes the next so many weights, as fp32; those that lie so in the file stay there until they are written to."""
    kind = "<f4" if encoding == "fp32" else "<u2"
    mapped = np.memmap(path, dtype=kind, mode="c")
    at = 0

    def take(count: int) -> Tensor:
        nonlocal at
        found = mapped[at : at + count]
        if len(found) != count:
            raise ValueError(f"{path} ends early")
        at += count
        if encoding != "fp32":
            found = (found.astype("<u4") << 16).view("<f4")
        return torch.from_numpy(np.asarray(found))

    return take
