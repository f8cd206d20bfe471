"""The model of a run: a transformers causal LM, equal on every node, and the digests that prove it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from peerloom.node.worker.gguf import is_gguf
from peerloom.node.worker.gguf import open_model as open_gguf
from peerloom.node.worker.tokenizer import BYTES_SEPARATOR
from peerloom.protocol.errors import RunMismatch, SpecError
from peerloom.protocol.runspec import RunSpec


def build_model(spec: RunSpec) -> nn.Module:
    """The run's model on the CPU in fp32, a pure function of the spec (and of a hub's or folder's content).

    Sizes give an untrained model whose weights are drawn from the run seed; the global generator is left as it was.
    Only a hub name reaches for the network. Raises SpecError.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = _load(spec.model.path) if spec.model.path else _from_sizes(spec)
    model.config.use_cache = False
    built: nn.Module = model.to(device="cpu", dtype=torch.float32)
    return built


def numel_of(spec: RunSpec) -> int | None:
    """How many parameters a model built from sizes has, without memory for it; None for a stored one."""
    if spec.model.path:
        return None
    with torch.device("meta"):
        model: nn.Module = _from_sizes(spec)
    return sum(parameter.numel() for parameter in model.parameters())


def model_over(spec: RunSpec, flat: memoryview) -> nn.Module:
    """`build_model`'s model with its parameters where they lie in `flat`, fp32, in order; none are drawn, or copied.

    A stored model is loaded by itself all the same: what it has beside parameters is known to its files alone.
    """
    if spec.model.path:
        return build_model(spec)
    at = 0

    def take(count: int) -> Tensor:
        nonlocal at
        at += 4 * count
        return torch.frombuffer(flat[at - 4 * count : at], dtype=torch.float32)

    return placed(lambda: _from_sizes(spec), take)


def placed(build: Callable[[], Any], take: Callable[[int], Tensor]) -> nn.Module:
    """The model that `build` makes, its parameters being what `take` gives for so many fp32, in order, tied ones once.

    None is drawn, or has memory of its own.
    """
    with torch.random.fork_rng(devices=[]), _parameters_on_meta():
        model: nn.Module = build()
    model.config.use_cache = False  # type: ignore[union-attr]
    found: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():  # in the order of named_parameters()
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in found:
                values = take(parameter.numel()).view(parameter.shape)
                found[parameter] = nn.Parameter(values, parameter.requires_grad)
            module._parameters[name] = found[parameter]
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made in here have parameters without memory; their buffers are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # tied ones stay one object
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def init_digest(flat: Tensor) -> str:
    """BLAKE3 in hex over the flat fp32 parameters' bytes."""
    return blake3(flat.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def check_digest(spec: RunSpec, digest: str) -> None:
    """Raises RunMismatch where the run names other parameters than those that were found at its path."""
    if spec.model.digest not in ("", digest):
        other = ", or none: then a peer hands them over" if spec.method == "seedflow" else ""
        raise RunMismatch(
            f"the model at {spec.model.path} has the digest {digest[:16]}, and model.digest names "
            f"{spec.model.digest[:16]}; put the run's own files there{other}"
        )


def layout_digest(layout: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """BLAKE3 in hex over the JSON of [[name, [sizes...]], ...], UTF-8, no spaces."""
    listed = [[name, list(shape)] for name, shape in layout]
    return blake3(json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


def _from_sizes(spec: RunSpec) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(model_config(spec))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise SpecError([f"model.architecture: {spec.model.architecture} cannot be built: {_first(error)}"]) from error


def model_config(spec: RunSpec) -> Any:
    """The transformers configuration of a model built from sizes; raises SpecError."""
    from transformers import AutoConfig

    model = spec.model
    try:
        plain = AutoConfig.for_model(model.architecture)
    except (ValueError, KeyError) as error:
        raise SpecError([f"model.architecture: transformers knows no {model.architecture!r}"]) from error
    sizes: dict[str, object] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": spec.data.sequence_length,
        "intermediate_size" if hasattr(plain, "intermediate_size") else "n_inner": model.intermediate_size,
        "tie_word_embeddings": model.tie_embeddings,
    }
    if "head_dim" in plain.to_dict():
        sizes["head_dim"] = model.hidden_size // model.heads
    if spec.data.tokenizer == "bytes":
        sizes |= {"bos_token_id": BYTES_SEPARATOR, "eos_token_id": BYTES_SEPARATOR, "pad_token_id": None}
    config = AutoConfig.for_model(model.architecture, **sizes)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(config, name, None) != sizes[name]:
            raise SpecError([f"model.architecture: {model.architecture} takes no {name}; use model.path instead"])
    return config


def _load(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    local = Path(path).expanduser()
    where = str(local) if local.is_dir() else path
    try:
        if is_gguf(path):
            return open_gguf(path)
        return AutoModelForCausalLM.from_pretrained(where, local_files_only=local.is_dir())
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SpecError([f"model.path: {path} cannot be loaded: {_first(error)}"]) from error


def _first(error: Exception) -> str:
    """The first line of an error's text: transformers writes paragraphs."""
    return str(error).strip().split("\n")[0]
