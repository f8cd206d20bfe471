"""What a relay costs: exchanges and small calls through one, over the same between the same kind of ends direct.

    python -m tests.benchmarks.reach [--quick] [--full] [--json FILE]

Loopback, a process a node, each relayed one with a libp2p daemon of its own: two ends and the relay make six processes
that share the machine's cores, where over the internet each would have its own and the link be the limit. At the end
the relay in use is stopped dead, first as one that no longer answers and then as one whose process is gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import ExitStack

from peerloom.protocol.types import PeerId
from tests.benchmarks import reach_ends
from tests.benchmarks.ends import Ends
from tests.benchmarks.rows import Row, main, median

MB = 1e6
QUICK_NUMEL, NUMEL = 10_000_000, 50_000_000
QUICK_TURNS, TURNS, FULL_TURNS = 3, 5, 15
RELAYS = 3  # one in use, and one more for each that is stopped
CALLING_S = 1.0  # of calls before the relay is stopped
FAILOVER_S = 5.0
ROUNDS = 3  # a turn; the first, in which the two ends meet, is not counted


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Runs both pairs in turn."""
    numel = QUICK_NUMEL if arguments.quick else NUMEL
    turns = QUICK_TURNS if arguments.quick else FULL_TURNS if arguments.full else TURNS
    seconds: dict[str, list[float]] = {"direct": [], "relayed": []}
    calls: dict[str, list[float]] = {"direct": [], "relayed": []}
    with ExitStack() as stack:
        relays = stack.enter_context(Ends(reach_ends.relay, [()] * RELAYS))
        found = relays.answers()
        known = [(invite, peer_id) for invite, peer_id, _ in found]
        processes = {peer_id: (pid, p2pd) for (_, peer_id, p2pd), pid in zip(found, relays.pids, strict=True)}
        pairs = {
            "direct": stack.enter_context(Ends(reach_ends.direct_end, [(numel,)] * 2)),
            "relayed": stack.enter_context(Ends(reach_ends.relayed_end, [(numel, known)] * 2)),
        }
        for pair in pairs.values():
            pair.tell(pair.answers()[::-1])  # each gets the other's record
            pair.answers()
        for _ in range(turns):
            for name, pair in pairs.items():
                seconds[name] += pair.turn(ROUNDS)[0]
                pair.tell(["calls", "wait"])
                calls[name] += pair.answers()[0]
        deaths = {how: fail_over(pairs["relayed"], processes, how) for how in (signal.SIGSTOP, signal.SIGKILL)}
        return [*rows(numel, turns, seconds, calls), *failover_rows(deaths)]


def fail_over(pair: Ends, processes: dict[PeerId, tuple[int, int]], how: signal.Signals) -> float:
    """Stops the relay that the first end's calls go through; seconds until one has gone through another."""
    pair.tell(["way", "wait"])
    used = pair.answers()[0]
    pair.tell(["failover", "wait"])
    time.sleep(CALLING_S)
    began = time.monotonic()  # one clock for all processes
    for pid in processes[used]:
        os.kill(pid, how)
    try:
        return float(pair.answers()[0]) - began
    finally:
        if how == signal.SIGSTOP:  # p2pd, in a session of its own, ends with its node, if it runs
            for pid in processes[used]:
                os.kill(pid, signal.SIGCONT)


def failover_rows(deaths: dict[signal.Signals, float]) -> list[Row]:
    """The rows of the relays' deaths."""
    named = {
        signal.SIGKILL: ("relay_failover_s", "its process and its p2pd killed"),
        signal.SIGSTOP: ("relay_failover_silent_s", "they are there and say nothing any more"),
    }
    return [
        Row(
            name=named[how][0],
            value=seconds,
            unit="s from a relay's end to the next call through another",
            baseline="the most there may be",
            baseline_value=FAILOVER_S,
            setting=f"small calls one after the other; {named[how][1]}; one trial",
        )
        for how, seconds in deaths.items()
    ]


def rows(numel: int, turns: int, seconds: dict[str, list[float]], calls: dict[str, list[float]]) -> list[Row]:
    """The rows, from the seconds of each exchange and of each small call."""
    exchange = {name: median(each) for name, each in seconds.items()}
    call = {name: median(each) for name, each in calls.items()}
    both_ways = 2 * 4 * numel
    return [
        Row(
            name="relay_throughput",
            value=both_ways / MB / exchange["relayed"],
            unit="MB/s both ways together",
            baseline="direct",
            baseline_value=both_ways / MB / exchange["direct"],
            setting=f"{numel / 1e6:g} M fp32 parameters each way at once, median of {len(seconds['relayed'])} "
            f"exchanges in {turns} turns, one relay, loopback",
        ),
        Row(
            name="relay_latency_ms",
            value=1e3 * (call["relayed"] - call["direct"]),
            unit="ms more than direct",
            baseline="a direct call",
            baseline_value=1e3 * call["direct"],
            setting=f"Status, median of {len(calls['relayed'])} calls one after the other",
        ),
    ]


if __name__ == "__main__":
    main("Exchanges and calls through a relay", measure)
