"""One stage of a Llama-family model, built from its own layers alone.

The whole model is laid out on the meta device, which holds no numbers, and only the stage's parameters are made real.
Each is drawn by itself, from (run seed, its name), so that any node gets the same numbers for the stage that it hosts:
theta_0 of a pipeline's run is the union of them, for any number of stages. Matrices are N(0, initializer_range), norms
are 1, biases 0, as in the Llama family; with `model.path` they are read from the folder's safetensors one by one.

Tied embeddings: with one stage they stay tied. With more, the head starts as a copy of the embedding on the last stage
and is trained apart from it, since the first stage's gradients are P - 1 updates older than the head's; what is
exported has two matrices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peerloom.node.worker.model import model_config
from peerloom.node.worker.stage_costs import Sizes, stage_layers
from peerloom.protocol.errors import SpecError
from peerloom.protocol.runspec import RunSpec

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYERS = "model.layers."

Source = Callable[[str, Tensor], None]  # fills the tensor of a parameter's name


class StageModel(nn.Module):
    """A stage of the model, whose layers are cut into `spans`.

    Token ids (batch, length) or hidden states (batch, length, width) in; hidden states out, from the last stage logits.
    """

    def __init__(self, whole: Any, spans: list[range], stage: int, *, tied: bool) -> None:
        super().__init__()
        span, first, last = spans[stage], stage == 0, stage == len(spans) - 1
        self.spans, self.span, self.first, self.last = spans, span, first, last
        self.config = whole.config
        self.architecture = type(whole).__name__
        self.model = whole.model
        self.model.layers = nn.ModuleList([self.model.layers[index] for index in span])
        self.model.config.num_hidden_layers = len(span)
        if getattr(self.config, "layer_types", None) is not None:
            self.model.config.layer_types = [self.config.layer_types[index] for index in span]
        if not first:
            self.model.embed_tokens = nn.Identity()
        if not last:
            self.model.norm = nn.Identity()
        self.lm_head = whole.lm_head if last else None
        if self.lm_head is not None and tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, given: Tensor) -> Tensor:
        """The stage's part of the model."""
        named = {"input_ids" if self.first else "inputs_embeds": given}
        hidden: Tensor = self.model(**named, use_cache=False).last_hidden_state
        return self.lm_head(hidden) if self.lm_head is not None else hidden

    def get_output_embeddings(self) -> nn.Module | None:
        """The head, by the name that transformers gives it; None before the last stage."""
        return self.lm_head

    def whole_name(self, name: str) -> str:
        """The name that a parameter of this stage has in the whole model."""
        if not name.startswith(LAYERS):
            return name
        index, _, rest = name.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{self.span.start + int(index)}.{rest}"

    def named_in_whole(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters by their names in the whole model, tied ones once."""
        return [(self.whole_name(name), parameter) for name, parameter in self.named_parameters()]


def build_stage(spec: RunSpec, stage: int) -> StageModel:
    """Stage `stage` on the CPU in fp32; raises SpecError for a model that cannot be cut."""
    config = _config(spec)
    tied = bool(config.tie_word_embeddings)
    model = _on_meta(spec, config, stage)
    model.float()  # a stored configuration may name another type
    model.to_empty(device="cpu")
    if tied and model.first and model.lm_head is not None:
        model.lm_head.weight = model.model.embed_tokens.weight  # to_empty parts them
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # holds no parameters, only a table
    source = _stored(spec.model.path) if spec.model.path else _drawn(spec.seed, config.initializer_range)
    with torch.no_grad():
        for name, parameter in model.named_in_whole():
            source(EMBEDDING if tied and name == HEAD else name, parameter)
    return model


def stage_outline(spec: RunSpec, stage: int) -> StageModel:
    """The stage without numbers, on the meta device: its names, shapes and sizes; raises SpecError."""
    return _on_meta(spec, _config(spec), stage)


def _on_meta(spec: RunSpec, config: Any, stage: int) -> StageModel:
    from transformers import AutoModelForCausalLM

    pipeline = spec.pipeline
    tied = bool(config.tie_word_embeddings) and pipeline.stages == 1
    config.tie_word_embeddings = False
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    config.tie_word_embeddings = tied
    spans = stage_layers(spec, Sizes.of(whole))
    return StageModel(whole, spans, stage, tied=tied)


def whole_config(spec: RunSpec) -> Any:
    """The configuration of the model that the stages make together; raises SpecError."""
    config = _config(spec)
    config.tie_word_embeddings = bool(config.tie_word_embeddings) and spec.pipeline.stages == 1
    return config


def _config(spec: RunSpec) -> Any:
    config = _stored_config(spec.model.path) if spec.model.path else model_config(spec)
    if config.model_type not in FAMILY:
        raise SpecError([f"model.architecture: {config.model_type} cannot be cut into stages; {', '.join(FAMILY)} can"])
    if config.num_hidden_layers < spec.pipeline.stages:
        raise SpecError(
            [f"pipeline.stages = {spec.pipeline.stages}: the model has {config.num_hidden_layers} layers; lower it"]
        )
    config.use_cache = False
    return config


def _drawn(seed: int, deviation: float) -> Source:
    def fill(name: str, parameter: Tensor) -> None:
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.dim() < 2:
            parameter.fill_(1.0)
        else:
            digest = hashlib.sha256(f"peerloom-stage-1\0{seed}\0{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            parameter.normal_(0.0, deviation, generator=generator)

    return fill


def _folder(path: str) -> Path:
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise SpecError([f"model.path: {path} cannot be loaded: {str(error).splitlines()[0]}"]) from error


def _stored_config(path: str) -> Any:
    from transformers import AutoConfig

    folder = _folder(path)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise SpecError([f"model.path: {path} holds no configuration: {str(error).splitlines()[0]}"]) from error


def _stored(path: str) -> Source:
    """Reads single tensors out of a folder's safetensors."""
    from safetensors import SafetensorError, safe_open

    folder = _folder(path)
    index = folder / "model.safetensors.index.json"

    def fill(name: str, parameter: Tensor) -> None:
        try:
            files = json.loads(index.read_bytes())["weight_map"] if index.exists() else {}
            with safe_open(folder / files.get(name, "model.safetensors"), framework="pt") as file:
                parameter.copy_(file.get_tensor(name))
        except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
            raise SpecError([f"model.path: {path} gives no {name} of this shape: {error}"]) from error

    return fill
