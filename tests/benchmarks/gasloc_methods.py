"""The methods compared: what each does to the stacked parameters after a local step, and what it sends for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from peerloom.optim.finite_time import base_graph, hypercube_matching
from peerloom.optim.fragments import due_after, fragments, own_round
from peerloom.optim.groups import copies_sent, hypercube_groups, mixing_matrix, random_groups
from peerloom.optim.topology import Graph, random_matching, two_peer

Method = Literal["local", "sync", "dpsgd", "outer", "noloco"]
Partners = Literal["alone", "all", "ring", "1peer", "2peer", "hypercube", "base", "cube-groups", "random-groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run, but for its seed. `outer` is GASLoC and, over everybody with momentum "post", DiLoCo."""

    label: str
    method: Method = "outer"
    partners: Partners = "all"
    h: int = 16
    lr: float = 1e-2
    eta: float = 1.0
    gamma: float = 0.0
    alpha: float = 1.0
    momentum: Literal["pre", "post"] = "post"
    group: int = 4
    fragments: int = 1
    delay: int = 0  # local steps between sending and mixing
    workers: int = 16
    steps: int = 672
    batch: int = 4


def mixing(setting: Setting, seed: int, round: int, fragment: int = 0) -> Tensor:
    """The (n, n) fp32 matrix I - alpha Lambda of a fragment's round."""
    n = setting.workers
    repeats = setting.partners in ("hypercube", "base", "cube-groups")
    number = round + fragment if repeats else round * setting.fragments + fragment
    identity = torch.eye(n, dtype=torch.float64)
    if setting.partners in ("cube-groups", "random-groups"):
        if setting.partners == "cube-groups":
            groups = hypercube_groups(n, setting.group, number)
        else:
            groups = random_groups(n, setting.group, seed, number)
        laplacian = identity - mixing_matrix(n, groups)
    elif setting.partners == "all":
        laplacian = identity - 1 / n
    else:
        laplacian = _graph(setting, seed, number).laplacian()
    return (identity - setting.alpha * laplacian).float()


def copies(setting: Setting) -> float:
    """Model copies that a worker sends for one exchange of the whole model (the most loaded one, for odd counts)."""
    n = setting.workers
    if setting.partners in ("cube-groups", "random-groups"):
        return copies_sent(setting.group)
    each = {"alone": 0.0, "all": 2 * (1 - 1 / n), "ring": 2.0, "2peer": 2.0}.get(setting.partners, 1.0)
    return 2 * each if setting.method == "noloco" else each


def copies_per_step(setting: Setting) -> float:
    return copies(setting) / setting.h


def _graph(setting: Setting, seed: int, number: int) -> Graph:
    n = setting.workers
    if setting.partners == "alone":
        return Graph(n, ())
    if setting.partners == "ring":
        return Graph.ring(n)
    if setting.partners == "2peer":
        return two_peer(n, seed, number)
    if setting.partners == "base":
        return base_graph(n, 1, number)
    pairs = hypercube_matching(n, number) if setting.partners == "hypercube" else random_matching(n, seed, number)
    return Graph.from_pairs(n, pairs)


class Outer:
    """y = theta + eta (params - theta), mixed and pushed on; a fragment at a time, perhaps mixed some steps late."""

    def __init__(self, setting: Setting, seed: int, params: Tensor) -> None:
        self.setting, self.seed, self.params = setting, seed, params
        self.parts = fragments(params.shape[1], setting.fragments)
        self.theta, self.previous = params.clone(), params.clone()
        self._under_way: list[tuple[int, slice, Tensor, Tensor]] = []

    def after(self, step: int) -> None:
        """Sends and mixes what is due after this local step, counted from 1."""
        s = self.setting
        for f in due_after(step, s.h, s.fragments):
            part = self.parts[f]
            y = self.theta[:, part].lerp(self.params[:, part], s.eta)
            self.params[:, part] = y
            self._under_way.append(
                (step + s.delay, part, y, mixing(s, self.seed, own_round(step, s.h, s.fragments, f), f))
            )
        while self._under_way and (self._under_way[0][0] <= step or step == s.steps):
            _, part, y, matrix = self._under_way.pop(0)
            self.mix(part, y, matrix @ y, slice(None))

    def mix(self, part: slice, y: Tensor, mixed: Tensor, rows: slice | Tensor) -> None:
        """Ends a round of `part` for `rows`: what was trained since y was sent is kept on top."""
        carried = y if self.setting.momentum == "pre" else mixed
        following = mixed + self.setting.gamma * (carried - self.previous[rows, part])
        self.previous[rows, part] = carried
        self.theta[rows, part] = following
        self.params[rows, part] += following - y


class NoLoCo:
    """Nesterov steps on the pair's mean drift, drawn to the pair's mean (arXiv 2506.10911); sends both, two copies.

    delta = gamma delta + eta mean(drift) - pull (phi - mean(phi)), phi = phi + delta; `alpha` is the pull, which
    must lie in (gamma, 2 + gamma) for pairs.
    """

    def __init__(self, setting: Setting, seed: int, params: Tensor) -> None:
        self.setting, self.seed, self.params = setting, seed, params
        self.phi, self.delta = params.clone(), torch.zeros_like(params)

    def after(self, step: int) -> None:
        s = self.setting
        if step % s.h:
            return
        pairs = Graph.from_pairs(s.workers, random_matching(s.workers, self.seed, step // s.h - 1))
        matrix = (torch.eye(s.workers, dtype=torch.float64) - pairs.laplacian()).float()
        drift = self.params - self.phi
        self.delta = s.gamma * self.delta + s.eta * (matrix @ drift) - s.alpha * (self.phi - matrix @ self.phi)
        self.phi = self.phi + self.delta
        self.params.copy_(self.phi)


class CombinedThenAdapted:
    """D-PSGD (arXiv 1705.09056) with AdamW inside: mixes where the step began, then adds the step."""

    def __init__(self, setting: Setting, seed: int, params: Tensor) -> None:
        self.setting, self.seed, self.params = setting, seed, params
        self.before = params.clone()

    def after(self, step: int) -> None:
        matrix = mixing(self.setting, self.seed, step - 1)
        self.params.sub_(self.before).add_(matrix @ self.before)
        self.before.copy_(self.params)


class Nothing:
    """Local training, or synchronous training, whose gradients are averaged before the step."""

    def after(self, step: int) -> None:
        """Nothing to do."""


def method_of(setting: Setting, seed: int, params: Tensor) -> Outer | NoLoCo | CombinedThenAdapted | Nothing:
    if setting.method == "outer":
        return Outer(setting, seed, params)
    if setting.method == "noloco":
        return NoLoCo(setting, seed, params)
    return CombinedThenAdapted(setting, seed, params) if setting.method == "dpsgd" else Nothing()
