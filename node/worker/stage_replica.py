"""GASLoC between several hosts of one stage, on weights that go on training."""

from __future__ import annotations

import torch
from torch import Tensor

from peerloom.node.worker.exchanges import Exchanges, Pieces
from peerloom.node.worker_seams import Taken
from peerloom.optim.fragmented import FragmentedGASLoC
from peerloom.protocol.replicas import MixingStep
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerId


class StageReplica:
    """Proposes and mixes `flat`, a stage's newest weights, in the overlapped form of GASLoC (`optim.overlap`).

    A pipeline never waits, so an exchange runs beneath the updates: what it changed is added to the newest weights
    between two updates, never to an older version that a backward pass still needs. Older versions go as they are
    dropped, so at stage k a correction reaches the forward passes P - 1 - k updates after it is made, as a gradient
    does. `spec` is that of `replica_spec`; `proposal` and `partner` are where encoded weights lie, as bytes. Three more
    copies of the stage are held from the first proposal on, none before it.
    """

    def __init__(
        self, flat: Tensor, spec: RunSpec, peer_id: PeerId, pieces: Pieces, proposal: Tensor, partner: Tensor
    ) -> None:
        self._flat, self._spec, self._peer_id, self._pieces = flat.detach(), spec, peer_id, pieces
        self._proposal, self._partner = proposal, partner
        self._exchanges: Exchanges | None = None
        self._together = False  # it has mixed with somebody

    def take(self, step: MixingStep, round: int) -> Taken:
        """Carries out one step of a round; the first one after a "drop" proposes the weights as they are.

        The first mix only brings hosts together that began apart, and the method starts behind it. Else its momentum
        would carry them past each other by a share of that gap, much farther than they drift, and each would take the
        other for one far off.
        """
        if step == "drop":
            self._exchanges, self._together = None, False
            return Taken()
        exchanges = self._exchanges = self._exchanges or self._begin()
        if step == "propose":
            exchanges.propose()
            exchanges.send(round)
            return Taken()
        taken = Taken(**exchanges.finish(step == "mix")._asdict())
        if step == "mix" and not self._together:
            self._exchanges, self._together = None, True
        return taken

    def _begin(self) -> Exchanges:
        gasloc, flat = self._spec.gasloc, self._flat
        itself = flat.device.type == "cpu" and gasloc.encoding == "fp32"  # the proposal is y
        y = self._proposal.view(torch.float32) if itself else torch.empty_like(flat)
        method = FragmentedGASLoC(
            flat,
            1,
            eta=gasloc.eta,
            alpha=gasloc.alpha,
            gamma=gasloc.gamma,
            momentum=gasloc.momentum,
            buffers=(torch.empty_like(flat), torch.empty_like(flat)),
            y=y,
        )
        outbox = None if itself else self._proposal
        return Exchanges(method, self._spec, self._peer_id, self._pieces, y, self._partner, outbox)
