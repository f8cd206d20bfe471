"""Which tensors of a model a seed changes, and how: in the activations where it can be, else in place from a copy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from peerloom.optim.subcge_hooks import attach, form_of
from peerloom.optim.subcge_random import key_of
from peerloom.optim.subcge_subspace import folded_shape

_PIECE = 1 << 20  # elements of a weight handled at a time: 4 MB of float32


@dataclass(frozen=True, slots=True)
class Target:
    """One trainable tensor; `users` are the modules it is hooked in, empty where it is changed in place."""

    name: str
    parameter: Tensor
    key: int
    users: tuple[nn.Module, ...]

    @property
    def small(self) -> bool:
        """Whether it is no matrix, and moves along a Gaussian of its own."""
        return self.parameter.dim() < 2

    def pieces(self) -> Iterator[slice]:
        """Row ranges that cover a matrix."""
        rows, columns = folded_shape(self.parameter.shape)
        step = max(1, _PIECE // columns)
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def targets_of(model: nn.Module, trainable: str, run_seed: int, hooks: bool) -> list[Target]:
    """The model's floating-point parameters whose name the regex finds, tied ones once under their first name.

    SeedFlood's paper is silent on what is not a matrix, and on embeddings: the latter are taken as matrices, for the
    former see `SmallTensors`.

    Raises ValueError when there is none or one is on the meta device.
    """
    pattern = re.compile(trainable)
    users = _users_of(model)
    found = []
    for name, parameter in model.named_parameters():
        names = [f"{path}.{own}" if path else own for path, _, own in users[id(parameter)]]
        if not any(map(pattern.search, names)) or not parameter.is_floating_point() or not parameter.numel():
            continue
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device and has no values yet")
        hooked = _hooked(users[id(parameter)], hooks)
        found.append(Target(name, parameter, key_of("tensor", run_seed, name), hooked))
    if not found:
        raise ValueError(f"no parameter of the model matches trainable = {trainable!r}")
    return found


def _users_of(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Parameter id -> (module path, module, attribute) of every module that holds it."""
    users: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append((path, module, own))
    return users


def _hooked(users: list[tuple[str, nn.Module, str]], hooks: bool) -> tuple[nn.Module, ...]:
    usable = all(own == "weight" and form_of(module) is not None for _, module, own in users)
    return tuple(module for _, module, _ in users) if hooks and usable else ()


@dataclass(slots=True)
class Perturbation:
    """theta + eps Z for all targets at once, until `undo`."""

    _handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    _copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def apply(self, target: Target, u: Tensor, v: Tensor, eps: float) -> None:
        """Adds eps u v^T to a matrix."""
        if target.users:
            self._handles += [attach(module, u, v, eps) for module in target.users]
            return
        flat = self._copied(target).view(folded_shape(target.parameter.shape))
        for rows in target.pieces():
            flat[rows].copy_(flat[rows].float().addr_(u[rows], v, alpha=eps))

    def apply_small(self, target: Target, z: Tensor, eps: float) -> None:
        """Adds eps z to a small tensor."""
        flat = self._copied(target).view(-1)
        flat.copy_(flat.float().add_(z.to(flat.device), alpha=eps))

    def _copied(self, target: Target) -> Tensor:
        self._copies.append((target.parameter, target.parameter.clone()))
        return target.parameter

    def undo(self) -> None:
        """Leaves every bit as it was."""
        for handle in self._handles:
            handle.remove()
        for parameter, copy in self._copies:
            parameter.copy_(copy)
        self._handles.clear()
        self._copies.clear()
