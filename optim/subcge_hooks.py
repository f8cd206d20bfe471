"""A rank-one change of a weight without touching it: (W + eps u v^T) x = W x + eps (v . x) u, added by hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Hook = Callable[[nn.Module, Any, Any, Tensor], Tensor]
Form = Callable[[Tensor, Tensor, float], Hook]


def form_of(module: nn.Module) -> Form | None:
    """How a module's `weight` is changed in its activations; None where only an explicit change will do."""
    if type(module).forward is nn.Linear.forward:
        return _linear
    if type(module).forward is nn.Embedding.forward and getattr(module, "max_norm", None) is None:
        return _embedding
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # GPT-2's: a Linear with its weight transposed
        return _transposed
    return None


def attach(module: nn.Module, u: Tensor, v: Tensor, eps: float) -> RemovableHandle:
    """Makes the module act as if its weight were weight + eps u v^T, until the handle is removed."""
    form = form_of(module)
    if form is None:
        raise TypeError(f"{type(module).__name__} has no form in the activations")
    return module.register_forward_hook(form(u, v, eps), with_kwargs=True)


def _input(args: Any, kwargs: Any) -> Tensor:
    """The one argument of a Linear or Embedding, however it was passed."""
    found: Tensor = args[0] if args else next(iter(kwargs.values()))
    return found


def _linear(u: Tensor, v: Tensor, eps: float) -> Hook:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        x = _input(args, kwargs)
        return output.addcmul_((x @ v.to(x.dtype)).unsqueeze(-1), u.to(output.dtype), value=eps)

    return hook


def _transposed(u: Tensor, v: Tensor, eps: float) -> Hook:
    return _linear(v, u, eps)


def _embedding(u: Tensor, v: Tensor, eps: float) -> Hook:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        rows = torch.nn.functional.embedding(_input(args, kwargs), u.unsqueeze(1).to(output.dtype))
        return output.addcmul_(rows, v.to(output.dtype), value=eps)

    return hook
