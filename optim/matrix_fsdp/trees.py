"""Tensors inside what modules take and give: tuples, lists, mappings, dataclasses, a transformers output among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Calls `hook` with the gradient of `tensor`, in a backward pass, once it is whole."""
    register: Callable[[Callable[[Tensor], None]], object] = tensor.register_hook
    register(hook)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in `value`, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for slot in fields(value):
            yield from tensors_in(getattr(value, slot.name))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with its floating-point tensors in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict) and type(value) is not dict:  # a transformers output: attributes follow its items
        for key in list(value):
            value[key] = cast(value[key], dtype)
        return value
    if isinstance(value, dict):
        return {key: cast(each, dtype) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(cast(each, dtype) for each in value)
    return value
