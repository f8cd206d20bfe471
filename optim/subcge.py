"""Fine-tuning by seeds and scalars: zeroth-order steps in shared subspaces (SubCGE of SeedFlood, arXiv 2602.18181).

How a node uses it, whatever carries the messages:

    flow = SubCGE(model, rank=32, period=1000, eps=1e-3, lr=1e-4, run_seed=7)
    flow.advance(step)                                    # before every local step: new subspaces at period ends
    scalar = flow.estimate(loss_fn, flow.seed_of(origin, sequence))
    message = (origin, sequence, step, scalar)            # send it to all; the direction follows from the first two
    flow.apply([message, *received])                      # own and foreign alike, in any order, each exactly once
    flow.state_hash()                                     # equal on all nodes that applied the same set

`origin` is the sender's 64-bit key as a signed int (of a peer id: the first 8 bytes of its hash, say), `sequence`
counts its messages from 0, `step` is its local step and decides the period, `scalar` is an int of at most `bound` in
units of 2^-fraction_bits. Repeats are for the caller to drop. Local steps between two `apply` calls are taken at equal
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from peerloom.optim.subcge_estimate import LossFn, NotFinite, two_point
from peerloom.optim.subcge_mezo import MeZO
from peerloom.optim.subcge_random import coordinates, message_seeds
from peerloom.optim.subcge_small import SmallTensors
from peerloom.optim.subcge_state import FRACTION_BITS, SCALAR_LIMIT, ExactState, Message
from peerloom.optim.subcge_subspace import Subspace
from peerloom.optim.subcge_targets import Perturbation, targets_of
from peerloom.optim.subcge_weights import Weights

__all__ = ["FRACTION_BITS", "SCALAR_LIMIT", "MeZO", "Message", "NotFinite", "SubCGE", "Subspace"]


class SubCGE:
    """The parameters of `model` whose name `trainable` finds, as a function of the set of messages applied.

    W = base - lr * sum over messages of scalar * Z, with Z of rank one in the subspace of the message's period, of
    `period` steps, for a matrix, and an iid Gaussian of the message's own for a tensor of at most one dimension. `lr`
    is the weight of one message: for the mean over n nodes pass lr / n. The paper is silent on nodes that come and go:
    n is fixed for a run here, whoever is there, or the state would hang on who knew of whom when a message came. It is
    silent on schedules and momentum as well: a message's weight is constant and there is no momentum; a schedule is in
    the scalar, by `share` of `estimate`, so that who applies it need not know the sender's step. `eps` is the two-point
    estimate's. `bound` limits |scalar|, in units of 2^-fraction_bits. `base`: the tensors at step 0 by name, of any
    float dtype, by default copies in memory; `anchor`: float32 tensors of the same shapes to write to, by default made
    when the first period ends. Both may be memory-mapped: each is read or written a piece at a time. 16-bit parameters
    are rounded from the float32 sum, never from themselves. With `hooks=False` every direction is added to the weights
    themselves and restored from a copy; needed for a Linear or Embedding whose weight the model reads without calling
    the module. `cached` is for how many periods factors are kept: a swarm whose nodes' steps differ works on several at
    once.

    Raises ValueError for settings out of range, no trainable parameter, or stores that do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int,
        period: int,
        eps: float,
        lr: float,
        run_seed: int,
        trainable: str = "",
        bound: int = SCALAR_LIMIT,
        base: Mapping[str, Tensor] | None = None,
        anchor: Mapping[str, Tensor] | None = None,
        hooks: bool = True,
        cached: int = 3,
        fraction_bits: int = FRACTION_BITS,
    ) -> None:
        if not (eps > 0 and math.isfinite(eps) and math.isfinite(lr)):
            raise ValueError(f"eps must be above 0 and lr finite, not {eps} and {lr}")
        self.model = model
        self.eps = eps
        self.run_seed = run_seed
        self.step = 0
        self._rank = rank
        self._bits = fraction_bits
        self._length = period
        self._targets = targets_of(model, trainable, run_seed, hooks)
        self._matrices = [target for target in self._targets if not target.small]
        self._small = [target for target in self._targets if target.small]
        self._keys = torch.tensor([target.key for target in self._matrices], dtype=torch.int64)
        layout = SmallTensors([one.key for one in self._small], [one.parameter.numel() for one in self._small])
        self._layout = layout
        self.state = ExactState(self._keys.tolist(), layout, rank, period, run_seed, bound)
        self._weights = Weights(self._targets, self.state, layout, rank, lr / 2**fraction_bits, base, anchor, cached)
        self._perturbed: Perturbation | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the trainable tensors, in the order of the model's."""
        return tuple(target.name for target in self._targets)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Of those with a subspace, in the order of the state's sums."""
        return tuple(target.name for target in self._matrices)

    def seed_of(self, origin: int, sequence: int) -> int:
        """The seed of a message."""
        return int(message_seeds(self.run_seed, torch.tensor([origin]), torch.tensor([sequence])))

    def advance(self, step: int) -> None:
        """Goes on to a local step; at a period's end draws new subspaces and folds the old ones.

        Raises ValueError for a step in an earlier period.
        """
        if step // self._length < self.step // self._length:
            raise ValueError(f"step {step} lies in an earlier period than step {self.step}")
        moved = step // self._length > self.step // self._length
        self.restore()
        self.step = step
        if moved:
            self._weights.move(step // self._length)

    def perturb(self, seed: int, sign: int) -> None:
        """Makes the model compute with theta + sign eps Z(seed), in the current period, until `restore`.

        Another perturbation that is still there ends.
        """
        self.restore()
        period = self.step // self._length
        places = coordinates(torch.tensor([seed]), self._keys, self._rank)[0].tolist()
        self._perturbed = Perturbation()
        with torch.no_grad():
            for target, place in zip(self._matrices, places, strict=True):
                u, v = self._weights.subspace(target, period).factors(place)
                self._perturbed.apply(target, u, v, sign * self.eps)
            for target, z in zip(self._small, self._layout.split(self._layout.normals(seed)), strict=True):
                self._perturbed.apply_small(target, z, sign * self.eps)

    def places(self, seeds: Sequence[int]) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each trainable matrix: the p and q (k,) of k seeds, whose direction is u_p v_q^T of `subspace`.

        For estimates of several seeds in one pass, each of other rows of the batch: y_i += eps (x_i . v_q) u_p.
        """
        places = coordinates(torch.tensor(list(seeds), dtype=torch.int64), self._keys, self._rank)
        return {
            name: (places[:, k] // self._rank, places[:, k] % self._rank) for k, name in enumerate(self.matrices)
        }

    def subspace(self, name: str) -> Subspace:
        """A trainable matrix's, in the current period."""
        target = self._matrices[self.matrices.index(name)]
        return self._weights.subspace(target, self.step // self._length)

    def restore(self) -> None:
        """Ends the perturbation; every weight is bit for bit what it was."""
        if self._perturbed is not None:
            with torch.no_grad():
                self._perturbed.undo()
            self._perturbed = None

    def estimate(self, loss_fn: LossFn, seed: int, share: float = 1.0) -> int:
        """(loss(theta + eps Z) - loss(theta - eps Z)) / 2 eps, in units of 2^-fraction_bits, clipped to the bound.

        Times `share`, that of the learning rate at this step. `loss_fn` is called twice, without gradients and with the
        model in eval mode, and must use the same minibatch. Raises NotFinite.
        """
        return two_point(self.model, self, loss_fn, seed, self.eps, self.state.bound, self._bits, share)

    def refresh(self) -> None:
        """Writes the weights of all that was absorbed; ends a perturbation."""
        self.restore()
        self._weights.refresh()

    def apply(self, messages: Iterable[Sequence[int]]) -> None:
        """Adds the messages to the state and writes the weights.

        Raises ValueError or OverflowError as `ExactState.absorb` does, with nothing changed.
        """
        self.absorb(messages)
        self.refresh()

    def absorb(self, messages: Iterable[Sequence[int]]) -> None:
        """Adds the messages to the state, as `apply`, and leaves the weights to the next `refresh`."""
        self._weights.added(self.state.absorb(messages))

    def retract(self, messages: Iterable[Sequence[int]]) -> None:
        """Takes messages out again that were added before, and writes the weights; raises as `apply` does."""
        self._weights.added({period: -sums for period, sums in self.state.retract(messages).items()})
        self.refresh()

    @property
    def stale(self) -> bool:
        """Whether messages of a folded period are in the weights only as an addition on top; `rebuild` mends it."""
        return bool(self._weights.late)

    def rebuild(self) -> None:
        """Sums from the base again where messages came late: then equal sets give equal bits."""
        self.restore()
        self._weights.rebuild()

    def state_hash(self, without: Iterable[Sequence[int]] = ()) -> bytes:
        """32 bytes over run seed, tensors, every period's count and all sums: equal sets of messages give equal ones.

        `without`: as it would be had these messages not been added.
        """
        return self.state.hash(without)

    def export_state(self) -> dict[str, Tensor]:
        """The int64 tensors a late joiner needs beside the base: see `ExactState.export`."""
        return self.state.export()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes an exported state and writes its weights; raises ValueError, with nothing changed."""
        self.state.load(state)
        self.restore()
        self._weights.reset()
