"""All parameters of a module in one flat fp32 tensor, of which they become views."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_ACCEPTED = (torch.float32, torch.bfloat16, torch.float16)

Layout = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where one parameter lies: elements [start, start + numel) of the flat tensor."""

    name: str
    parameter: Tensor
    start: int

    def view_of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


class FlatParameters:
    """Moves a module's parameters into one flat fp32 tensor; they become views of it and keep their values.

    `named_parameters` is what `module.named_parameters()` gives; its order is the order in the flat tensor, without
    padding. Module buffers are not in it, so they never travel. Tied parameters (the same object, or the same memory)
    take one place, under their first name (`aliases`: other name -> first name); 16-bit ones become fp32. `buffer` is
    a flat fp32 tensor on the parameters' device to use instead of a new one, for instance in shared memory; where the
    parameters live on an accelerator, leave it out and use `copy_out` and `copy_in`. With `grads=True`, `.grad` of
    every trainable parameter is a view of `gradients`, flat alike; clear it with `zero_grad()`, since an optimizer's
    own `zero_grad` would drop the views.

    Moving the module afterwards (`module.to(...)`) breaks the views; `check()` tells. Raises ValueError, naming the
    parameter, for other dtypes, mixed devices, partly overlapping memory, repeated names or a buffer that does not fit.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, Tensor]], buffer: Tensor | None = None, *, grads: bool = False
    ) -> None:
        named = list(named_parameters)
        _check_parameters(named)
        self._slots, self.aliases, self.numel = _lay_out(named)
        device = named[0][1].device
        if buffer is None:
            buffer = torch.empty(self.numel, dtype=torch.float32, device=device)
        _check_buffer(buffer, self.numel, device)
        self.flat = buffer.detach()
        self.gradients = torch.zeros_like(self.flat) if grads else None
        self._tied = [(parameter, self._slot(self.aliases[name])) for name, parameter in named if name in self.aliases]
        with torch.no_grad():
            for slot in self._slots:
                slot.view_of(self.flat).copy_(slot.parameter)
        self._point_at_flat()

    def layout(self) -> Layout:
        """(name, shape) of every parameter in order, tied ones once: those who exchange flat tensors must share it."""
        return tuple((slot.name, tuple(slot.parameter.shape)) for slot in self._slots)

    def copy_out(self, dst: Tensor) -> None:
        """Copies the parameters to `dst`, flat, of any device and float dtype; ValueError if it has another length."""
        self._check_length("dst", dst)
        with torch.no_grad():
            dst.copy_(self.flat)

    def copy_in(self, src: Tensor) -> None:
        """Sets the parameters from `src`, flat, of any device and float dtype; ValueError if it has another length."""
        self._check_length("src", src)
        with torch.no_grad():
            self.flat.copy_(src)

    def zero_grad(self) -> None:
        """Clears the gradients; the views stay."""
        if self.gradients is None:
            for slot in self._slots:
                slot.parameter.grad = None
        else:
            self.gradients.zero_()

    def check(self) -> None:
        """Raises ValueError, naming the first parameter that is no longer a view of the flat tensor."""
        for slot in self._slots:
            if slot.parameter.numel() and slot.parameter.data_ptr() != slot.view_of(self.flat).data_ptr():
                raise ValueError(f"parameter {slot.name} was moved away from the flat tensor; move the module first")

    def _slot(self, name: str) -> _Slot:
        return next(slot for slot in self._slots if slot.name == name)

    def _point_at_flat(self) -> None:
        for parameter, slot in [(slot.parameter, slot) for slot in self._slots] + self._tied:
            parameter.grad = None  # a gradient of the old memory or dtype must not outlive it
            parameter.data = slot.view_of(self.flat)
            if self.gradients is not None and parameter.requires_grad:
                parameter.grad = slot.view_of(self.gradients)

    def _check_length(self, name: str, tensor: Tensor) -> None:
        if tensor.dim() != 1 or tensor.numel() != self.numel:
            raise ValueError(f"{name} must be flat with {self.numel} elements, not of shape {tuple(tensor.shape)}")


def _check_parameters(named: list[tuple[str, Tensor]]) -> None:
    if not named:
        raise ValueError("the module has no parameters")
    names: set[str] = set()
    first, device = named[0][0], named[0][1].device
    for name, parameter in named:
        if name in names:
            raise ValueError(f"parameter name {name} appears twice")
        names.add(name)
        if parameter.dtype not in _ACCEPTED:
            raise ValueError(f"parameter {name} is {parameter.dtype}; it must be float32, bfloat16 or float16")
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device and has no values yet")
        if parameter.device != device:
            raise ValueError(f"parameter {name} is on {parameter.device}, but {first} is on {device}")


def _lay_out(named: list[tuple[str, Tensor]]) -> tuple[list[_Slot], dict[str, str], int]:
    """Slots in order, alias -> first name, and the total number of elements."""
    slots: list[_Slot] = []
    aliases: dict[str, str] = {}
    owners: dict[tuple[object, ...], str] = {}
    total = 0
    for name, parameter in named:
        memory = (parameter.data_ptr(), parameter.dtype, tuple(parameter.shape), parameter.stride())
        if parameter.numel() and memory in owners:
            aliases[name] = owners[memory]
            continue
        owners[memory] = name
        slots.append(_Slot(name, parameter, total))
        total += parameter.numel()
    _check_overlap(slots)
    return slots, aliases, total


def _check_overlap(slots: list[_Slot]) -> None:
    spans = []
    for slot in slots:
        p = slot.parameter
        if p.numel():
            reach = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)) + 1
            spans.append((p.data_ptr(), p.data_ptr() + reach * p.element_size(), slot.name))
    spans.sort()
    for (_, end, name), (start, _, other) in zip(spans, spans[1:], strict=False):
        if start < end:
            raise ValueError(f"parameters {name} and {other} share part of their memory; they cannot be made flat")


def _check_buffer(buffer: Tensor, numel: int, device: torch.device) -> None:
    if buffer.dtype != torch.float32 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"the buffer must be flat, contiguous and float32, not {buffer.dtype} of shape {tuple(buffer.shape)}"
        )
    if buffer.numel() != numel:
        raise ValueError(f"the buffer has {buffer.numel()} elements; the parameters take {numel}")
    if buffer.device != device:
        raise ValueError(
            f"the buffer is on {buffer.device}, the parameters on {device};"
            " leave the buffer out and use copy_out and copy_in"
        )
