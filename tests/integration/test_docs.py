"""What README and deploy/README tell people to type, typed: see `tests/docs.py` for which test runs what."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from peerloom.node.failures import DEGRADED, OK
from peerloom.node.http_endpoint import SERVED_AT
from tests.docs import ROOT, RUN, STEPS, blocks, section
from tests.helpers import PATIENCE_S, Node, Peer, Swarm, environment, run_peer, swarm_folder, wait_for, write_run
from tests.netns import Net, why_not

pytestmark = pytest.mark.slow
WHY_NOT = why_not()
START_S = 240.0  # text is tokenized, five processes start at once


def words(command: str, **instead: str) -> list[str]:
    """A command of the docs, which must be in them, with a user's own values for what stands for them."""
    assert command in RUN, f"{command}: not in the docs"
    typed = command
    for placeholder, value in instead.items():
        typed = re.sub(rf"\b{placeholder}\b", value, typed)
    return shlex.split(typed)


class Here:
    """A machine with nothing on it but a checkout: a network of its own, an empty home, /tmp in a folder."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.folder, self.inside = folder, net.inside("user")
        self.variables = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        self.started: list[Peer] = []
        net.public("user")
        (folder / "home").mkdir()

    def typed(self, line: str, invite: str = "") -> list[str]:
        """A line of README as words."""
        return [word.replace("/tmp/", f"{self.folder}/") for word in words(line, **{"INVITE": invite})]

    def peer(self, name: str, line: str, invite: str = "") -> Peer:
        """Starts a `peer` command in a terminal of its own."""
        command = self.typed(line, invite)
        peer = Peer(self.folder, name, *command[1:], prefix=self.inside, **self.variables)
        self.started.append(peer)
        return peer

    def get(self, url: str) -> str:
        """What is at an address, looked up on that machine; "" when nothing answers."""
        code = "import sys, urllib.request as r; sys.stdout.write(r.urlopen(sys.argv[1], timeout=20).read().decode())"
        done = subprocess.run([*self.inside, sys.executable, "-c", code, url], capture_output=True, text=True)
        return done.stdout

    def look(self, url: str) -> Any:
        """A JSON object at an address; None when nothing answers."""
        text = self.get(url)
        return json.loads(text) if text else None


@contextlib.contextmanager
def ending(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Ends it at the end, if it has not ended by itself."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(PATIENCE_S)


def watch_in_a_terminal(command: list[str], variables: dict[str, str], shows: Callable[[str], bool]) -> int:
    """Runs a full-screen command on a terminal until it shows what is wanted, types q, and returns its exit code."""
    own, its = pty.openpty()
    try:
        process = subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, start_new_session=True,
            env=environment(TERM="xterm", COLUMNS="100", LINES="30", **variables),
        )  # fmt: skip
        with ending(process):
            seen = [""]

            def look() -> bool:
                while select.select([own], [], [], 0.1)[0]:
                    seen[0] += os.read(own, 65_536).decode(errors="replace")
                assert process.poll() is None, seen[0][-2000:]
                return shows(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen[0])[-20_000:])

            wait_for("what the screen is to show", look, START_S)
            os.write(own, b"q")

            def ended() -> bool:
                if select.select([own], [], [], 0.1)[0]:
                    os.read(own, 65_536)  # what it draws last must have a reader
                return process.poll() is not None

            wait_for("the end of a watch that q ends", ended)
            return process.returncode
    finally:
        os.close(own)
        os.close(its)


@pytest.mark.long
@pytest.mark.netns
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "network namespaces work here")
def test_readme_alone_brings_up_a_swarm_its_page_and_prometheus() -> None:
    steps, (export,) = blocks(section(STEPS))
    bootstrap, *joins, status, prometheus = steps
    assert len(joins) == 2
    with Net() as net, swarm_folder() as folder:
        here = Here(net, folder)
        try:
            seed = here.peer("terminal-1", bootstrap)
            invite = seed.wait_for("the line to join by", lambda: seed.printed().splitlines(), START_S)[0]
            invite = invite.removeprefix("peer join ")
            nodes = [here.peer(f"terminal-{number}", line, invite) for number, line in enumerate(joins, 2)]
            command = here.typed(status, invite)[1:]
            code = watch_in_a_terminal(
                [*here.inside, sys.executable, "-m", "peerloom.node", *command],
                here.variables,
                lambda screen: "2 of 2 training" in screen,
            )
            assert code == OK
            assert "<title>" in here.get("http://127.0.0.1:9464/")
            for port in (9464, 9465, 9466):
                wait_for(f"both on the page at {port}", lambda port=port: _trains(here, port), START_S)
            if shutil.which("prometheus") is not None:
                _prometheus(here, prometheus)
            nodes[0].wait_for("a checkpoint", lambda: list(folder.glob("a/runs/*/checkpoints/round-*")), START_S)
            out = folder / "model"
            done = run_peer(*here.typed(export)[1:-1], str(out), **here.variables)
            assert done.returncode == OK and list(out.glob("*.safetensors")), done.stderr
            for node in (*nodes, seed):
                assert node.end(signal.SIGINT) == OK, node.tail()
        finally:
            for peer in here.started:
                peer.destroy()


def _trains(here: Here, port: int) -> bool:
    told = here.look(f"http://127.0.0.1:{port}/status.json")
    return bool(told) and told["totals"]["training"] == 2


def _prometheus(here: Here, line: str) -> None:
    with (here.folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*here.inside, *here.typed(line)], cwd=ROOT, stdout=log, stderr=log)

    def three_are_up() -> bool:
        told = here.look('http://127.0.0.1:9090/api/v1/query?query=count(up==1)')
        assert process.poll() is None, (here.folder / "prometheus.log").read_text()[-2000:]
        return bool(told) and [sample["value"][1] for sample in told["data"]["result"]] == ["3"]

    with ending(process):
        wait_for("three nodes that Prometheus reads", three_are_up)
        groups = here.look("http://127.0.0.1:9090/api/v1/rules")["data"]["groups"]
        assert groups and not [r["lastError"] for g in groups for r in g["rules"] if r.get("lastError")]


@pytest.mark.long
def test_a_run_of_ones_own(swarm: Swarm) -> None:
    swarm.rest("seed")
    with swarm_folder() as folder:
        run = folder / "run.toml"
        instead = {"run.toml": str(run)}
        assert run_peer(*words("peer run init run.toml", **instead)[1:]).returncode == OK
        checked = run_peer(*words("peer run check run.toml", **instead)[1:])
        assert checked.returncode == OK, checked.stderr
        tiny = write_run(folder / "tiny")
        instead = {"run.toml": str(tiny), "HOME": str(folder / "b")}
        variables = {"TMPDIR": str(folder / "tmp"), "PEER_CHECKPOINT_EVERY_S": "1", "PEER_LISTEN": "127.0.0.1"}
        variables |= {"PEER_HTTP": "none", "PEER_LOG_FORMAT": "json"}
        bootstrap = words("peer bootstrap --run run.toml", **instead)[1:]
        seed = Peer(folder, "seed", *bootstrap, PEER_HOME=str(folder / "s"), **variables)
        alone = words("peer join --run run.toml --home HOME", **instead)[1:]
        last: Peer | None = None
        try:
            invite = seed.wait_for("its invite", lambda: seed.printed().splitlines())[0].split()[-1]
            first = Node(folder / "b", "join", invite, "--run", str(tiny), **variables)
            try:
                first.wait_for_rounds(2)
                assert first.end() == OK and seed.end() == OK
            finally:
                first.destroy()
            saved = int(first.checkpoints()[-1].name.removeprefix("round-"))
            last = Peer(folder, "last", *alone, **variables)  # every home is lost but this one
            last.wait_for("an invite for the others", lambda: "peer join /ip4/" in last.printed())
            last.wait_for("rounds after the saved ones", lambda: first.rounds()[-1]["round"] > saved)
            assert saved > 0 and last.end() == OK
        finally:
            for peer in (seed, last):
                if peer is not None:
                    peer.destroy()


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in held]


@pytest.mark.long
def test_what_operators_type(swarm: Swarm) -> None:
    (a,) = swarm.trainers("a")
    home = ("--home", str(swarm.folder / "operator"))
    for command in ("peer doctor INVITE", "peer doctor"):
        done = run_peer(*words(command, INVITE=swarm.invite)[1:], *home, "--no-benchmark", **swarm.variables)
        assert done.returncode == OK and "clock" in done.stdout, done.stdout + done.stderr
    for command in ("peer status INVITE", "peer status INVITE --json"):
        done = run_peer(*words(command, INVITE=swarm.invite)[1:], *home)
        assert done.returncode in (OK, DEGRADED) and a.name in done.stdout, done.stderr
    for command in ("peer status", "peer status --json"):  # without an invite: of the swarm that this home was in
        done = run_peer(*words(command)[1:], "--home", str(a.home))
        assert done.returncode in (OK, DEGRADED) and a.name in done.stdout, done.stderr
    _under_the_unit(swarm)
    with swarm_folder() as folder:
        _move_a_key(folder)


def _under_the_unit(swarm: Swarm) -> None:
    """A node as systemd would start it: the unit's environment, the file of invites, fixed ports."""
    env = swarm.folder / "peerloom.env"
    (line,) = [command for command in RUN if command.startswith("echo ")]
    typed = line.replace("INVITE", swarm.invite).replace("/etc/peerloom.env", str(env))
    subprocess.run(["bash", "-c", typed], check=True)
    unit = (ROOT / "deploy/peerloom.service").read_text()
    (own,) = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
    variables = dict(pair.split("=", 1) for pair in [*own.split(), *env.read_text().split()])
    variables |= {"PEER_HOME": str(swarm.folder / "unit"), "PEER_DATA": str(swarm.run_file.parent / "text")}
    curves = swarm.folder / "curves"
    variables |= {"PEER_LISTEN": "127.0.0.1", "PEER_THREADS": "1", "PEER_TENSORBOARD": str(curves)}
    (start,) = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)
    dht, grpc = free_ports(2)
    command = "peer join INVITE --port 4001 --grpc-port 4002"
    ports = words(command, INVITE="", **{"4001": dht, "4002": grpc})[2:]
    node = Peer(swarm.folder, "unit-out", *shlex.split(start), *ports, **(swarm.variables | variables))
    try:
        runs = swarm.folder / "unit/runs"
        node.wait_for("a round", lambda: any('"round"' in each.read_text() for each in runs.glob("*/metrics.jsonl")))
        sockets = psutil.Process(node.pid).net_connections("tcp")
        assert int(grpc) in {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}
        node.wait_for("curves for TensorBoard", lambda: list(curves.glob("events.out.*")))
        assert node.end() == OK
    finally:
        node.destroy()


def _move_a_key(folder: Path) -> None:
    """The owner of a run moves to another machine: same run, same key, same peer id."""
    old, new, backup = folder / "old", folder / "new", folder / "backup"
    run = write_run(folder / "run")
    backup.mkdir()
    new.mkdir(mode=0o700)
    variables = {"TMPDIR": str(folder / "tmp"), "PEER_LISTEN": "127.0.0.1", "PEER_HTTP": "none"}

    def bootstrap(home: Path) -> str:
        dht, grpc = free_ports(2)
        command = "peer bootstrap --run run.toml --home /var/lib/peerloom --port 4001 --grpc-port 4002"
        typed = words(command, **{"run.toml": str(run), "4001": dht, "4002": grpc})
        typed = [word.replace("/var/lib/peerloom", str(home)) for word in typed]
        node = Peer(folder, home.name, *typed[1:], **variables)
        try:
            line = node.wait_for("its invite", lambda: node.printed().splitlines())[0]
            assert f"/tcp/{dht}/" in line
            assert node.end() == OK
            assert SERVED_AT not in node.said(), "PEER_HTTP=none"
            return line.rpartition("/p2p/")[2]
        finally:
            node.destroy()

    before = bootstrap(old)
    command = "install -m 600 /var/lib/peerloom/identity.key /mnt/backup/identity.key"
    for begin, end in ((old, backup), (backup, new)):
        typed = command.replace("/var/lib/peerloom", str(begin)).replace("/mnt/backup", str(end))
        subprocess.run(shlex.split(typed), check=True)
    assert bootstrap(new) == before, "peer id and run are those of the old invite"


@pytest.mark.long
@pytest.mark.parametrize("method", ["seedflow", "pipeline"])
def test_the_demo_of_each_method_starts_shows_its_page_and_stops(swarm: Swarm, method: str) -> None:
    swarm.rest("seed")
    with swarm_folder() as folder:
        figures = folder / "figures.json"
        command = [*words(f"peer demo --method {method}")[1:], *words("peer demo --json FILE", FILE=str(figures))[2:]]
        nodes = {"seedflow": "2", "pipeline": "4"}[method]
        demo = Peer(folder, "demo", *command, "--nodes", nodes, "--minutes", "10", TMPDIR=str(folder / "tmp"))
        try:
            told = re.compile(r"in a browser while it runs: (http://127.0.0.1:\d+/)")
            url = demo.wait_for("where its page is", lambda: told.search(demo.printed()), START_S)[1]
            with urllib.request.urlopen(url + "status.json", timeout=30) as answer:
                assert json.loads(answer.read())["run"]["method"] == method
            demo.wait_for("its nodes", lambda: f"of {nodes} training" in demo.printed(), START_S)
            assert demo.end(signal.SIGINT) == OK
            found = json.loads(figures.read_text())
            assert found["interrupted"] and found["method"] == method
        finally:
            demo.destroy()
