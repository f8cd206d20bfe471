"""How fast two nodes exchange their parameters: against a bare grpc stream, and against hivemind's averager.

    python -m tests.benchmarks.exchange [--quick] [--full] [--json FILE]

Two processes on loopback with TLS hold parameters in a worker's shared memory and go through GossipMachine,
GossipDriver and GrpcTransport, without training. All pairs live at once and take turns; the others are idle then.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from peerloom.protocol.types import Encoding
from tests.benchmarks import exchange_ends
from tests.benchmarks.ends import Ends
from tests.benchmarks.rows import Row, main, median

MB = 1e6
QUICK_NUMEL, NUMEL = 25_000_000, 100_000_000
QUICK_TURNS, TURNS, FULL_TURNS = 3, 5, 15
ROUNDS = 3  # a turn; the first, in which the two ends meet, is not counted


def product_pair(stack: ExitStack, numel: int, encoding: Encoding) -> tuple[Ends, list[int]]:
    """Two nodes that have exchanged once, and each one's peak extra memory in that exchange, in bytes."""
    ends = stack.enter_context(Ends(exchange_ends.product, [(numel, encoding)] * 2))
    ends.tell(ends.answers()[::-1])  # each gets the other's record
    ends.answers()
    return ends, ends.turn("measure memory")


def bare_pair(stack: ExitStack, payload_bytes: int) -> Callable[[int], list[Any]]:
    """A turn of bare grpc: a server and a client, a call a round."""
    server = stack.enter_context(Ends(exchange_ends.bare_server, [(payload_bytes,)]))
    client = stack.enter_context(Ends(exchange_ends.bare_client, [(payload_bytes,)]))
    client.tell(server.answers())
    return client.turn


def hivemind_pair(stack: ExitStack, numel: int) -> Callable[[int], list[Any]]:
    """A turn of hivemind: two averagers in one group."""
    ends = stack.enter_context(Ends(exchange_ends.hivemind_pair, [(numel,)]))
    ends.answers()
    return ends.turn


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Runs all pairs in turn."""
    numel = QUICK_NUMEL if arguments.quick else NUMEL
    turns = QUICK_TURNS if arguments.quick else FULL_TURNS if arguments.full else TURNS
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        fp32, peaks = product_pair(stack, numel, "fp32")
        bf16, _ = product_pair(stack, numel, "bf16")
        pairs = {
            "fp32": fp32.turn,
            "grpc": bare_pair(stack, 4 * numel),
            "bf16": bf16.turn,
            "grpc, half": bare_pair(stack, 2 * numel),
            "hivemind": hivemind_pair(stack, numel),
        }
        for _ in range(turns):
            for name, turn in pairs.items():
                seconds.setdefault(name, []).extend(turn(ROUNDS)[0])
    return rows(numel, {name: median(each) for name, each in seconds.items()}, max(peaks), turns)


def rows(numel: int, seconds: dict[str, float], peak_bytes: int, turns: int) -> list[Row]:
    """The rows, from median seconds a round by pair, and the larger peak of the two ends."""
    copy = 4 * numel
    setting = (
        f"two processes, {numel / 1e6:g} M parameters each way at once, loopback, TLS, median of "
        f"{turns * (ROUNDS - 1)} exchanges in {turns} turns, from the end of one exchange to the end of the next"
    )
    return [
        _rate("fp32_vs_grpc", 2 * copy, seconds, "fp32", "grpc", f"{setting}; bare grpc.aio, 1 MiB messages"),
        _rate(
            "fp32_vs_hivemind",
            2 * copy,
            seconds,
            "fp32",
            "hivemind",
            f"{setting}; DecentralizedAverager, no compression, timed from the trigger, matchmaking left out",
        ),
        _rate("bf16_vs_grpc", copy, seconds, "bf16", "grpc, half", f"{setting}; bare grpc.aio, 1 MiB messages"),
        Row(
            name="peak_copies",
            value=peak_bytes / copy,
            unit="model copies",
            baseline="one copy",
            baseline_value=1.0,
            setting="peak of the daemon's resident memory in its first fp32 exchange, the inbox included, over before",
        ),
    ]


def _rate(name: str, both_ways: int, seconds: dict[str, float], ours: str, theirs: str, setting: str) -> Row:
    return Row(
        name=name,
        value=both_ways / MB / seconds[ours],
        unit="MB/s both ways together",
        baseline=theirs.split(",")[0],
        baseline_value=both_ways / MB / seconds[theirs],
        setting=setting,
    )


if __name__ == "__main__":
    main("Exchange of parameters between two nodes", measure)
