"""Real nodes for tests: processes in sessions of their own, what they write, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from peerloom.node.http_endpoint import SERVED_AT
from peerloom.node.p2pd import remove_dead_sockets

PATIENCE_S = 120.0  # for whatever must happen sooner or later, on a machine that may be busy
HELD: set[int] = set()  # pids of peers, which are ended and looked after by whoever made them
T = TypeVar("T")
# in sessions of their own they would outlive a pytest that is killed, and train for ever: the kernel ends them with it
BOUND = ("setpriv", "--pdeathsig", "KILL") if sys.platform == "linux" and shutil.which("setpriv") else ()


def peer_command(*arguments: str) -> list[str]:
    """A `peer` command that ends when the thread that starts it does, where Linux can see to that."""
    return [*BOUND, sys.executable, "-m", "peerloom.node", *arguments]


def wait_for(what: str, look: Callable[[], T | None], seconds: float = PATIENCE_S, every_s: float = 0.1) -> T:
    """Polls `look` until it returns something true; fails with `what` when it does not in time."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(every_s)
    return found


def environment(**variables: str) -> dict[str, str]:
    """This process's, without what would configure a node."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PEER_")}
    return own | {"PYTHONUNBUFFERED": "1"} | variables


def processes_of(session: int) -> list[psutil.Process]:
    """All live processes of a node's session, and its workers, which are told its pid; zombies left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            command = process.cmdline()
            worker = str(session) in command and any(one.startswith("peerloom.node.worker.") for one in command)
            if (worker or os.getsid(process.pid) == session) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Peer:
    """One `peer` command as a process; its session is its pid, so that what it started is found when it is gone."""

    def __init__(
        self, folder: Path, name: str, *arguments: str, prefix: tuple[str, ...] = (), **variables: str
    ) -> None:
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        self.started = time.monotonic()
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self._from = self.err.stat().st_size
            self.process = subprocess.Popen(
                [*prefix, *peer_command(*arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(**variables),
                start_new_session=True,
            )
        HELD.add(self.process.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """All it wrote to stderr in this life."""
        return self.err.read_bytes()[self._from :].decode("utf-8", "replace")

    def printed(self) -> str:
        """All that this name printed to stdout."""
        return self.out.read_text()

    def wait_for(self, what: str, look: Callable[[], T | None], seconds: float = PATIENCE_S) -> T:
        """Polls, and fails at once when the process ends."""

        def alive() -> T | None:
            found = look()
            if not found and not self.running:
                raise AssertionError(f"{self.name} ended with {self.process.returncode} before: {what}\n{self.tail()}")
            return found

        try:
            return wait_for(f"{what} ({self.name})", alive, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = PATIENCE_S) -> int:
        """Signals the process itself, waits, and returns its exit code; fails when anything it started is left."""
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        self.expect_nothing_left()
        return code

    def expect_nothing_left(self) -> None:
        """Fails unless all processes of its session have ended or do so by themselves within seconds."""
        wait_for(f"no process left of {self.name}", lambda: not processes_of(self.pid), 15.0)

    def destroy(self) -> None:
        """Kills whatever is left; for the end of a fixture."""
        for process in processes_of(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(PATIENCE_S)

    def tail(self) -> str:
        return f"--- end of {self.err.name} ---\n{self.said()[-3000:]}"


class Node(Peer):
    """A `peer bootstrap` or `peer join` with its home."""

    def __init__(self, home: Path, *arguments: str, prefix: tuple[str, ...] = (), **variables: str) -> None:
        self.home = home
        common = ("--home", str(home), "--name", home.name, "--log-format", "json")
        local = () if "--listen" in arguments else ("--listen", "127.0.0.1")
        train = ("--device", "cpu", "--threads", "1")
        super().__init__(
            home.parent, home.name, *arguments, *common, *local, *train, prefix=prefix, **variables
        )

    def invite(self) -> str:
        """The best line that the node, the first of its swarm, prints for others to join by."""
        lines = self.wait_for("an invite", lambda: self.printed().splitlines(), 60.0)
        return lines[-1 if len(lines) == 1 else 0].removeprefix("peer join ")

    def messages(self) -> list[dict[str, Any]]:
        """Its log records of this life; a last line that is still being written is left out."""
        lines = self.said().split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def page(self) -> str:
        """Where it serves its page, as its log says."""

        def look() -> list[str]:
            return [line["message"] for line in self.messages() if line["message"].startswith(SERVED_AT)]

        return self.wait_for("its page", look)[-1].removeprefix(SERVED_AT)

    @property
    def run_dir(self) -> Path:
        (found,) = (self.home / "runs").iterdir()
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Its lines of metrics.jsonl, over all its lives."""
        file = next((self.home / "runs").glob("*/metrics.jsonl"), None)
        lines = file.read_text().split("\n")[:-1] if file else []
        return [event for line in lines if (event := json.loads(line))["event"] == kind]

    def rounds(self) -> list[dict[str, Any]]:
        return self.events("round")

    def wait_for_rounds(self, more: int) -> list[dict[str, Any]]:
        """Waits until it has finished `more` rounds from now on; returns these."""
        before = len(self.rounds())
        self.wait_for(f"{more} more rounds", lambda: len(self.rounds()) >= before + more)
        return self.rounds()[before:]

    def worker(self) -> psutil.Process:
        """Its training process."""

        def look() -> psutil.Process | None:
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.Error):
                    if "peerloom.node.worker.main" in child.cmdline():
                        return child
            return None

        return self.wait_for("a worker process", look)

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted((self.run_dir / "checkpoints").glob("round-*"))


class Watcher(Peer):
    """`peer status --watch --json`, its lines as they come."""

    def __init__(self, folder: Path, invite: str, prefix: tuple[str, ...] = ()) -> None:
        own = ("--home", str(folder / "watcher"), "--watch", "--json")
        super().__init__(folder, "watcher", "status", invite, *own, prefix=prefix)

    def newest(self) -> dict[str, Any] | None:
        lines = self.printed().split("\n")[:-1]
        found: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
        return found

    def wait_for_node(self, what: str, name: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Waits until the node called `name` is listed and `holds` of its row."""

        def look() -> dict[str, Any] | None:
            rows = (self.newest() or {"nodes": []})["nodes"]
            return next((row for row in rows if row["name"] == name and holds(row)), None)

        return self.wait_for(what, look)


@dataclass
class Swarm:
    """A bootstrap node and trainers of one run, by name; `trainer` starts what is not running."""

    folder: Path
    run_file: Path
    variables: dict[str, str] = field(default_factory=dict)
    started: list[Peer] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    invite: str = ""
    _watcher: Watcher | None = None

    def start(self) -> None:
        """Starts the bootstrap node."""
        seed = self.node("seed", "bootstrap", "--run", str(self.run_file))
        self.invite = seed.invite()

    def node(self, name: str, *arguments: str, **variables: str) -> Node:
        """Starts a node whose home is `folder/name`, as this swarm's nodes are started."""
        node = Node(self.folder / name, *arguments, **(self.variables | variables))
        self.started.append(node)
        self.nodes[name] = node
        return node

    def trainer(self, name: str) -> Node:
        """The running trainer of this name."""
        node = self.nodes.get(name)
        return node if node is not None and node.running else self.join(name)

    def join(self, name: str, *arguments: str, **variables: str) -> Node:
        """Starts a trainer on the run's own text."""
        data = ("--data", str(self.run_file.parent / "text"))
        return self.node(name, "join", self.invite, *data, *arguments, **variables)

    def trainers(self, *names: str) -> list[Node]:
        """Running trainers, started side by side, each past a round."""
        nodes = [self.trainer(name) for name in names]
        for node in nodes:
            node.wait_for_rounds(1)
        return nodes

    def rest(self, *but: str) -> None:
        """Stops all but these, so that they leave the machine to a test that does not need them."""
        for peer in [peer for peer in self.started if peer.running and peer.name not in but]:
            peer.end()

    def watcher(self) -> Watcher:
        """The one watcher of the swarm."""
        if self._watcher is None or not self._watcher.running:
            self._watcher = Watcher(self.folder, self.invite)
            self.started.append(self._watcher)
            self._watcher.wait_for("a first look", self._watcher.newest)
        return self._watcher

    def status(self) -> tuple[int, dict[str, Any]]:
        """Exit code and object of one `peer status --json`."""
        done = run_peer("status", self.invite, "--json", "--home", str(self.folder / "onlooker"))
        return done.returncode, json.loads(done.stdout)

    def stop(self) -> None:
        """Ends all at once; fails when one does not end well or leaves something."""
        running = [peer for peer in self.started if peer.running]
        try:
            for peer in running:
                peer.process.send_signal(signal.SIGTERM)
            codes = {peer.name: peer.process.wait(PATIENCE_S) for peer in running}
            for peer in self.started:
                peer.expect_nothing_left()
            assert not any(code for name, code in codes.items() if name != "watcher"), codes
            if any(peer.process.returncode == -signal.SIGKILL for peer in self.started):
                remove_dead_sockets(self.folder / "tmp")  # as the next node to start does
            left = [path for pattern in ("peerloom-*", "hivemind-*") for path in (self.folder / "tmp").glob(pattern)]
            assert not left, f"temporary files left: {left}"
        finally:
            for peer in self.started:
                peer.destroy()


def run_peer(*arguments: str, timeout_s: float = PATIENCE_S, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs one `peer` command to its end; fails when a process of its session is left."""
    with subprocess.Popen(
        peer_command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    wait_for(f"nothing left of peer {arguments[0]}", lambda: not processes_of(process.pid), 15.0)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def sentence(done: subprocess.CompletedProcess[str], code: int) -> str:
    """What a failed command told its user: the one sentence on stderr beside the log's JSON lines, no traceback."""
    assert done.returncode == code, f"exit code {done.returncode}, not {code}: {done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    told = [line for line in done.stderr.splitlines() if line and not line.startswith("{")]
    assert len(told) == 1, told
    assert told[0].startswith("peer: ")
    return told[0].removeprefix("peer: ")


@contextlib.contextmanager
def swarm_folder() -> Iterator[Path]:
    """A folder with a short name (libp2p's socket has to fit in 108 characters), with the temporary files in `tmp`."""
    folder = Path(tempfile.mkdtemp(prefix="plt-"))
    try:
        (folder / "tmp").mkdir()
        yield folder
    finally:
        shutil.rmtree(folder)


def write_run(
    folder: Path,
    *,
    pairing: str = "rendezvous",
    local_steps: int = 4,
    match_timeout_s: float = 3.0,
    **gasloc: object,
) -> Path:
    """A run.toml of a run so small that a step takes milliseconds, and its text; returns the file's path.

    `gasloc` holds further keys of its table.
    """
    words = "the of and to in is was he for it with as his on be at by had not are but from or have".split()
    text = folder / "text"
    text.mkdir(parents=True)
    for number in range(60):
        (text / f"{number:03}.txt").write_text(" ".join(words[(number * i + i * i) % len(words)] for i in range(300)))
    run = folder / "run.toml"
    run.write_text(f"""
name = "tiny"
[model]
hidden_size = 32
intermediate_size = 48
layers = 1
heads = 2
kv_heads = 2
[data]
source = {json.dumps(str(text))}
sequence_length = 32
held_out = 0.2
[train]
batch_size = 2
warmup_steps = 10
total_steps = 100000
eval_batches = 2
eval_every_rounds = 1
[gasloc]
local_steps = {local_steps}
pairing = "{pairing}"
match_timeout_s = {match_timeout_s}
max_round_skew = 1000000
""")
    with run.open("a") as file:
        file.writelines(f"{key} = {json.dumps(value)}\n" for key, value in gasloc.items())
    return run
