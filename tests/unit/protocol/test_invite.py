"""Invites: what parses, what does not and how that is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerloom.protocol import checks
from peerloom.protocol.errors import InviteError, MalformedMessage
from peerloom.protocol.invite import Invite, check_host_multiaddr, parse_invite
from peerloom.protocol.peer_id import peer_id_of, public_key_of

PEER = peer_id_of(bytes(range(32)))
RUN = "0123456789abcdef"
LINE = f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}"


@pytest.mark.parametrize(
    ("line", "protocol", "host", "port"),
    [
        (LINE, "ip4", "203.0.113.5", 4001),
        (f"/ip6/::1/tcp/1/p2p/{PEER}", "ip6", "::1", 1),
        (f"/dns4/seed.example.org/tcp/65535/p2p/{PEER}", "dns4", "seed.example.org", 65535),
        (f"/dns6/a/tcp/4001/p2p/{PEER}", "dns6", "a", 4001),
        (f"/dns/a-b.c/tcp/4001/p2p/{PEER}#{RUN}", "dns", "a-b.c", 4001),
    ],
)
def test_parses_and_round_trips(line: str, protocol: str, host: str, port: int) -> None:
    invite = parse_invite(f"  {line}\n")
    assert (invite.protocol, invite.host, invite.port, invite.peer_id) == (protocol, host, port, PEER)
    assert str(invite) == line
    assert parse_invite(str(invite)) == invite
    assert invite.run_id == (RUN if "#" in line else None)
    assert invite.multiaddr == line.partition("#")[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("hello", "does not begin with /"),
        ("/hello", "does not begin with one of /ip4"),
        ("http://example.org", "does not begin with /"),
        ("/ip4", "cut off"),
        ("/ip4/203.0.113.5", "/tcp/PORT is missing"),
        ("/ip4/203.0.113.5/", "/tcp/PORT is missing"),
        (f"/ip4/203.0.113.5/udp/4001/quic/p2p/{PEER}", "not /udp"),
        ("/ip4/203.0.113.5/tcp", "the port is missing"),
        ("/ip4/203.0.113.5/tcp/4001", "/p2p/PEER_ID is missing"),
        ("/ip4/203.0.113.5/tcp/4001/p2p", "the peer id is missing"),
        ("/ip4/203.0.113.5/tcp/4001/p2p/", "the peer id is missing"),
        (f"/ip4/203.0.113.5/tcp/4001/{PEER}", f"not /{PEER}"),
        (LINE[:-5], "it is cut off or mistyped"),
        (LINE + "x", "is no peer id"),
        ("/ip4/203.0.113.5/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "is no peer id"),
        ("/ip4/203.0.113.5/tcp/4001/p2p/0OIl", "is not base58"),
        (f"/ip4/203.0.113.256/tcp/4001/p2p/{PEER}", "no IPv4 address"),
        (f"/ip6/203.0.113.5/tcp/4001/p2p/{PEER}", "no IPv6 address"),
        (f"/ip6/fe80::1%eth0/tcp/4001/p2p/{PEER}", "no IPv6 address"),
        (f"/dns4/-bad-/tcp/4001/p2p/{PEER}", "no host name"),
        (f"/dns4/seed_1/tcp/4001/p2p/{PEER}", "seed_1 cannot be dialled, since it has a _ in it"),
        (f"/ip4/203.0.113.5/tcp/0/p2p/{PEER}", "0 is no port"),
        (f"/ip4/203.0.113.5/tcp/65536/p2p/{PEER}", "65536 is no port"),
        (f"/ip4/203.0.113.5/tcp/-1/p2p/{PEER}", "-1 is no port"),
        (f"/ip4/203.0.113.5/tcp/٤٠/p2p/{PEER}", "is no port"),
        (f'"{LINE}"', "quotes"),
        (f"<{LINE}>", "quotes or brackets"),
        (f"{LINE[:30]} {LINE[30:]}", "blanks"),
        (f"{LINE[:30]}\x1b[31m{LINE[30:]}", "blanks"),
        (f"{LINE}\n{LINE}", "blanks or line breaks"),
        (f"{LINE}/p2p-circuit", "follows the peer id"),
        (f"{LINE}#", "no run id"),
        (f"{LINE}#0123", "no run id"),
        (f"{LINE}#{RUN.upper()}", "no run id"),
        (LINE * 10, "paste one invite only"),
    ],
)
def test_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(InviteError) as caught:
        parse_invite(text)
    message = str(caught.value)
    assert says in message
    assert "it should look like /ip4/" in message
    assert message.isprintable()


@given(st.text(max_size=600))
def test_any_text_parses_or_raises_invite_error(text: str) -> None:
    try:
        invite = parse_invite(text)
    except InviteError as error:
        assert str(error).isprintable()
    else:
        assert parse_invite(str(invite)) == invite


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_holds_its_key(key: bytes) -> None:
    peer_id = peer_id_of(key)
    assert peer_id.startswith("12D3Koo")
    assert public_key_of(peer_id) == key
    assert str(parse_invite(str(Invite("/ip4/127.0.0.1/tcp/1", peer_id)))).endswith(peer_id)


def test_host_multiaddr_takes_no_peer_id() -> None:
    assert check_host_multiaddr("/dns4/seed.example.org/tcp/4001") == "/dns4/seed.example.org/tcp/4001"
    with pytest.raises(InviteError, match="follows the port"):
        check_host_multiaddr(LINE)


@pytest.mark.parametrize("protocol", ["dns", "dns4", "dns6"])
def test_a_name_that_libp2p_cannot_dial_is_in_no_multiaddr(protocol: str) -> None:
    with pytest.raises(InviteError, match="a_b.c cannot be dialled"):
        check_host_multiaddr(f"/{protocol}/a_b.c/tcp/80")
    with pytest.raises(MalformedMessage):
        checks.multiaddr(f"/{protocol}/a_b.c/tcp/80")
