"""Matrix optimizers over what a rank owns: none of them sends anything, and a rank that owns nothing steps too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from peerloom.optim.basis_rotation import BasisRotatedAdam
from peerloom.optim.matrix_fsdp.errors import ShardingError
from peerloom.optim.matrix_fsdp.modules import outer_matrices
from peerloom.optim.matrix_fsdp.runtime import holdings, sharding_of
from peerloom.optim.soap import SOAP

Matrix = Literal["muon", "soap", "basis_rotated", "adamw"]

_MATRIX_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "muon": Muon, "soap": SOAP, "basis_rotated": BasisRotatedAdam, "adamw": AdamW,
}  # fmt: skip


class OwnerOptimizer(Optimizer):
    """Two optimizers as one: `matrix` over the owned hidden matrices, `adamw` over the rest of what is owned.

    The param groups are theirs, so learning-rate schedulers work on it; each rank has the same groups in number and
    order, some of them empty. Closures are not supported: a loss belongs to one rank, a step to all.
    """

    def __init__(self, matrix: Optimizer, adamw: Optimizer, names: dict[nn.Parameter, str]) -> None:
        self.matrix, self.adamw, self.names = matrix, adamw, names
        super().__init__([{"params": []}], {})
        self.param_groups = matrix.param_groups + adamw.param_groups

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One step of both, on this rank's own memory."""
        if closure is not None:
            raise ShardingError("closures are not supported: call backward() first, then step()")
        self.matrix.step()
        self.adamw.step()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The tensors an optimizer keeps for a parameter: empty before the first step."""
        for optimizer in (self.matrix, self.adamw):
            if parameter in optimizer.state:
                found: dict[str, Any] = optimizer.state[parameter]
                return found
        return {}

    def set_state_of(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Replaces what an optimizer keeps for a parameter. Raises KeyError for one it does not hold."""
        for optimizer in (self.matrix, self.adamw):
            if any(parameter is each for group in optimizer.param_groups for each in group["params"]):
                optimizer.state[parameter] = state
                return
        raise KeyError(self.names.get(parameter, "a parameter of another model"))

    def state_dict(self) -> dict[str, Any]:
        """Of this rank alone and bound to this plan; `checkpoint.owned_moments` gives what any plan can take up."""
        return {"matrix": self.matrix.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.matrix.load_state_dict(state_dict["matrix"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = self.matrix.param_groups + self.adamw.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.__dict__.get("param_groups"):
            self._refuse()
        super().add_param_group(param_group)

    def _refuse(self) -> NoReturn:
        raise ShardingError("owners are fixed: build another optimizer instead of adding a group of parameters")


def build_optimizer(
    model: nn.Module,
    matrix: Matrix = "muon",
    *,
    lr: float = 0.02,
    weight_decay: float = 0.1,
    adamw_lr: float = 3e-4,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
    adamw_weight_decay: float = 0.1,
    **settings: Any,
) -> OwnerOptimizer:
    """An optimizer of a model, sharded or plain: `matrix` trains the hidden matrices, AdamW all else.

    Hidden matrices are the trainable parameters of two dimensions but the embeddings and the head. `lr`, `weight_decay`
    and `settings` (momentum, ns_steps, betas, freq, ...) go to the matrix optimizer: torch.optim.Muon, SOAP,
    BasisRotatedAdam or AdamW itself. AdamW decays embeddings, head and other matrices, not vectors. Call it after
    `matrix_fully_shard`, and again whenever the model is sharded anew. Raises ShardingError for an unknown `matrix`,
    ValueError for settings out of range.
    """
    if matrix not in _MATRIX_OPTIMIZERS:
        raise ShardingError(f"matrix optimizer {matrix!r} is none of {', '.join(_MATRIX_OPTIMIZERS)}")
    found, outer = _trainable(model)
    hidden = [parameter for name, parameter, dim in found if dim == 2 and name not in outer]
    matrices = [parameter for name, parameter, dim in found if dim > 2 or name in outer]
    vectors = [parameter for _, parameter, dim in found if dim < 2]
    groups = [{"params": matrices, "weight_decay": adamw_weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return OwnerOptimizer(
        _MATRIX_OPTIMIZERS[matrix]([{"params": hidden}], lr=lr, weight_decay=weight_decay, **settings),
        AdamW(groups, adamw_lr, adamw_betas, adamw_eps, fused=True),
        {parameter: name for name, parameter, _ in found},
    )


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their norm over the whole model is at most `max_norm`; returns the norm before.

    Each rank adds up the squares of what it owns, and one scalar is summed over the ranks: in fp64, so that the norm,
    rounded to fp32, does not depend on who owns what. Plain models are clipped alike.
    """
    gradients = [parameter.grad for _, parameter, _ in _trainable(model)[0] if parameter.grad is not None]
    sharded = sharding_of(model)
    device = sharded.device if sharded is not None else next(model.parameters()).device
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in gradients:
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    if sharded is not None:
        sharded.links.sum_scalar(squares)
    norm = squares.sqrt().squeeze().float()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def _trainable(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter, int]], frozenset[str]]:
    """(name, what is here of it, dimensions) of every trainable parameter with elements here; names of the outer."""
    sharded = sharding_of(model)
    outer = sharded.outer if sharded is not None else frozenset(outer_matrices(model))
    listed = [(owned.name, owned.parameter, len(owned.whole_shape)) for owned in holdings(model)]
    return [each for each in listed if each[1].requires_grad], outer
