"""The server's side of knowing its clients: Hello without state, Prove, and the table of sessions.

A nonce carries its own expiry and a MAC, so a flood of Hellos occupies no memory and crowds nobody out; only a client
that has proven its identity takes a place in the table, and only MAX_SESSIONS_PER_PEER of them.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import unquote

from peerloom.node.grpc_wire import UnknownSession
from peerloom.node.identity import Identity, verify
from peerloom.node.seams import Clock
from peerloom.protocol import handshake, limits
from peerloom.protocol.errors import AuthenticationError, LimitExceeded
from peerloom.protocol.handshake import Hello, HelloReply, Prove, RunClaim
from peerloom.protocol.types import PeerId

TUNNELLED = "tunnel:"  # what a call that comes by a tunnel is from, before the peer's id
_RANDOM_BYTES = 16
_MAC_BYTES = 32


@dataclass(slots=True)
class _Session:
    peer: PeerId
    used_at: float


class Sessions:
    """Proves both sides' identity and maps a session's token to its peer."""

    def __init__(
        self,
        identity: Identity,
        claim: RunClaim,
        fingerprint: bytes,
        clock: Clock,
        allow: Callable[[PeerId], bool] | None = None,
    ) -> None:
        self._identity = identity
        self._claim = claim
        self._fingerprint = fingerprint
        self._clock = clock
        self._allow = allow
        self._secret = secrets.token_bytes(32)
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    def hello(self, hello: Hello) -> HelloReply:
        """Answers a Hello; raises RunMismatch or VersionMismatch with both sides' values, or AuthenticationError."""
        handshake.common_version(self._claim, hello.claim)
        handshake.check_same_run(self._claim, hello.claim)
        self._check_allowed(hello.claim.peer_id)
        nonce = self._nonce(hello.claim.peer_id)
        signature = self._identity.sign(handshake.greeting(hello, self._claim, nonce, self._fingerprint))
        return HelloReply(claim=self._claim, wall_s=self._clock.wall(), nonce=nonce, signature=signature)

    def prove(self, prove: Prove) -> bytes:
        """Takes a client's proof and returns its session's token; raises AuthenticationError."""
        self._check_nonce(prove.peer_id, prove.nonce)
        signed = handshake.proof(prove.peer_id, self._claim.run_id, prove.nonce, self._fingerprint)
        if not verify(prove.peer_id, signed, prove.signature):
            raise AuthenticationError(f"the signature is not by {prove.peer_id}")
        self._check_allowed(prove.peer_id)
        self._make_room(prove.peer_id)
        token = secrets.token_bytes(limits.TOKEN_BYTES)
        self._sessions[token] = _Session(prove.peer_id, self._clock.monotonic())
        return token

    def peer(self, token: bytes | None) -> PeerId:
        """Whose session this is; raises UnknownSession, or AuthenticationError once the peer is no longer allowed."""
        session = self._sessions.get(token) if token is not None else None
        now = self._clock.monotonic()
        if token is None or session is None or now - session.used_at > limits.SESSION_IDLE_S:
            raise UnknownSession("no session under this token: say Hello first")
        session.used_at = now
        self._sessions.move_to_end(token)
        self._check_allowed(session.peer)
        return session.peer

    def _check_allowed(self, peer: PeerId) -> None:
        if self._allow is not None and not self._allow(peer):
            raise AuthenticationError(f"{peer} is not allowed here")

    def _make_room(self, peer: PeerId) -> None:
        own = [token for token, session in self._sessions.items() if session.peer == peer]
        for token in own[: max(0, len(own) - limits.MAX_SESSIONS_PER_PEER + 1)]:
            del self._sessions[token]
        while len(self._sessions) >= limits.MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def _nonce(self, peer: PeerId) -> bytes:
        expiry_ms = int((self._clock.monotonic() + limits.NONCE_LIFE_S) * 1000)
        body = expiry_ms.to_bytes(8, "big", signed=True) + secrets.token_bytes(_RANDOM_BYTES)
        return body + self._mac(body, peer)

    def _check_nonce(self, peer: PeerId, nonce: bytes) -> None:
        body, mac = nonce[:-_MAC_BYTES], nonce[-_MAC_BYTES:]
        if len(body) != 8 + _RANDOM_BYTES or not hmac.compare_digest(mac, self._mac(body, peer)):
            raise AuthenticationError("the nonce is not one of this server's for this peer")
        if self._clock.monotonic() * 1000 > int.from_bytes(body[:8], "big", signed=True):
            raise AuthenticationError(f"the nonce is older than {limits.NONCE_LIFE_S:.0f} s")

    def _mac(self, body: bytes, peer: PeerId) -> bytes:
        return hmac.digest(self._secret, body + peer.encode(), sha256)


class HelloBudget:
    """How many Hellos each host may still send: a bucket a host, in a table of bounded size."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # host -> (left, at), longest silent first

    def spend(self, source: str) -> None:
        """Takes one Hello from the budget of `source` (grpc's peer string); raises LimitExceeded when it is spent."""
        host, now = host_of(source), self._clock.monotonic()
        left, at = self._buckets.pop(host, (float(limits.HELLO_BURST), now))
        left = min(float(limits.HELLO_BURST), left + (now - at) * limits.HELLO_PER_S)
        self._buckets[host] = (max(0.0, left - 1.0), now)
        if len(self._buckets) > limits.MAX_HELLO_HOSTS:
            self._buckets.popitem(last=False)
        if left < 1.0:
            raise LimitExceeded(f"more than {limits.HELLO_PER_S:.0f} Hellos a second from {host}")


def host_of(source: str, *, whole: bool = False) -> str:
    """The host in grpc's "ipv4:1.2.3.4:5" or "ipv6:%5B::1%5D:5"; of IPv6 the /64, all of which one host can use.

    With `whole` of IPv6 too the very address. Of a tunnel it is the tunnel's origin.
    """
    if source.startswith(TUNNELLED):
        return source
    family, _, rest = unquote(source).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    if family != "ipv6" or whole:
        return host or source
    try:
        return str(ipaddress.ip_network((host, 64), strict=False))
    except ValueError:
        return host
