"""The inner optimization: AdamW steps of a causal LM, its evaluation, and its state by parameter name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerloom.protocol.runspec import TrainSpec


class InnerLoop:
    """Trains `model` in place; token windows are (batch, length + 1) int64 on any device.

    AdamW, fused; weight decay on matrices only (embeddings included), not on norms and biases. On CUDA the forward pass
    runs under bf16 autocast over fp32 weights. Create it after the parameters have their final memory.
    """

    def __init__(self, model: nn.Module, train: TrainSpec) -> None:
        self._model = model
        self._train = train
        self._named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in self._named]
        self._device = self._parameters[0].device
        self.optimizer = self._fresh()

    def _fresh(self) -> torch.optim.AdamW:
        train = self._train
        matrices = [parameter for parameter in self._parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in self._parameters if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            fused=True,
        )

    def step(self, windows: Tensor, rate: float) -> Tensor:
        """One optimizer step; returns the mean loss in nats a token, detached."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._model.train()
        loss = self._loss(windows)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._train.clip_norm:
            nn.utils.clip_grad_norm_(self._parameters, self._train.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Mean loss in nats a token, in eval mode, without a trace on the state."""
        self._model.eval()
        with torch.no_grad():
            losses = [self._loss(windows).double() for windows in batches]
        return float(torch.stack(losses).mean())

    def _loss(self, windows: Tensor) -> Tensor:
        windows = windows.to(self._device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._device.type == "cuda"):
            logits = self._model(input_ids=windows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def reset(self) -> None:
        """Forgets the moments."""
        self.optimizer = self._fresh()

    def state(self) -> dict[str, Tensor]:
        """AdamW's tensors by "what/parameter", on the CPU; empty before the first step."""
        return {
            f"{what}/{name}": value.detach().cpu().contiguous()
            for name, parameter in self._named
            for what, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Takes up what `state` gave; raises ValueError when a tensor's shape does not fit its parameter."""
        self.reset()
        for name, parameter in self._named:
            found = {key.split("/", 1)[0]: value for key, value in state.items() if key.split("/", 1)[1] == name}
            for what, value in found.items():
                if value.dim() and value.shape != parameter.shape:
                    raise ValueError(f"{what} of {name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
                where = None if what == "step" and self._device.type == "cpu" else self._device
                self.optimizer.state[parameter][what] = value.clone().to(where) if where else value.clone()
