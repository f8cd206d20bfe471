"""What both ends of grpc share: its settings, the calls' names, and errors to and from status codes.

Import grpc from here: its settings must stand in the environment before it is loaded.
"""

from __future__ import annotations

import os
from typing import Any, TypeAlias

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # its fork handlers stall a process that spawns others
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core writes to stderr what we raise as errors anyway

import grpc as _grpc
import grpc.aio as _aio

from peerloom.node.throttle import WINDOW_BYTES
from peerloom.protocol import errors, limits
from peerloom.protocol.checks import shown

grpc: Any = _grpc  # whether type stubs for it are installed must not matter
aio: Any = _aio
Channel: TypeAlias = Any  # grpc.aio.Channel
Call: TypeAlias = Any  # grpc.aio.Call, of whichever kind
Context: TypeAlias = Any  # grpc.aio.ServicerContext
StatusCode: TypeAlias = Any

HELLO = "/peerloom.v1.Peer/Hello"
PROVE = "/peerloom.v1.Peer/Prove"
STATUS = "/peerloom.v1.Peer/Status"
DIAL_BACK = "/peerloom.v1.Peer/DialBack"
FETCH = "/peerloom.v1.State/Fetch"

TOKEN_KEY = "peerloom-session-bin"
ERROR_KEY = "peerloom-error"

_SHARED_OPTIONS = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.keepalive_time_ms", 20_000),  # a silent peer is asked after 20 s
    ("grpc.keepalive_timeout_ms", 10_000),  # and given up after 10 more
    ("grpc.http2.max_pings_without_data", 0),  # no cap: an exchange may be silent for long while a round trains
)
CLIENT_OPTIONS = (
    *_SHARED_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit an old one's reconnect pause
    ("grpc.enable_http_proxy", 0),  # peers are dialled, not fetched through a web proxy
    ("grpc.service_config_disable_resolution", 1),  # no TXT look-ups for a peer's host
    ("grpc.enable_retries", 0),  # retries are ours to decide
)
CAPPED_OPTIONS = (  # for a node with a download cap: whatever waits to be read has come already
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # which would widen the window to what the link could carry
)
RELAYED_OPTIONS = (  # over a tunnel, whose relay may stop moving bytes and yet live
    ("grpc.keepalive_time_ms", 10_000),  # the server's least interval
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # of grpc's own pings, which keep a keepalive waiting: else a minute
)
SERVER_OPTIONS = (
    *_SHARED_OPTIONS,
    ("grpc.so_reuseport", 0),  # two daemons on one port would share its connections and fail at random
    ("grpc.max_concurrent_streams", 32),  # a connection
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

_CODES = {
    errors.LinkError: grpc.StatusCode.UNAVAILABLE,
    errors.MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DigestMismatch: grpc.StatusCode.DATA_LOSS,
    errors.BadPayload: grpc.StatusCode.OUT_OF_RANGE,
    errors.AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    errors.VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RunMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NoDonor: grpc.StatusCode.NOT_FOUND,
}


class UnknownSession(errors.AuthenticationError):
    """The server does not know the token: it has restarted, or forgotten it; a new Hello helps."""


TAKEN = (("peerloom-taken", "1"),)  # initial metadata of a stream that is served; an abort carries none


class Unreachable(errors.LinkError):
    """No connection, or one that broke: a new connection may help."""


OWN_FAULT = "internal: the peer met an error of its own"  # all that a peer learns of a bug of ours
_TOLD = {kind.__name__: kind for kind in (*_CODES, UnknownSession)}


def code_of(error: errors.PeerloomError) -> StatusCode:
    """The status that tells a peer of `error`."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.UNKNOWN


async def abort(context: Context, error: errors.PeerloomError) -> None:
    """Ends a call on the server with `error`, so that the client raises the same type."""
    text = shown(str(error), limits.MAX_ERROR_CHARS)
    await context.abort(code_of(error), text, ((ERROR_KEY, type(error).__name__),))


def told(name: str, text: str) -> errors.PeerloomError:
    """The error that a peer names; LinkError for a name unknown here."""
    return _TOLD.get(name, errors.LinkError)(text)


def error_of(code: StatusCode, details: str | None, trailing: Any) -> errors.PeerloomError:
    """The error a finished call stands for: the peer's own where it named one, else what grpc says."""
    text = shown(details or "", limits.MAX_ERROR_CHARS) or "no reason given"
    named = dict(trailing).get(ERROR_KEY) if trailing else None
    if named in _TOLD:
        return told(named, text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return errors.LimitExceeded(f"a message over {limits.MAX_MESSAGE_BYTES} bytes: {text}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.MalformedMessage(f"the peer does not know this call: {text}")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return Unreachable("another certificate answers there than the one in its record")
    spoilt = code is grpc.StatusCode.UNKNOWN and text.startswith("Stream removed")  # TLS cannot go on
    if code is grpc.StatusCode.UNAVAILABLE or spoilt:
        return Unreachable(text)
    return errors.LinkError(f"{code.name.lower().replace('_', ' ')}: {text}")


def raised(error: Any) -> errors.PeerloomError:
    """The same for the exception of a finished call."""
    return error_of(error.code(), error.details(), error.trailing_metadata())
