"""The wire of `peerloom/tunnel/1`: what opens a libp2p stream of it, the answer, and the frames that follow.

A stream begins with one header: a byte of length, a byte that names the kind, and the kind's operand. One byte answers
it: 0, or why not. An opened tunnel then carries frames each way, a frame of length 0 ending its direction: libp2p's
daemon closes both at once, so a half-close must be told inside. A relay copies the frames and reads none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from peerloom.protocol import checks, limits
from peerloom.protocol.errors import LinkError, MalformedMessage
from peerloom.protocol.types import PeerId

TUNNEL: Final = "peerloom/tunnel/1"
MAX_HEADER_BYTES: Final = 1 + limits.MAX_PEER_ID_CHARS  # after the byte of length
MAX_FRAME_BYTES: Final = 1 << 20  # of one frame; nothing is allocated on its word
FRAME_HEAD_BYTES: Final = 4
END: Final = bytes(FRAME_HEAD_BYTES)  # the frame that ends a direction
TAKEN: Final = 0
PING: Final = b"?"  # on a stream that keeps a relay; one byte of load answers it

Refusal = Literal[
    "malformed",  # no header that this version knows
    "unknown",  # nobody of that id holds a place at this relay
    "unwilling",  # this node relays for nobody, or not for this peer
    "own",  # a tunnel to the very peer that asks
    "loop",  # a relay asks to be relayed by one that it relays for
    "greedy",  # this peer, or this pair, has all the tunnels it may have
    "busy",  # the relay has all the tunnels it may have
    "unreachable",  # the target no longer answers
]
_REFUSALS: tuple[Refusal, ...] = get_args(Refusal)
_SAID: dict[Refusal, str] = {
    "malformed": "it does not understand the request",
    "unknown": "the target holds no place at it",
    "unwilling": "it does not relay for this peer",
    "own": "a tunnel may not lead back to its own peer",
    "loop": "it is a relay of its own relay",
    "greedy": "this peer has all the tunnels it may have there",
    "busy": "it has all the tunnels it may have",
    "unreachable": "the target no longer answers it",
}


@dataclass(frozen=True, slots=True)
class OpenTo:
    """Asks for a tunnel to `target`: to this very node, or to one that holds a place at it."""

    target: PeerId


@dataclass(frozen=True, slots=True)
class DeliverFrom:
    """A relay brings a tunnel that `origin` asked it for."""

    origin: PeerId


@dataclass(frozen=True, slots=True)
class Keep:
    """Keeps an eye on a relay; with `place`, others may reach the sender through it for as long as the stream lives."""

    place: bool


Header = OpenTo | DeliverFrom | Keep


def encode_header(header: Header) -> bytes:
    """The first bytes of a stream."""
    match header:
        case OpenTo(peer):
            body = b"o" + peer.encode()
        case DeliverFrom(peer):
            body = b"d" + peer.encode()
        case Keep(place):
            body = b"k" + (b"1" if place else b"0")
    return bytes([len(body)]) + body


def decode_header(body: bytes) -> Header:
    """What follows the byte of length; raises MalformedMessage."""
    try:
        kind, operand = body[:1], body[1:].decode("ascii")
    except UnicodeDecodeError:
        raise MalformedMessage("a tunnel's header that is not ASCII") from None
    if kind == b"o":
        return OpenTo(PeerId(checks.peer_id("tunnel's target", operand)))
    if kind == b"d":
        return DeliverFrom(PeerId(checks.peer_id("tunnel's origin", operand)))
    if kind == b"k" and operand in ("0", "1"):
        return Keep(operand == "1")
    raise MalformedMessage("a tunnel's header of a kind not known here")


def encode_answer(refusal: Refusal | None) -> bytes:
    """One byte."""
    return bytes([TAKEN if refusal is None else 1 + _REFUSALS.index(refusal)])


def decode_answer(data: bytes) -> Refusal | None:
    """None when the tunnel stands; raises MalformedMessage."""
    if len(data) != 1 or data[0] > len(_REFUSALS):
        raise MalformedMessage("no answer to a tunnel's header")
    return None if data[0] == TAKEN else _REFUSALS[data[0] - 1]


class TunnelRefused(LinkError):
    """A tunnel that `by` did not take; `refusal` says why."""

    def __init__(self, by: PeerId, refusal: Refusal) -> None:
        super().__init__(f"no tunnel through {by}: {_SAID[refusal]}")
        self.refusal: Refusal = refusal


def frame_head(size: int) -> bytes:
    """What precedes `size` bytes of data, at most MAX_FRAME_BYTES and not 0."""
    return size.to_bytes(FRAME_HEAD_BYTES, "big")


class Unframer:
    """Takes the frames of one direction apart, as the bytes come; `ended` once the frame that ends it was read."""

    def __init__(self) -> None:
        self.ended = False
        self._left = 0  # bytes of the frame under way
        self._head = b""

    @property
    def left(self) -> int:
        """Bytes of the frame under way that have not come yet; 0 between frames, and within a head."""
        return self._left

    @property
    def head_left(self) -> int:
        """Bytes of the next head that have not come yet, to one who asks between frames."""
        return FRAME_HEAD_BYTES - len(self._head)

    def skip(self, size: int) -> None:
        """So many bytes of the frame under way, at most `left`, went another way."""
        self._left -= size

    def feed(self, data: bytes) -> list[memoryview]:
        """The payload in `data`, in order, uncopied; raises MalformedMessage for a frame too large or past the end."""
        found: list[memoryview] = []
        view, at = memoryview(data), 0
        while at < len(view):
            if self.ended:
                raise MalformedMessage("bytes after the end of a tunnel's direction")
            if self._left:
                piece = view[at : at + self._left]
                found.append(piece)
                self._left -= len(piece)
                at += len(piece)
                continue
            taken = view[at : at + self.head_left]
            self._head += bytes(taken)
            at += len(taken)
            if len(self._head) == FRAME_HEAD_BYTES:
                self._begin()
        return found

    def _begin(self) -> None:
        self._left, self._head = int.from_bytes(self._head, "big"), b""
        if self._left > MAX_FRAME_BYTES:
            raise MalformedMessage(f"a tunnel's frame of {self._left} bytes; the limit is {MAX_FRAME_BYTES}")
        self.ended = not self._left
