"""The inner optimization: AdamW, Muon, SOAP or basis-rotated steps of a causal LM, evaluation, state by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerloom.node.worker.inner_state import STEP, check_state, state_shapes
from peerloom.optim.basis_rotation import BasisRotatedAdam
from peerloom.optim.soap import SOAP
from peerloom.protocol.runspec import TrainSpec


class Inner(Protocol):
    """What trains the model's parameters: on one device (`InnerLoop`), or on several (`group.Group`)."""

    def step(self, windows: Tensor, rate: float) -> Tensor:
        """One optimizer step; the batch's mean loss, detached."""
        ...

    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Mean loss in nats a token."""
        ...

    def reset(self) -> None:
        """Forgets the moments."""
        ...


class InnerLoop:
    """Trains `model` in place; token windows are (batch, length + 1) int64 on any device.

    AdamW, fused; with `optimizer = "muon"` Muon (torch.optim.Muon, its "original" scaling of the rate by shape) or with
    "soap" SOAP (its covariances forget by beta2, as its authors' do) takes the hidden matrices, and AdamW keeps
    embeddings, head and vectors; with "basis_rotated" BasisRotatedAdam holds all, and rotates the hidden matrices.
    Weight decay on matrices only (embeddings included), not on norms and biases.
    Gradients are clipped by their norm over `model`; with "basis_rotated" the hidden matrices and the rest each by
    their own, as the code of arXiv 2602.03515 does. On CUDA the forward pass runs under bf16 autocast over fp32
    weights. Create it after the parameters have their final memory.
    """

    def __init__(self, model: nn.Module, train: TrainSpec) -> None:
        self._model = model
        self._train = train
        self._named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in self._named]
        self._device = self._parameters[0].device
        self._hidden = set() if train.optimizer == "adamw" else hidden_matrices(model)
        self._adam, self._matrix = self._fresh()

    def _fresh(self) -> tuple[torch.optim.Optimizer | None, torch.optim.Muon | SOAP | None]:
        """Both optimizers without moments, None where one has no parameters."""
        train = self._train
        hidden = [parameter for name, parameter in self._named if name in self._hidden]
        others = [parameter for name, parameter in self._named if name not in self._hidden]
        matrices = [parameter for parameter in others if parameter.dim() >= 2]
        vectors = [parameter for parameter in others if parameter.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        if train.optimizer == "basis_rotated":
            return _basis_rotated(hidden, groups, train), None
        betas = (train.beta1, train.beta2)
        adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], train.learning_rate, betas, train.eps, fused=True
        ) if others else None
        if not hidden:
            return adamw, None
        if train.optimizer == "soap":
            return adamw, SOAP(hidden, **soap_settings(train))
        return adamw, torch.optim.Muon(hidden, train.muon_learning_rate, train.weight_decay, train.muon_momentum)

    def step(self, windows: Tensor, rate: float) -> Tensor:
        """One optimizer step at `rate` (Muon's follows it); returns the mean loss in nats a token, detached."""
        self._model.train()
        loss = self._loss(windows)
        loss.backward()  # type: ignore[no-untyped-call]
        self.update(rate)
        return loss.detach()

    def update(self, rate: float) -> None:
        """Steps with the gradients that lie in `.grad`, clipped, and clears them."""
        if self._adam is not None:
            _set_rate(self._adam, rate)
        if self._matrix is not None:
            _set_rate(self._matrix, matrix_rate(self._train, rate))
        for part in self._clipped_together() if self._train.clip_norm else ():
            nn.utils.clip_grad_norm_(part, self._train.clip_norm)
        for optimizer in self._optimizers():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _clipped_together(self) -> list[list[nn.Parameter]]:
        if self._train.optimizer != "basis_rotated":
            return [self._parameters]
        hidden = [parameter for name, parameter in self._named if name in self._hidden]
        return [hidden, [parameter for name, parameter in self._named if name not in self._hidden]]

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
        self._adam, self._matrix = self._fresh()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in (self._adam, self._matrix) if optimizer is not None]

    def _of(self, name: str) -> torch.optim.Optimizer:
        optimizer = self._adam if self._matrix is None or name not in self._hidden else self._matrix
        assert optimizer is not None  # ours: made where it has a parameter
        return optimizer

    def state(self) -> dict[str, Tensor]:
        """The optimizers' tensors by "what/parameter", on the CPU; empty before the first step."""
        return {
            f"{what}/{name}": value.detach().cpu().contiguous()
            for name, parameter in self._named
            for what, value in self._of(name).state.get(parameter, {}).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Takes up what `state` gave; raises ValueError, with all moments forgotten, for what is not the like of it."""
        self.reset()
        found: dict[str, dict[str, Tensor]] = {name: {} for name, _ in self._named}
        for key, value in state.items():
            what, _, name = key.partition("/")
            if name not in found:
                raise ValueError(f"{key!r} is of no parameter here")
            found[name][what] = value
        for name, parameter in self._named:
            shapes = state_shapes(parameter.shape, hidden=name in self._hidden, train=self._train)
            check_state(name, found[name], shapes, parameter.dtype)
        for name, parameter in self._named:
            for what, value in found[name].items():
                where = None if what == STEP and self._device.type == "cpu" else self._device
                self._of(name).state[parameter][what] = value.clone().to(where) if where else value.clone()


def soap_settings(train: TrainSpec) -> dict[str, Any]:
    """SOAP's arguments for a run."""
    return {
        "lr": train.learning_rate,
        "betas": (train.beta1, train.beta2),
        "shampoo_beta": train.beta2,
        "eps": train.eps,
        "weight_decay": train.weight_decay,
        "freq": train.rotation_freq,
    }


def matrix_rate(train: TrainSpec, rate: float) -> float:
    """The hidden matrices' rate where AdamW's is `rate`: Muon's peak is another."""
    return rate * (train.muon_learning_rate / train.learning_rate) if train.optimizer == "muon" else rate


def _basis_rotated(hidden: Sequence[Tensor], others: list[dict[str, Any]], train: TrainSpec) -> BasisRotatedAdam:
    plain = [{**group, "rotate": False} for group in others if group["params"]]
    return BasisRotatedAdam(
        ([{"params": list(hidden)}] if hidden else []) + plain,
        train.learning_rate,
        (train.beta1, train.beta2),
        train.eps,
        train.weight_decay,
        train.rotation_source,
        train.rotation_geometry,
        train.rotation_freq,
    )


def state_shape(what: str, shape: torch.Size) -> torch.Size:
    """Of a tensor of the optimizer's state: a basis and its covariance are square, the rest are as their parameter."""
    side = {"left": 0, "right": 1}.get(what.split("_", 1)[0])
    return shape if side is None else torch.Size((shape[side],) * 2)


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the parameters with two dimensions that are neither an embedding's nor the output head's."""
    outer = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        outer.append(head.weight)
    ends = {id(parameter) for parameter in outer}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in ends
    }


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
