"""Whether --max-upload and --max-download hold over all that a node moves, its DHT's traffic included.

    python -m tests.benchmarks.caps [--quick] [--full] [--json FILE]

A bootstrap node and three trainers, real processes, that exchange after every local step, so that the capped one has
always more to move than it may. By the kernel's count of every TCP connection of its daemon and of its libp2p daemon
(Linux alone): the most of any 5 s, over what the cap gives those. A cap of 200 KB/s, and the lowest there is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import psutil

from peerloom.node.tcp_bytes import Moved, TcpBytes
from peerloom.protocol.bucket import LEAST_CAP, WINDOW_S
from tests.benchmarks.rows import Row, main
from tests.helpers import Swarm, swarm_folder, write_run

P2PD = "p2pd"
CAP = 200_000
WATCHED_S, FULL_S, QUICK_S = 70.0, 300.0, 15.0
LOOK_S = 0.1
MODEL = {  # of the small run that the tests have: an exchange takes seconds at the cap
    "hidden_size = 32": "hidden_size = 128",
    "intermediate_size = 48": "intermediate_size = 384",
    "layers = 1": "layers = 2",
    "eval_every_rounds = 1": "eval_every_rounds = 50",
}
Look = tuple[float, Moved]


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Both caps, one after the other; the higher one alone with --quick."""
    watched_s = QUICK_S if arguments.quick else FULL_S if arguments.full else WATCHED_S
    return [row for cap in ((CAP,) if arguments.quick else (CAP, LEAST_CAP)) for row in rows(cap, watched_s)]


def rows(cap: int, watched_s: float) -> list[Row]:
    """Of one cap: both directions."""
    looks = looked(cap, watched_s)
    setting = f"most of any {WINDOW_S:g} s of {watched_s:g}; three trainers, an exchange a step; daemon and libp2p's"
    return [
        Row(
            name=f"{way}_{cap}",
            value=busiest([(at, getattr(moved, way)) for at, moved in looks]),
            unit="bytes/s",
            baseline="the cap",
            baseline_value=cap,
            setting=setting,
        )
        for way in ("sent", "received")
    ]


def looked(cap: int, watched_s: float) -> list[Look]:
    """What the capped node has moved, by time."""
    with swarm_folder() as folder:
        run = write_run(folder / "run", local_steps=1, match_timeout_s=60.0)
        text = run.read_text()
        for small, large in MODEL.items():
            assert small in text, small  # else the exchange would be over in no time
            text = text.replace(small, large)
        run.write_text(text)
        swarm = Swarm(folder, run, {"TMPDIR": str(folder / "tmp")})
        try:
            swarm.start()
            capped = swarm.join("capped", "--max-upload", str(cap), "--max-download", str(cap))
            for node in (capped, swarm.join("b"), swarm.join("c")):
                node.wait_for_rounds(1)
            return watch(capped.pid, watched_s)
        finally:
            swarm.stop()


def watch(pid: int, watched_s: float) -> list[Look]:
    """Looks at the process and its libp2p daemon."""
    children = psutil.Process(pid).children(recursive=True)
    meters = [TcpBytes(pid), *(TcpBytes(child.pid) for child in children if child.name() == P2PD)]
    assert len(meters) == 2, "one libp2p daemon"
    found, end = [], time.monotonic() + watched_s
    while (now := time.monotonic()) < end:
        moved = [meter.read() for meter in meters]
        found.append((now, Moved(sum(each.sent for each in moved), sum(each.received for each in moved))))
        time.sleep(LOOK_S)
    return found


def busiest(looks: Sequence[tuple[float, int]]) -> float:
    """The highest rate over WINDOW_S and until the next look, from cumulative bytes; 0 where there is no such time."""
    most, last = 0.0, 0
    for began, before in looks:
        while last < len(looks) and looks[last][0] < began + WINDOW_S:
            last += 1
        if last == len(looks):
            break
        ended, after = looks[last]
        most = max(most, (after - before) / (ended - began))
    return most


if __name__ == "__main__":
    main(__doc__ or "", measure)
