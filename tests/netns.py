"""Networks of network namespaces: public hosts, routers with NAT that let nothing in, links to cut and to move.

    core ── HOST (public, 5.0.N.2, or 2a00:N::2 and no IPv4)
      └──── NAT (5.0.N.2) ── HOST (192.168.N.M), several

It needs root, iproute2 and iptables (Debian's packages of those names). Nothing leads out of it. Addresses of 5.0.0.0/8
count as public, which those set aside for documentation do not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

UPNP_CHAINS = (  # as the package's own script sets them up
    ("nat", "PREROUTING", "-i", "wan"),
    ("filter", "FORWARD", "-i", "wan"),
    ("nat", "POSTROUTING", "-o", "wan"),
)
UPNP_CONFIG = """
ext_ifname=wan
listening_ip=lan
enable_upnp={upnp}
enable_natpmp=yes
secure_mode=yes
uuid=00000000-0000-0000-0000-000000000001
allow 1024-65535 0.0.0.0/0 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
lease_file={leases}
"""


def why_not() -> str:
    """Why namespaces cannot be used here; "" when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "iptables"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = f"pl{os.getpid() % 100_000}t"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    rule = ["ip", "netns", "exec", probe, "iptables", "-A", "INPUT", "-m", "conntrack", "--ctstate", "NEW"]
    ruled = subprocess.run(rule, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return f"iptables does not work here: {ruled.stderr.strip()}" if ruled.returncode else ""


def why_no_upnp() -> str:
    """Why no router here can forward ports when asked by UPnP; "" when one can."""
    for tool in ("miniupnpd", "iptables-legacy"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    about = subprocess.run(["miniupnpd", "--version"], capture_output=True, text=True, check=False).stdout
    return "" if "(iptables)" in about else "this miniupnpd is not of the package miniupnpd-iptables"


@dataclass
class Net:
    """A context manager that makes the core; hosts are added to it, and all goes at its end."""

    prefix: str = field(default_factory=lambda: f"pl{os.getpid() % 100_000}")
    _spaces: list[str] = field(default_factory=list)
    _links: int = 0
    _nats: dict[str, int] = field(default_factory=dict)  # and how many hosts are behind each
    _upnp: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Net:
        self._space("core")
        self.run("core", "sysctl", "-qw", "net.ipv4.ip_forward=1")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._upnp:
            process.terminate()
            process.wait()
        for space in reversed(self._spaces):
            subprocess.run(["ip", "netns", "del", self._name(space)], check=False, capture_output=True)

    def inside(self, host: str) -> tuple[str, ...]:
        """What to put in front of a command that shall run on a host."""
        return ("ip", "netns", "exec", self._name(host))

    def run(self, host: str, *command: str) -> None:
        """Runs a command on a host; raises with its words when it fails."""
        done = subprocess.run([*self.inside(host), *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} on {host}: {done.stderr.strip()}")

    def public(self, host: str) -> str:
        """A host that everybody can dial; returns its address."""
        self._space(host)
        return self._uplink(host)

    def public6(self, host: str) -> str:
        """A host that everybody of its kind can dial, by IPv6 alone; returns its address."""
        self._space(host)
        self.run("core", "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        self._links += 1
        near, subnet = f"c{self._links}", f"2a00:{self._links}:"
        self._veth("core", near, host, "wan")
        for side, device, address in (("core", near, f"{subnet}:1/64"), (host, "wan", f"{subnet}:2/64")):
            self.run(side, "ip", "link", "set", device, "up")
            self.run(side, "ip", "addr", "add", address, "dev", device, "nodad")
        self.run(host, "ip", "route", "add", "default", "via", f"{subnet}:1")
        return f"{subnet}:2"

    def nat(self, router: str) -> str:
        """A router that translates and lets in only what answers; returns its outer address."""
        self._space(router)
        address = self._uplink(router)
        self._nats[router] = 0
        self.run(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.run(router, "ip", "link", "add", "lan", "type", "bridge")
        self.run(router, "ip", "addr", "add", f"192.168.{self._subnet(router)}.1/24", "dev", "lan")
        self.run(router, "ip", "link", "set", "lan", "up")
        self.run(router, "iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "wan", "-j", "MASQUERADE")
        for chain in ("INPUT", "FORWARD"):
            new = ("-i", "wan", "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP")
            self.run(router, "iptables", "-A", chain, *new)
        return address

    def forwarding(self, router: str, folder: Path, *, upnp: bool = True) -> None:
        """Has a router of `nat` forward ports to those who ask by NAT-PMP, and UPnP; its files lie in `folder`."""
        for table, base, *match in UPNP_CHAINS:
            chain = "MINIUPNPD-POSTROUTING" if base == "POSTROUTING" else "MINIUPNPD"
            self.run(router, "iptables-legacy", "-t", table, "-N", chain)
            self.run(router, "iptables-legacy", "-t", table, "-I", base, *match, "-j", chain)
        forwarded = ("-i", "wan", "-m", "conntrack", "--ctstate", "DNAT", "-j", "ACCEPT")
        self.run(router, "iptables", "-I", "FORWARD", *forwarded)
        config = folder / f"{router}.conf"
        config.write_text(UPNP_CONFIG.format(leases=folder / f"{router}.leases", upnp="yes" if upnp else "no"))
        command = ("miniupnpd", "-d", "-f", str(config), "-P", str(folder / f"{router}.pid"))
        with (folder / f"{router}.log").open("wb") as log:
            process = subprocess.Popen(
                [*self.inside(router), *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self._upnp.append(process)

    def forwarded(self, router: str) -> str:
        """The rules by which a router forwards now."""
        rules = ("iptables-legacy", "-t", "nat", "-S", "MINIUPNPD")
        return subprocess.run([*self.inside(router), *rules], capture_output=True, text=True, check=True).stdout

    def behind(self, router: str, host: str) -> str:
        """A host behind a router; returns its inner address."""
        self._space(host)
        return self._plug(router, host)

    def cut(self, host: str) -> None:
        """Everything that the host sends or gets is lost from now on."""
        for chain in ("INPUT", "OUTPUT"):
            self.run(host, "iptables", "-I", chain, "!", "-i" if chain == "INPUT" else "-o", "lo", "-j", "DROP")

    def heal(self, host: str) -> None:
        """Ends a cut."""
        for chain in ("INPUT", "OUTPUT"):
            self.run(host, "iptables", "-D", chain, "!", "-i" if chain == "INPUT" else "-o", "lo", "-j", "DROP")

    def move(self, host: str, to: str) -> str:
        """Takes a host from where it is, at the core or behind a router, and puts it behind another router."""
        self.run(host, "ip", "link", "del", "wan")
        return self._plug(to, host)

    def _plug(self, router: str, host: str) -> str:
        self._nats[router] += 1
        near = f"h{self._nats[router]}"
        self._veth(router, near, host, "wan")
        self.run(router, "ip", "link", "set", near, "master", "lan", "up")
        address = f"192.168.{self._subnet(router)}.{1 + self._nats[router]}"
        self.run(host, "ip", "addr", "add", f"{address}/24", "dev", "wan")
        self.run(host, "ip", "link", "set", "wan", "up")
        self.run(host, "ip", "route", "add", "default", "via", f"192.168.{self._subnet(router)}.1")
        return address

    def _uplink(self, host: str) -> str:
        self._links += 1
        near, subnet = f"c{self._links}", f"5.0.{self._links}"
        self._veth("core", near, host, "wan")
        self.run("core", "ip", "addr", "add", f"{subnet}.1/24", "dev", near)
        self.run("core", "ip", "link", "set", near, "up")
        self.run(host, "ip", "addr", "add", f"{subnet}.2/24", "dev", "wan")
        self.run(host, "ip", "link", "set", "wan", "up")
        self.run(host, "ip", "route", "add", "default", "via", f"{subnet}.1")
        return f"{subnet}.2"

    def _veth(self, near_host: str, near: str, far_host: str, far: str) -> None:
        pair = ("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", self._name(far_host))
        self.run(near_host, *pair)

    def _subnet(self, router: str) -> int:
        return 1 + list(self._nats).index(router)

    def _space(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", self._name(name)], check=True)
        self._spaces.append(name)
        self.run(name, "ip", "link", "set", "lo", "up")

    def _name(self, host: str) -> str:
        return f"{self.prefix}{host}"
