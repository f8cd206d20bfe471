"""How parameters travel: a flat fp32 tensor to and from raw little-endian bytes.

"fp32" is exact, NaN payloads included. "bf16" rounds to nearest, ties to even; a finite value beyond bf16's range
becomes an infinity of its sign, infinities stay, and every NaN becomes the one NaN 0x7FC0, so that equal input gives
equal bytes on every device. Neither direction of these two refuses non-finite numbers: ask `count_non_finite`, which
reads bytes. "int8" is in blocks with stochastic rounding (`int8.py`): encoding needs a `Dither` and refuses non-finite
numbers.
"""

from __future__ import annotations

import sys
from typing import Literal

import torch
from torch import Tensor

from peerloom.optim import int8
from peerloom.optim.int8 import Dither

Encoding = Literal["fp32", "bf16", "int8"]

_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CANONICAL_NAN = 0x7FC0
_CHUNK = 1 << 18  # elements handled at a time, which bounds the scratch memory


def encoded_bytes(numel: int, encoding: Encoding) -> int:
    """The length of `numel` encoded parameters."""
    return int8.encoded_bytes(numel) if encoding == "int8" else numel * _dtype(encoding).itemsize


def encode(y: Tensor, encoding: Encoding, out: Tensor | None = None, dither: Dither | None = None) -> Tensor:
    """The bytes of y (flat fp32), written to `out` (flat uint8, same length) or to a new tensor on y's device.

    Raises ValueError where a tensor has another dtype, shape or length; for "int8", without `dither` and where y is not
    finite (`out` is then half written).
    """
    _check_flat("y", y, torch.float32)
    if out is None:
        out = torch.empty(encoded_bytes(y.numel(), encoding), dtype=torch.uint8, device=y.device)
    if encoding == "int8":
        if dither is None:
            raise ValueError("int8 rounds at random and needs a dither: (seed, round, sender)")
        scales, bytes_ = _int8_parts("out", out, y.numel())
        with torch.no_grad():
            int8.write(y, scales, bytes_, dither)
        return _swap_scales(out, y.numel())
    numbers = _as_numbers("out", out, encoding, y.numel())
    with torch.no_grad():
        for start in range(0, y.numel(), _CHUNK):
            _write(numbers[start : start + _CHUNK], y[start : start + _CHUNK])
    return _little_endian(out, encoding)


def decode(buf: Tensor, encoding: Encoding, out: Tensor | None = None) -> Tensor:
    """The numbers that `buf` (flat uint8) holds, as fp32 in `out` (flat) or in a new tensor on buf's device.

    Raises ValueError where a tensor has another dtype, shape or length.
    """
    if out is None:
        out = torch.empty(_numel_of(buf, encoding), dtype=torch.float32, device=buf.device)
    _check_flat("out", out, torch.float32)
    if encoding == "int8":
        with torch.no_grad():
            int8.read(*_readable_int8(buf, out.numel()), out)
        return out
    if sys.byteorder == "big":
        buf = _little_endian(buf.clone(), encoding)
    with torch.no_grad():
        out.copy_(_as_numbers("buf", buf, encoding, out.numel()))
    return out


def count_non_finite(buf: Tensor, encoding: Encoding) -> int:
    """How many of the numbers that `buf` (flat uint8) holds are NaN or infinite."""
    if encoding == "int8":
        return int8.count_non_finite(*_readable_int8(buf, _numel_of(buf, encoding)))
    if sys.byteorder == "big":
        buf = _little_endian(buf.clone(), encoding)
    numbers = _as_numbers("buf", buf, encoding, buf.numel() // _dtype(encoding).itemsize)
    starts = range(0, numbers.numel(), _CHUNK)
    return sum(int(numbers[start : start + _CHUNK].isfinite().logical_not().sum()) for start in starts)


def _numel_of(buf: Tensor, encoding: str) -> int:
    return int8.numel_of(buf.numel()) if encoding == "int8" else buf.numel() // _dtype(encoding).itemsize


def _int8_parts(name: str, raw: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    _check_flat(name, raw, torch.uint8)
    expected = int8.encoded_bytes(numel)
    if raw.numel() != expected:
        raise ValueError(f"{name} has {raw.numel()} bytes; {numel} parameters in int8 take {expected}")
    _check_aligned(name, raw, 4)
    return int8.split(raw, numel)


def _readable_int8(buf: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    return _int8_parts("buf", _swap_scales(buf.clone(), numel) if sys.byteorder == "big" else buf, numel)


def _swap_scales(raw: Tensor, numel: int) -> Tensor:
    """Swaps the bytes of the scales in place where this machine is big-endian."""
    if sys.byteorder == "big":
        head = raw[: int8.encoded_bytes(numel) - numel]
        _little_endian(head, "fp32")
    return raw


def _dtype(encoding: str) -> torch.dtype:
    if encoding not in _DTYPES:
        raise ValueError(f"unknown encoding {encoding!r}; it must be one of {', '.join(_DTYPES)}, int8")
    return _DTYPES[encoding]


def _check_flat(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dim() != 1 or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be flat, contiguous and {dtype}, not {tensor.dtype} of shape {tuple(tensor.shape)}"
        )


def _as_numbers(name: str, raw: Tensor, encoding: str, numel: int) -> Tensor:
    """The uint8 tensor seen as the encoding's dtype, sharing its memory."""
    dtype = _dtype(encoding)
    _check_flat(name, raw, torch.uint8)
    if raw.numel() != numel * dtype.itemsize:
        raise ValueError(
            f"{name} has {raw.numel()} bytes; {numel} parameters in {encoding} take {numel * dtype.itemsize}"
        )
    _check_aligned(name, raw, dtype.itemsize)
    return raw.view(dtype)


def _check_aligned(name: str, raw: Tensor, size: int) -> None:
    if raw.storage_offset() % size:
        raise ValueError(f"{name} starts at byte {raw.storage_offset()} of its storage, not on a multiple of {size}")


def _write(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
    if target.dtype == torch.bfloat16:
        nan = source.isnan()
        if bool(nan.any()):  # which NaN a conversion gives differs between instruction sets
            target.view(torch.int16).masked_fill_(nan.to(target.device), _CANONICAL_NAN)


def _little_endian(raw: Tensor, encoding: str) -> Tensor:
    """Swaps each number's bytes in place where this machine is big-endian."""
    if sys.byteorder == "big":
        rows = raw.view(-1, _dtype(encoding).itemsize)
        rows.copy_(rows.flip(1))
    return raw
