"""An optimizer's state that may be a peer's: taken whole and fitting, or refused before a kernel trusts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerloom.node.worker.inner import InnerLoop
from peerloom.node.worker.model import build_model
from tests.unit.node.tiny import tiny_spec

State = dict[str, Tensor]
HIDDEN, PLAIN = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
ALL: list[dict[str, Any]] = [
    {"optimizer": "adamw"},
    {"optimizer": "muon"},
    {"optimizer": "soap"},
    {"optimizer": "basis_rotated"},
    {"optimizer": "basis_rotated", "rotation_source": "1st", "rotation_geometry": "unilateral"},
]


def loop(source: Path, **train: Any) -> InnerLoop:
    spec = tiny_spec(source)
    return InnerLoop(build_model(spec), replace(spec.train, **train))


def stepped(source: Path, **train: Any) -> State:
    inner = loop(source, **train)
    inner.step(torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1)), 1e-3)
    return inner.state()


@pytest.mark.parametrize("train", ALL)
def test_what_was_kept_is_taken_up_bit_for_bit_and_so_is_nothing(source: Path, train: dict[str, Any]) -> None:
    kept, inner = stepped(source, **train), loop(source, **train)
    inner.load_state(kept)
    again = inner.state()
    assert set(again) == set(kept) and all(torch.equal(again[key], kept[key]) for key in kept)
    inner.step(torch.randint(0, 256, (2, 17)), 1e-3)
    inner.load_state({})
    assert inner.state() == {}


def without(key: str) -> Callable[[State], State]:
    return lambda kept: {name: value for name, value in kept.items() if name != key}


def instead(key: str, value: Tensor) -> Callable[[State], State]:
    return lambda kept: {**kept, key: value}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: kept | {f"{what}/{PLAIN}": torch.zeros(()) for what in ("exp_avg", "exp_avg_sq")},
        instead(f"exp_avg/{HIDDEN}", torch.zeros(())),
        instead(f"left/{HIDDEN}", torch.zeros(())),
        instead(f"left/{PLAIN}", torch.eye(2)),
        instead("exp_avg/nothing", torch.zeros(2)),
        instead("exp_avg", torch.zeros(2)),
        lambda kept: {**kept, f"step/{PLAIN}": torch.zeros_like(kept[f"exp_avg/{PLAIN}"])},
        lambda kept: {**kept, f"exp_avg/{PLAIN}": kept[f"exp_avg/{PLAIN}"].long()},
        lambda kept: {**kept, f"exp_avg/{PLAIN}": kept[f"exp_avg/{PLAIN}"].double()},
        lambda kept: {**kept, f"exp_avg_sq/{PLAIN}": -1 - kept[f"exp_avg_sq/{PLAIN}"]},
        instead(f"step/{PLAIN}", torch.tensor(-1.0)),
        instead(f"step/{PLAIN}", torch.tensor(1.5)),
        instead(f"step/{PLAIN}", torch.tensor(torch.nan)),
        instead(f"step/{PLAIN}", torch.tensor(2.0**30)),
        without(f"step/{PLAIN}"),
        without(f"left/{HIDDEN}"),
        without(f"exp_avg_sq/{HIDDEN}"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_kept(source: Path, spoil: Callable[[State], State]) -> None:
    kept, inner = stepped(source, optimizer="basis_rotated"), loop(source, optimizer="basis_rotated")
    with pytest.raises(ValueError, match=r"of |took "):
        inner.load_state(spoil(kept))
    assert inner.state() == {}
    inner.step(torch.randint(0, 256, (2, 17)), 1e-3)
