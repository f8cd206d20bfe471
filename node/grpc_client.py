"""The calling half of the grpc transport: one pinned channel a peer, proven both ways before the first call on it."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from peerloom.node.backoff import Backoff
from peerloom.node.dialer import Dialer, Endpoint, PlainDialer
from peerloom.node.grpc_wire import (
    CAPPED_OPTIONS,
    CLIENT_OPTIONS,
    HELLO,
    PROVE,
    RELAYED_OPTIONS,
    TOKEN_KEY,
    Channel,
    UnknownSession,
    Unreachable,
    aio,
    grpc,
    raised,
)
from peerloom.node.identity import Identity, verify
from peerloom.node.racing import NoneWon, race
from peerloom.node.seams import Clock
from peerloom.node.throttle import Traffic
from peerloom.node.tls import TARGET_NAME, fingerprint, pinned_pem
from peerloom.protocol import checks, codec, handshake, limits
from peerloom.protocol.dial_order import DELAY_S
from peerloom.protocol.errors import AuthenticationError, LinkError, PeerError, PeerloomError
from peerloom.protocol.handshake import Hello, HelloReply, Prove, RunClaim
from peerloom.protocol.types import PeerRecord

DIAL_S = 5.0  # a Hello, connecting included, at one address
CONNECT_S = 20.0  # all of a peer's addresses together
CLOSE_S = 5.0  # calls left on a channel that is replaced have this long to end

Metadata = tuple[tuple[str, bytes], ...]
T = TypeVar("T")


@dataclass(slots=True)
class _Attempt:
    """A channel on its way to be proven."""

    endpoint: Endpoint
    channel: Channel
    token: bytes = b""


class PeerLink:
    """The connection to one peer under one certificate: made when needed, made again once when it breaks."""

    def __init__(
        self,
        record: PeerRecord,
        identity: Identity,
        claim: RunClaim,
        clock: Clock,
        rng: random.Random,
        traffic: Traffic,
        background: set[asyncio.Task[None]],
        dialer: Dialer | None = None,
    ) -> None:
        self.record = record
        self.clock_offset_s = 0.0  # the peer's clock minus ours, as of the last Hello
        self.calls = 0  # under way
        self._identity = identity
        self._claim = claim
        self._clock = clock
        self._traffic = traffic
        self._background = background
        self._dialer = dialer or PlainDialer()
        self._endpoint: Endpoint | None = None  # of the channel
        self._backoff = Backoff(rng)
        self._connecting = asyncio.Lock()
        self._channel: Channel | None = None
        self._token: bytes | None = None

    async def call(self, attempt: Callable[[Channel, Metadata], Awaitable[T]]) -> T:
        """Runs `attempt` on a proven channel; once more after a forgotten session or a connection that broke."""
        reused = self._channel is not None
        channel, token = await self._proven()
        try:
            return await attempt(channel, ((TOKEN_KEY, token),))
        except UnknownSession:
            self._forget(token)
        except Unreachable:
            if self._endpoint is not None and self._channel is channel:
                self._endpoint.failed()
            self._drop(channel)
            if not reused:
                raise
        channel, token = await self._proven()
        return await attempt(channel, ((TOKEN_KEY, token),))

    async def prove(self) -> None:
        """Connects, and nothing else."""
        await self._proven()

    async def close(self) -> None:
        """Ends the channel and every call on it."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            self._release()
            await channel.close()

    def _release(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.release()

    async def _proven(self) -> tuple[Channel, bytes]:
        async with self._connecting:
            if self._channel is not None and self._token is not None:
                return self._channel, self._token
            self._backoff.check(self._clock.monotonic())
            try:
                async with asyncio.timeout(CONNECT_S):
                    channel, token = await self._connect()
            except TimeoutError:
                self._backoff.failed(self._clock.monotonic(), "no answer in time")
                raise LinkError(f"no answer from {self.record.peer_id} within {CONNECT_S:.0f} s") from None
            except PeerloomError as error:
                self._backoff.failed(self._clock.monotonic(), str(error))
                raise
            self._backoff.reset()
            self._channel, self._token = channel, token
            return channel, token

    async def _connect(self) -> tuple[Channel, bytes]:
        if self._channel is not None:  # only the session is gone
            try:
                return self._channel, await self._prove_on(self._channel)
            except Unreachable:
                self._drop(self._channel)
        ways = [partial(self._attempt, way) for way in await self._dialer.routes(self.record)]
        if not ways:
            raise LinkError(f"{self.record.peer_id} gives no address to dial")
        try:
            attempt = await race(ways, DELAY_S, _give_up)
        except NoneWon as lost:
            raise self._failure(lost.errors) from None
        attempt.endpoint.proven()
        self._endpoint = attempt.endpoint
        return attempt.channel, attempt.token

    async def _attempt(self, way: str) -> _Attempt:
        """Another host, or nobody, may be at one address of several."""
        try:
            endpoint = await self._dialer.endpoint(self.record, way)
            attempt = _Attempt(endpoint, self._open(endpoint))
        except PeerError as error:
            raise _named(way, error) from None
        try:
            attempt.token = await self._prove_on(attempt.channel)
        except PeerError as error:
            if isinstance(error, LinkError):
                endpoint.failed()
            await _give_up(attempt)
            raise _named(way, error) from None
        except BaseException:
            await _give_up(attempt)
            raise
        return attempt

    def _open(self, endpoint: Endpoint) -> Channel:
        """A channel to the endpoint, which is let go where there can be none."""
        capped = bool(self._traffic.caps.download)
        try:
            return open_channel(endpoint.target, self.record.cert_der, capped=capped, relayed=endpoint.relayed)
        except BaseException:
            endpoint.release()
            raise

    def _failure(self, failures: list[PeerloomError]) -> PeerloomError:
        worst = next((error for error in failures if not isinstance(error, LinkError)), failures[0])
        return type(worst)(f"cannot talk to {self.record.peer_id}: {'; '.join(map(str, failures))}")

    async def _prove_on(self, channel: Channel) -> bytes:
        pin = fingerprint(self.record.cert_der)
        before = self._clock.wall()
        hello = Hello(claim=self._claim, wall_s=before, challenge=secrets.token_bytes(limits.CHALLENGE_BYTES))
        reply = codec.decode_hello_reply(await self._ask(channel, HELLO, codec.encode_hello(hello)))
        after = self._clock.wall()
        self._check_reply(hello, reply, pin)
        signature = self._identity.sign(handshake.proof(self._claim.peer_id, self._claim.run_id, reply.nonce, pin))
        prove = Prove(peer_id=self._claim.peer_id, nonce=reply.nonce, signature=signature)
        token = codec.decode_token(await self._ask(channel, PROVE, codec.encode_prove(prove)))
        self.clock_offset_s = reply.wall_s - (before + after) / 2
        return token

    def _check_reply(self, hello: Hello, reply: HelloReply, pin: bytes) -> None:
        theirs = reply.claim
        if theirs.peer_id != self.record.peer_id:
            raise AuthenticationError(f"{theirs.peer_id} answers where {self.record.peer_id} should")
        if not verify(theirs.peer_id, handshake.greeting(hello, theirs, reply.nonce, pin), reply.signature):
            raise AuthenticationError(f"the reply is not signed by {theirs.peer_id}")
        handshake.common_version(self._claim, theirs)
        handshake.check_same_run(self._claim, theirs)

    async def _ask(self, channel: Channel, path: str, data: bytes) -> bytes:
        return await ask(channel, path, data, (), DIAL_S, self._traffic, at_once=True)

    def _forget(self, token: bytes) -> None:
        if self._token == token:
            self._token = None

    def _drop(self, channel: Channel) -> None:
        """Replaces a channel that failed; calls still on it may run out."""
        if self._channel is not None and self._channel is channel:
            self._channel = self._token = None
            self._release()
            task = asyncio.create_task(channel.close(CLOSE_S), name="channel-close")
            self._background.add(task)
            task.add_done_callback(self._background.discard)


async def _give_up(attempt: _Attempt) -> None:
    attempt.endpoint.release()
    await attempt.channel.close()


def _named(way: str, error: PeerError) -> PeerError:
    kind = LinkError if isinstance(error, LinkError) else type(error)
    return kind(f"{way}: {error}")


def open_channel(address: str, cert_der: bytes, *, capped: bool = False, relayed: bool = False) -> Channel:
    """A channel that trusts the one certificate; raises MalformedMessage for an address or certificate that is none."""
    credentials = grpc.ssl_channel_credentials(root_certificates=pinned_pem(cert_der))
    own = {**dict(CLIENT_OPTIONS), **dict(CAPPED_OPTIONS if capped else ()), **dict(RELAYED_OPTIONS if relayed else ())}
    options = (*own.items(), ("grpc.ssl_target_name_override", TARGET_NAME))
    return aio.secure_channel(f"dns:///{checks.address(address)}", credentials, options=options)


async def ask(
    channel: Channel,
    path: str,
    data: bytes,
    metadata: Metadata,
    timeout_s: float,
    traffic: Traffic,
    *,
    at_once: bool = False,
) -> bytes:
    """One unary call, held to the caps unless `at_once`; raises the peer's error, or LinkError."""
    if not at_once:
        await traffic.may_send(len(data))
    call = channel.unary_unary(path)(data, timeout=timeout_s, metadata=metadata)
    if at_once:
        traffic.note(sent=len(data))
    else:
        traffic.sent += len(data)
    try:
        reply = bytes(await call)
    except aio.AioRpcError as error:
        raise raised(error) from None
    except aio.UsageError:
        raise Unreachable("the channel has been closed") from None
    if at_once:
        traffic.note(received=len(reply))
    else:
        await traffic.took(len(reply))
    return reply
