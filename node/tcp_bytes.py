"""How many bytes the TCP connections of another process of this user have moved, by the kernel's own count of each.

Linux tells it to anybody in the network namespace (sock_diag(7), `struct tcp_info`). A process's counters of all that
it reads and writes would not do: its local sockets are in them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

_SOCK_DIAG = 4  # of AF_NETLINK
_OF_TCP = 18  # TCPDIAG_GETSOCK: both families at once, each of whose dumps walks through all of the kernel's table
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_ERROR, _DONE = 2, 3
_INFO = 2  # INET_DIAG_INFO, the attribute that holds a tcp_info
_STATES = 0xFFFFFFFF & ~(1 << 3 | 1 << 6 | 1 << 7 | 1 << 10 | 1 << 12)  # not half open, over, or listening
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBB48xII")  # an inet_diag_req
_SOCKET = struct.Struct("=44x8s16xI")  # the cookie and the inode of an inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")
_ACKED_AT, _SENT_AT = 120, 200  # of u64 pairs in a tcp_info: (acked, received), (sent, sent again)
_PAIR = struct.Struct("=QQ")
_READ_BYTES = 1 << 16  # twice what the kernel puts into one answer
_PATIENCE_S = 1.0  # the kernel answers before send() returns

Cookie = bytes  # a connection's own, for as long as the machine runs


class Moved(NamedTuple):
    """Cumulative bytes of payload: what TCP had to send again is not in it."""

    sent: int
    received: int


class _Seen(NamedTuple):
    cookie: Cookie
    inode: int
    moved: Moved


class TcpBytes:
    """Counts for one process; of a connection that ends, what it moved after the last `read` is missed.

    Raises OSError where the kernel does not tell.
    """

    def __init__(self, pid: int) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("only Linux tells what a connection has moved")
        self._fds = f"/proc/{pid}/fd"
        self._ours: dict[Cookie, Moved] = {}
        self._others: set[Cookie] = set()
        self._ended = Moved(0, 0)
        self.read()

    def read(self) -> Moved:
        """Bytes of all connections so far; raises OSError, also when the process is gone."""
        seen = list(_connections())
        if any(each.cookie not in self._ours and each.cookie not in self._others for each in seen):
            self._sort(seen)
        now = {each.cookie: each.moved for each in seen if each.cookie in self._ours}
        self._ended = _sum([self._ended, *(moved for cookie, moved in self._ours.items() if cookie not in now)])
        self._ours = now
        self._others &= {each.cookie for each in seen}
        return _sum([self._ended, *now.values()])

    def _sort(self, seen: list[_Seen]) -> None:
        inodes = set(_sockets_of(self._fds))
        for each in seen:
            if each.inode in inodes:
                self._ours.setdefault(each.cookie, Moved(0, 0))
            elif each.cookie not in self._ours and each.inode:  # 0: nobody has taken it from the listener yet
                self._others.add(each.cookie)


def _sum(moved: list[Moved]) -> Moved:
    return Moved(sum(each.sent for each in moved), sum(each.received for each in moved))


def _sockets_of(fds: str) -> Iterator[int]:
    for fd in os.listdir(fds):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kind, _, rest = os.readlink(f"{fds}/{fd}").partition(":[")
            if kind == "socket":
                yield int(rest[:-1])


def _connections() -> Iterator[_Seen]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_PATIENCE_S)
        body = _REQUEST.pack(socket.AF_UNSPEC, 0, 0, 1 << (_INFO - 1), _STATES, 0)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _OF_TCP, _DUMP, 1, 0) + body)
        while True:
            data = kernel.recv(_READ_BYTES)
            at = 0
            while at < len(data):
                size, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                    raise OSError(f"sock_diag: {os.strerror(code)}")
                yield _seen(data[at + _HEADER.size : at + size])
                at += (size + 3) & ~3


def _seen(message: bytes) -> _Seen:
    cookie, inode = _SOCKET.unpack_from(message)
    at, moved = _SOCKET.size, Moved(0, 0)
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INFO:
            moved = _moved(message[at + _ATTRIBUTE.size : at + size])
        at += max((size + 3) & ~3, _ATTRIBUTE.size)
    return _Seen(cookie, inode, moved)


def _moved(info: bytes) -> Moved:
    if len(info) < _ACKED_AT + _PAIR.size:
        raise OSError("this kernel is too old to tell what a connection has moved")
    acked, received = _PAIR.unpack_from(info, _ACKED_AT)
    if len(info) < _SENT_AT + _PAIR.size:
        return Moved(acked, received)
    sent, again = _PAIR.unpack_from(info, _SENT_AT)
    return Moved(sent - again, received)
