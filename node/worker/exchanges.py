"""A round's exchanges, the same in every worker: which fragment is due, pieces encoded and decoded, mixing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from peerloom.node.worker.mixer import Mixed, Mixer
from peerloom.optim.encode import decode, encode, encoded_bytes
from peerloom.optim.fragmented import FragmentedGASLoC, cut
from peerloom.optim.fragments import ALIGNMENT
from peerloom.optim.int8 import Dither
from peerloom.protocol.errors import SpecError
from peerloom.protocol.plan import in_sequence, pieces
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId, Span


class Pieces:
    """Where the pieces of a model of `numel` parameters lie, in elements and in bytes; SpecError if it is too small."""

    def __init__(self, numel: int, spec: GaslocSpec, alignment: int = ALIGNMENT) -> None:
        self.each = pieces(spec)
        try:
            self._spans = cut(numel, spec.fragments, self.each, alignment)
        except ValueError as error:
            raise SpecError([f"gasloc.fragments: {error}"]) from error
        self.sizes = tuple(encoded_bytes(part.stop - part.start, spec.encoding) for part in self._spans)

    def whole(self, fragment: int) -> Span:
        """All pieces of a fragment."""
        return fragment * self.each, (fragment + 1) * self.each

    def elements(self, span: Span) -> slice:
        """Of the flat parameters."""
        return slice(self._spans[span[0]].start, self._spans[span[1] - 1].stop)

    def bytes_of(self, span: Span) -> slice:
        """Of inbox and outbox."""
        return slice(sum(self.sizes[: span[0]]), sum(self.sizes[: span[1]]))


class Exchanges:
    """Drives a FragmentedGASLoC over `flat` through its exchanges; `outbox` None: it is the flat parameters themselves.

    `fragment` is the one at its exchange (`open`), or the next.
    """

    def __init__(
        self,
        method: FragmentedGASLoC,
        spec: RunSpec,
        peer_id: PeerId,
        layout: Pieces,
        flat: Tensor,
        inbox: Tensor,
        outbox: Tensor | None,
    ) -> None:
        self._method, self._spec, self._peer_id, self._layout = method, spec, peer_id, layout
        self._flat, self._inbox, self._outbox = flat.detach(), inbox, outbox
        self._lossy = spec.gasloc.encoding != "fp32"
        self._encodings = 0  # in this round
        self.fragment, self.open = 0, False
        self.remember(())

    def remember(self, distances: Iterable[float]) -> None:
        """Takes up the distances of an earlier life: fragments are of one size, so what one has met serves all."""
        known = list(distances)
        self._mixers = [Mixer(part, self._spec.gasloc, known) for part in self._method.parts]

    def distances(self) -> list[float]:
        """For a checkpoint."""
        return self._mixers[0].state()

    def reset(self) -> None:
        """Between two rounds."""
        self.fragment, self.open, self._encodings = 0, False, 0

    def propose(self) -> Tensor:
        """Ends the local steps of the fragment that is due: its y."""
        y = self._method.propose(self.fragment)
        self.open = True
        return y

    def send(self, round: int) -> None:
        """Encodes the fragment's proposal into the outbox."""
        self._round = round
        self._encode(self._layout.whole(self.fragment))

    def take(self, weight: float, span: Span, replace: bool) -> Mixed:
        """Takes in these pieces of the inbox over an edge of that weight; in a group the outcome is in the outbox."""
        mixer, whole = self._mixers[self.fragment], self._layout.whole(self.fragment)
        own = self._decode(self._outbox, whole) if self._outbox is not None and self._lossy else None
        theirs = self._decode(self._inbox, span)
        if not in_sequence(self._spec.gasloc):
            return mixer.take(weight, self._flat[self._layout.elements(whole)], theirs, own)
        part, first = self._layout.elements(span), self._layout.elements(whole).start
        inside, y = slice(part.start - first, part.stop - first), self._flat[self._layout.elements(whole)]
        x, mixed = mixer.average(y, theirs, inside, own, replace=replace)
        if replace and mixed.share == 1:
            self._pass_on(span)
            return mixed
        self._encode(span)
        if self._outbox is not None and self._lossy:
            x[inside] = self._decode(self._outbox, span)  # as the others will have it
        return mixed

    def settle(self) -> Mixed:
        """Ends the fragment's exchanges with what was taken in."""
        mixed = self._mixers[self.fragment].close()
        self._next()
        return mixed

    def finish(self, mix: bool) -> Mixed:
        """Ends the round, the fragment at its exchange mixed with the inbox at weight 1 if `mix`.

        Fragments whose turn has not come are proposed to nobody.
        """
        mixed = Mixed()
        while self.fragment < len(self._method.parts):
            if not self.open:
                self._method.propose(self.fragment)
            if mix and self.open:
                mixed = self._mix()
            else:
                mixed = min(mixed, self._mixers[self.fragment].close())
            self._next()
        self.reset()
        return mixed

    def _mix(self) -> Mixed:
        whole = self._layout.whole(self.fragment)
        own = self._decode(self._outbox, whole) if self._outbox is not None and self._lossy else None
        y = self._flat[self._layout.elements(whole)]
        return self._mixers[self.fragment].mix(y, self._decode(self._inbox, whole), own)

    def _next(self) -> None:
        self._method.settled(self.fragment)
        self.fragment, self.open = self.fragment + 1, False

    def _encode(self, span: Span) -> None:
        """Puts pieces of the parameters into the outbox, each encoded by itself."""
        if self._outbox is None:
            return
        for index in range(*span):
            piece = (index, index + 1)
            self._encodings += 1
            plain = len(self._layout.sizes) == 1 and self._encodings == 1
            sender = self._peer_id if plain else f"{self._peer_id}/{self._encodings}"
            dither = Dither(self._spec.seed, self._round, sender)
            y = self._flat[self._layout.elements(piece)].cpu()
            encode(y, self._spec.gasloc.encoding, self._outbox[self._layout.bytes_of(piece)], dither)

    def _pass_on(self, span: Span) -> None:
        """Puts what came into the outbox as it came: encoded anew, int8 may round it to another step."""
        if self._outbox is not None:
            part = self._layout.bytes_of(span)
            self._outbox[part] = self._inbox[part]

    def _decode(self, box: Tensor, span: Span) -> Tensor:
        encoding = self._spec.gasloc.encoding
        parts = [decode(box[self._layout.bytes_of((i, i + 1))], encoding) for i in range(*span)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self._flat.device)
