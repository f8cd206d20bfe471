"""Full-rank zeroth-order steps by seeds (MeZO, Malladi et al. 2023, arXiv 2305.17333), the reference for SubCGE."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from peerloom.optim.subcge_estimate import LossFn, two_point
from peerloom.optim.subcge_random import message_seeds
from peerloom.optim.subcge_state import FRACTION_BITS, SCALAR_LIMIT


class MeZO:
    """As published: z ~ N(0, I) drawn anew from the seed wherever it is needed, added to the weights and taken off.

    Messages, `lr` and `bound` are as for SubCGE; the weight of a message is fixed, as there. MeZO's paper knows one
    client and is silent on the order of several clients' updates: it is the one in which `apply` is given them. It is
    silent on the precision of the scalar; here it is rounded to SubCGE's fixed point before it is applied. Its weights
    carry what adding and taking off leaves, and hang on the order of messages: it is here to be measured against, not
    to be run by a swarm.
    """

    def __init__(
        self, model: nn.Module, *, eps: float, lr: float, run_seed: int, trainable: str = "", bound: int = SCALAR_LIMIT
    ) -> None:
        self.model = model
        self.eps = eps
        self._lr = lr
        self._run_seed = run_seed
        self._bound = bound
        pattern = re.compile(trainable)
        self._tensors = [tensor.data for name, tensor in model.named_parameters() if pattern.search(name)]
        if not self._tensors:
            raise ValueError(f"no parameter of the model matches trainable = {trainable!r}")
        self._perturbed: tuple[int, int] | None = None

    def seed_of(self, origin: int, sequence: int) -> int:
        """The seed of a message."""
        return int(message_seeds(self._run_seed, torch.tensor([origin]), torch.tensor([sequence])))

    def perturb(self, seed: int, sign: int) -> None:
        """theta + sign eps z(seed), until `restore`; from -+ to +- of one seed in one addition."""
        standing = 0
        if self._perturbed is not None:
            if self._perturbed[0] == seed:
                standing = self._perturbed[1]
            else:
                self.restore()
        self._perturbed = (seed, sign)
        self._add(seed, (sign - standing) * self.eps)

    def restore(self) -> None:
        """Takes the perturbation off."""
        if self._perturbed is not None:
            seed, sign = self._perturbed
            self._perturbed = None
            self._add(seed, -sign * self.eps)

    def estimate(self, loss_fn: LossFn, seed: int, share: float = 1.0) -> int:
        """As `SubCGE.estimate`."""
        return two_point(self.model, self, loss_fn, seed, self.eps, self._bound, FRACTION_BITS, share)

    def apply(self, messages: Iterable[Sequence[int]]) -> None:
        """Replays the messages one after the other."""
        for origin, sequence, _, scalar in messages:
            self._add(self.seed_of(origin, sequence), -self._lr * scalar / 2**FRACTION_BITS)

    def _add(self, seed: int, weight: float) -> None:
        """theta += weight z."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.add_(self._noise(tensor, generator), alpha=weight)

    @staticmethod
    def _noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
