"""In which order a peer's addresses are tried: RFC 8305's, with ways through relays among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from peerloom.protocol.types import PeerId, PeerRecord

DELAY_S: Final = 0.25  # RFC 8305, section 5: from one attempt to the next, unless that one fails before
RELAY: Final = "relay://"  # begins an address through a peer, and no host:port; with the peer's own id: over libp2p
MAX_ROUTES: Final = 16


def relay_address(relay: PeerId) -> str:
    """The address of a peer as reached through `relay`."""
    return RELAY + relay


def relay_of(address: str) -> PeerId | None:
    """Whom an address leads through, None for a plain one."""
    return PeerId(address.removeprefix(RELAY)) if address.startswith(RELAY) else None


def by_turns(lists: Iterable[Sequence[str]]) -> list[str]:
    """The lists merged one of each at a time."""
    left = [list(each) for each in lists if each]
    merged: list[str] = []
    while left:
        merged += [each.pop(0) for each in left]
        left = [each for each in left if each]
    return merged


def plain_order(addresses: Sequence[str]) -> list[str]:
    """RFC 8305, section 4: the families by turns, each in the order given, that of the first address first.

    A name counts as a family of its own: grpc sorts what it resolves to.
    """
    families: dict[str, list[str]] = {}
    for address in addresses:
        families.setdefault(_family(address), []).append(address)
    return by_turns(families.values())


def routes(record: PeerRecord, relays: Sequence[PeerId], *, connected: bool, last: str | None) -> tuple[str, ...]:
    """Every way to a peer, in the order of trying: what worked `last`, then by what it says of itself.

    A peer that can be dialled is dialled, and its libp2p connection is a last resort; of one that cannot, addresses and
    relays take turns, since it may be a neighbour behind the same router. `relays` are its own, best first; `connected`
    says that a libp2p connection to it stands already.
    """
    plain = plain_order(record.addresses)
    own = [relay_address(record.peer_id)]
    through = [relay_address(relay) for relay in relays]
    if record.reach == "via":
        ways = by_turns([own + through if connected else through, plain]) + ([] if connected else own)
    else:
        ways = plain + through + own
    if last in ways:
        ways = [last, *(way for way in ways if way != last)]
    return tuple(ways[:MAX_ROUTES])


def _family(address: str) -> str:
    if address.startswith("["):
        return "6"
    host = address.rpartition(":")[0]
    return "4" if host.replace(".", "").isdigit() else "name"
