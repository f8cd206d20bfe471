"""The libp2p daemon (hivemind's p2pd) as a child process, and hivemind's P2P attached to it.

hivemind.P2P could start p2pd itself, but then in our process group, where Ctrl-C in a terminal ends it before this node
has said goodbye. p2pd ends by itself, and removes its socket, as soon as the one persistent connection to it breaks:
also when this process is killed with no chance to clean up (seen with SIGKILL).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import tempfile
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from peerloom.node.reexports import defer
from peerloom.protocol.errors import LinkError, PeerloomError
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 5.0  # of a call to p2pd that touches no network
IDLE_S = 30  # p2pd ends when nobody has attached to it by then
STREAM_BUFFER_BYTES = 1 << 18  # of a stream, read ahead at most twice over
SOCKETS = "peerloom-p2pd-"  # of p2pd and of what is attached to it, in the folder for temporary files; a pid follows
SOCKET_NAME_BYTES = 52  # at most, with the slash: the prefix, a pid of 10 digits, hivemind's word and random part
_READ_BYTES = 1 << 16
_TAIL_LINES = 5


def load_hivemind() -> Any:
    """hivemind, imported when first needed, its DHT and P2P alone, and kept from writing to the terminal."""
    defer(("hivemind", "hivemind.utils", "hivemind.dht"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit, deprecated; hivemind's use, not ours
        import hivemind
        import hivemind.dht.node
        from hivemind.utils.logging import use_hivemind_log_handler
    use_hivemind_log_handler("nowhere")  # no handler of its own: what it logs goes the way of all logging
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process
    debug = logging.getLogger("peerloom").isEnabledFor(logging.DEBUG)
    logging.getLogger("hivemind").setLevel(logging.DEBUG if debug else logging.CRITICAL)
    return hivemind


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pdOptions:
    """`listen` and `announce` are multiaddrs; with `identity_path` None p2pd makes up an identity."""

    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    identity_path: Path | None = None
    port_map: bool = False  # ask the home router for a port (UPnP, NAT-PMP)

    def arguments(self, socket_path: Path) -> list[str]:
        """The command line after the program's name."""
        flags = {
            "listen": f"/unix{socket_path}",
            "idleTimeout": f"{IDLE_S}s",
            "hostAddrs": ",".join(self.listen),
            "announceAddrs": ",".join(self.announce),
            "id": str(self.identity_path or ""),
            "autonat": "1",
            "connManager": "1",
            "natPortMap": str(int(self.port_map)),
            "relay": "0",  # circuit addresses would reach hivemind's multiaddr codec, which fails on them
            "tls": "1",
            "b": "0",
        }
        mode = ["-dhtServer=1"] if self.listen else ["-dhtClient=1", "-noListenAddrs=1"]
        return [f"-{name}={value}" for name, value in flags.items() if value] + mode


def socket_folder() -> Path:
    """Where temporary files are to be, or /tmp where that has too long a name: an address holds 108 bytes, or 104."""
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) + SOCKET_NAME_BYTES < 104 else Path("/tmp")


def remove_dead_sockets(folder: Path) -> None:
    """Removes what nodes that were killed have left: sockets of processes that are gone, and that nobody listens on.

    Both are asked: another container that has this folder too has other process ids.
    """
    for path in folder.glob(f"{SOCKETS}*-*.sock"):
        pid = path.name.removeprefix(SOCKETS).partition("-")[0]
        if not pid.isdecimal() or psutil.pid_exists(int(pid)):
            continue
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CALL_TIMEOUT_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)


class P2pDaemon:
    """A running p2pd; `p2p` is hivemind.P2P attached to it, `exited` completes with its exit code when it ends."""

    def __init__(self, process: asyncio.subprocess.Process, socket_path: Path) -> None:
        self._process = process
        self._socket_path = socket_path
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read_output(), name="p2pd output")
        self.exited = asyncio.create_task(process.wait(), name="p2pd exit")
        self.p2p: Any = None

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    @classmethod
    async def start(cls, options: P2pdOptions) -> P2pDaemon:
        """Starts p2pd and attaches to it; raises PeerloomError with its last words when it does not come up."""
        hivemind = await asyncio.to_thread(load_hivemind)  # it takes time, in which signals must still be heard
        program = Path(hivemind.__file__).parent / "hivemind_cli" / "p2pd"
        folder = socket_folder()
        remove_dead_sockets(folder)
        socket_path = folder / f"{SOCKETS}{os.getpid()}-{secrets.token_hex(8)}.sock"
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *options.arguments(socket_path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={"GOLOG_LOG_LEVEL": "error", **os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise PeerloomError(
                f"cannot run {program} ({error.strerror}); reinstall hivemind for this platform"
            ) from error
        daemon = cls(process, socket_path)
        try:
            await daemon._attach()
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    async def _attach(self) -> None:
        from hivemind.p2p import P2P
        from hivemind.utils.multiaddr import Multiaddr

        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ready, self.exited}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._ready.is_set():
            state = f"ended with code {self.exited.result()}" if self.exited.done() else "gave no sign of life"
            raise PeerloomError(f"p2pd {state} at its start: {' / '.join(self._tail) or 'it said nothing'}")
        # hivemind's own socket for what p2pd hands on is in /tmp, wherever temporary files are to be
        prefix = f"/unix{self._socket_path.parent}/{SOCKETS}{os.getpid()}-"
        beside: Any = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": prefix})
        async with asyncio.timeout(CALL_TIMEOUT_S):
            self.p2p = await beside.replicate(Multiaddr(f"/unix{self._socket_path}"))

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while data := await self._process.stdout.read(_READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-_READ_BYTES:]
            for raw in lines:
                line = raw.decode(errors="replace").strip()
                self._tail.append(line[:500])
                log.debug("p2pd: %s", line)
                if line.startswith("Peer ID:"):
                    self._ready.set()

    async def connect(self, peer_id: PeerId, multiaddr: str, timeout_s: float) -> None:
        """Dials a peer at `multiaddr` (without /p2p); raises LinkError with libp2p's reason, or TimeoutError."""
        from hivemind.p2p import PeerID
        from hivemind.proto import p2pd_pb2
        from hivemind.utils.multiaddr import Multiaddr

        try:
            target, packed = PeerID.from_base58(peer_id).to_bytes(), Multiaddr(multiaddr).to_bytes()
        except ValueError as error:
            raise LinkError(f"{peer_id} at {multiaddr} cannot be dialled: {error}") from None
        connect = p2pd_pb2.ConnectRequest(peer=target, addrs=[packed])
        await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect), timeout_s)

    async def disconnect(self, peer_id: PeerId) -> None:
        """Closes all connections to a peer; raises as connect does."""
        from hivemind.p2p import PeerID
        from hivemind.proto import p2pd_pb2

        disconnect = p2pd_pb2.DisconnectRequest(peer=PeerID.from_base58(peer_id).to_bytes())
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=disconnect)
        await self._request(request, CALL_TIMEOUT_S)

    async def open_stream(self, peer_id: PeerId, protocol: str, timeout_s: float) -> Stream:
        """A stream to a peer's handler, whom p2pd connects to if need be; raises as connect does.

        It is hivemind's call_binary_stream_handler, which would leave the socket open when it is cancelled.
        """
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
        from hivemind.proto import p2pd_pb2

        try:
            target = PeerID.from_base58(peer_id).to_bytes()
        except ValueError:
            raise LinkError(f"{peer_id} is no peer id") from None
        opening = p2pd_pb2.StreamOpenRequest(peer=target, proto=[protocol])
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
        response = p2pd_pb2.Response()
        async with asyncio.timeout(timeout_s):
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket_path, limit=STREAM_BUFFER_BYTES)
            except OSError as error:
                raise LinkError("the libp2p daemon does not answer") from error
            try:
                await write_pbmsg(writer, request)
                await read_pbmsg_safe(reader, response)
                if response.type == p2pd_pb2.Response.ERROR:
                    raise LinkError(response.error.msg)
            except (OSError, asyncio.IncompleteReadError) as error:
                writer.close()
                raise LinkError("the libp2p daemon does not answer") from error
            except BaseException:
                writer.close()
                raise
        return reader, writer

    async def addresses(self) -> list[str]:
        """The multiaddrs (without /p2p) at which p2pd believes it can be dialled; raises as connect does."""
        from hivemind.proto import p2pd_pb2

        response = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), CALL_TIMEOUT_S)
        return _multiaddrs(response.identify.addrs)

    async def contacts(self) -> dict[PeerId, str]:
        """The peers p2pd is connected to, each with a multiaddr of its; raises as connect does."""
        from hivemind.p2p import PeerID
        from hivemind.proto import p2pd_pb2

        response = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), CALL_TIMEOUT_S)
        found = {PeerId(str(PeerID(info.id))): _multiaddrs(info.addrs) for info in response.peers}
        return {peer: addresses[0] for peer, addresses in found.items() if addresses}

    async def hosts_of(self, peer_id: PeerId) -> tuple[str, ...]:
        """The IP addresses at the far ends of the connections to a peer; raises as connect does."""
        from hivemind.p2p import PeerID
        from hivemind.proto import p2pd_pb2

        response = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), CALL_TIMEOUT_S)
        wanted = PeerID.from_base58(peer_id).to_bytes()
        found = [_multiaddrs(info.addrs) for info in response.peers if info.id == wanted]
        split = [address.split("/") for addresses in found for address in addresses]
        return tuple(dict.fromkeys(parts[2] for parts in split if parts[1] in ("ip4", "ip6")))

    async def _request(self, request: Any, timeout_s: float) -> Any:
        """One call over p2pd's control socket (hivemind's own leave the socket open when they are cancelled)."""
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
        from hivemind.proto import p2pd_pb2

        response = p2pd_pb2.Response()
        async with asyncio.timeout(timeout_s):
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket_path)
                with contextlib.closing(writer):
                    await write_pbmsg(writer, request)
                    await read_pbmsg_safe(reader, response)
            except (OSError, asyncio.IncompleteReadError) as error:
                raise LinkError("the libp2p daemon does not answer") from error
        if response.type == p2pd_pb2.Response.ERROR:
            raise LinkError(response.error.msg)
        return response

    async def stop(self) -> None:
        """Ends p2pd, by force if need be, and removes what it left."""
        if self.p2p is not None:
            await self.p2p.shutdown()
        await self._end_process()
        await asyncio.gather(self._reader, self.exited, return_exceptions=True)
        self._socket_path.unlink(missing_ok=True)

    async def _end_process(self) -> None:
        for send in (self._process.terminate, self._process.kill):
            if self.exited.done():
                return
            with contextlib.suppress(ProcessLookupError):
                send()
            await asyncio.wait({self.exited}, timeout=STOP_TIMEOUT_S)


def listen_multiaddrs(hosts: Sequence[str], port: int) -> tuple[str, ...]:
    """`/ip4/HOST/tcp/PORT` or `/ip6/…` for each IP address."""
    return tuple(f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}" for host in hosts)


def _multiaddrs(packed: Sequence[bytes]) -> list[str]:
    from hivemind.utils.multiaddr import Multiaddr

    return [str(Multiaddr(address)) for address in packed]
