"""What a relay costs: exchanges and small calls through one, over the same between the same kind of ends direct.

    python -m tests.benchmarks.reach [--quick] [--full] [--json FILE]

Loopback, a process a node, each relayed one with a libp2p daemon of its own: two ends and the relay make six processes
that share the machine's cores, where over the internet each would have its own and the link be the limit.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from tests.benchmarks import reach_ends
from tests.benchmarks.ends import Ends
from tests.benchmarks.rows import Row, main, median

MB = 1e6
QUICK_NUMEL, NUMEL = 10_000_000, 50_000_000
QUICK_TURNS, TURNS, FULL_TURNS = 3, 5, 15
ROUNDS = 3  # a turn; the first, in which the two ends meet, is not counted


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Runs both pairs in turn."""
    numel = QUICK_NUMEL if arguments.quick else NUMEL
    turns = QUICK_TURNS if arguments.quick else FULL_TURNS if arguments.full else TURNS
    seconds: dict[str, list[float]] = {"direct": [], "relayed": []}
    calls: dict[str, list[float]] = {"direct": [], "relayed": []}
    with ExitStack() as stack:
        relay = stack.enter_context(Ends(reach_ends.relay, [()]))
        (invite, peer_id) = relay.answers()[0]
        pairs = {
            "direct": stack.enter_context(Ends(reach_ends.direct_end, [(numel,)] * 2)),
            "relayed": stack.enter_context(Ends(reach_ends.relayed_end, [(numel, invite, peer_id)] * 2)),
        }
        for pair in pairs.values():
            pair.tell(pair.answers()[::-1])  # each gets the other's record
            pair.answers()
        for _ in range(turns):
            for name, pair in pairs.items():
                seconds[name] += pair.turn(ROUNDS)[0]
                pair.tell(["calls", "wait"])
                calls[name] += pair.answers()[0]
    return rows(numel, turns, seconds, calls)


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
