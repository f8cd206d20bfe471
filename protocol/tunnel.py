"""The wire of `peerloom/tunnel/2`: what opens a libp2p stream of it, the answer, and the frames that follow.

A stream begins with one header: a byte of length, a byte that names the kind, and the kind's operand. One byte answers
it: 0, or why not. An opened tunnel then carries frames each way, a frame of length 0 ending its direction: libp2p's
daemon closes both at once, so a half-close must be told inside. A relay copies the frames and reads none of them.

A relay that listens on a TCP port of its own offers it with a token, to the target in the header and to the one who
opens in the answer. An end that reaches the port shows the token there, waits for LEG_ACK, and answers MOVED: the
frames of its leg then go over that connection, and the stream is closed. One that does not answers TAKEN.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Literal, TypeGuard, get_args

from peerloom.protocol import checks, limits
from peerloom.protocol.errors import LinkError, MalformedMessage
from peerloom.protocol.types import PeerId

TUNNEL: Final = "peerloom/tunnel/2"
TOKEN_BYTES: Final = 16
OFFER_BYTES: Final = 2 + TOKEN_BYTES
MAX_HEADER_BYTES: Final = 1 + OFFER_BYTES + limits.MAX_PEER_ID_CHARS  # after the byte of length
MAX_FRAME_BYTES: Final = 1 << 20  # of one frame; nothing is allocated on its word
FRAME_HEAD_BYTES: Final = 4
END: Final = bytes(FRAME_HEAD_BYTES)  # the frame that ends a direction
GREETING_BYTES: Final = 32  # that a leg's connection begins with
LEG_ACK: Final = b"!"  # answers them
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
Assent = Literal[
    "taken",  # on this stream
    "moved",  # on the connection that was offered
    "offered",  # either; an offer follows, and the one who opens has the next word
]
Answer = Refusal | Assent
_REFUSALS: tuple[Refusal, ...] = get_args(Refusal)
_CODES: dict[Answer, int] = {
    "taken": 0,
    **{refusal: 1 + index for index, refusal in enumerate(_REFUSALS)},
    "moved": 254,
    "offered": 255,
}
_ANSWERS: dict[int, Answer] = {code: answer for answer, code in _CODES.items()}
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
class Offer:
    """A port of the relay's, and the secret that is good for one connection there."""

    port: int
    token: bytes

    @property
    def greeting(self) -> bytes:
        """What shows the token: a hash, or a relay could have an end send any bytes to any port of its host."""
        return hashlib.sha256(b"peerloom/tunnel/2" + self.token).digest()


@dataclass(frozen=True, slots=True)
class OpenTo:
    """Asks for a tunnel to `target`: to this very node, or to one that holds a place at it."""

    target: PeerId


@dataclass(frozen=True, slots=True)
class DeliverFrom:
    """A relay brings a tunnel that `origin` asked it for, and may offer a connection for it."""

    origin: PeerId
    offer: Offer | None = None


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
        case DeliverFrom(peer, offer):
            body = (b"d" if offer is None else b"D" + _offer_bytes(offer)) + peer.encode()
        case Keep(place):
            body = b"k" + (b"1" if place else b"0")
    return bytes([len(body)]) + body


def decode_header(body: bytes) -> Header:
    """What follows the byte of length; raises MalformedMessage."""
    kind, operand = body[:1], body[1:]
    if kind == b"o":
        return OpenTo(_peer("tunnel's target", operand))
    if kind == b"d":
        return DeliverFrom(_peer("tunnel's origin", operand))
    if kind == b"D":
        return DeliverFrom(_peer("tunnel's origin", operand[OFFER_BYTES:]), decode_offer(operand[:OFFER_BYTES]))
    if kind == b"k" and operand in (b"0", b"1"):
        return Keep(operand == b"1")
    raise MalformedMessage("a tunnel's header of a kind not known here")


def _peer(what: str, operand: bytes) -> PeerId:
    try:
        return PeerId(checks.peer_id(what, operand.decode("ascii")))
    except UnicodeDecodeError:
        raise MalformedMessage("a tunnel's header that is not ASCII") from None


def encode_answer(answer: Answer, offer: Offer | None = None) -> bytes:
    """One byte; an offer follows "offered"."""
    return bytes([_CODES[answer]]) + (b"" if offer is None else _offer_bytes(offer))


def decode_answer(data: bytes) -> Answer:
    """Of one byte; raises MalformedMessage."""
    if len(data) != 1 or data[0] not in _ANSWERS:
        raise MalformedMessage("no answer to a tunnel's header")
    return _ANSWERS[data[0]]


def is_refusal(answer: Answer) -> TypeGuard[Refusal]:
    """Whether the tunnel does not stand."""
    return answer in _SAID


def _offer_bytes(offer: Offer) -> bytes:
    return offer.port.to_bytes(2, "big") + offer.token


def decode_offer(data: bytes) -> Offer:
    """Of OFFER_BYTES; raises MalformedMessage."""
    port = int.from_bytes(data[:2], "big")
    if len(data) != OFFER_BYTES or not port:
        raise MalformedMessage("no offer of a connection for a tunnel")
    return Offer(port, data[2:])


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
