"""How fast two nodes exchange their parameters: against a bare grpc stream, and against hivemind's averager.

    python -m tests.benchmarks.exchange [--quick] [--full] [--json FILE]

Two processes on loopback with TLS hold parameters in a worker's shared memory and go through GossipMachine,
GossipDriver and GrpcTransport, without training. All pairs live at once and take turns; the others are idle then.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from peerloom.protocol.types import Encoding
from tests.benchmarks import exchange_ends
from tests.benchmarks.ends import Ends
from tests.benchmarks.rows import Row, main, median

MB = 1e6
QUICK_NUMEL, NUMEL = 25_000_000, 100_000_000
ENCODINGS: tuple[Encoding, ...] = ("fp32", "bf16", "int8")
QUICK_TURNS, TURNS, FULL_TURNS = 3, 5, 15
ROUNDS = 3  # a turn; the first, in which the two ends meet, is not counted


def product_pair(stack: ExitStack, numel: int, encoding: Encoding) -> tuple[Ends, list[int]]:
    """Two nodes that have exchanged once, and each one's peak extra memory in that exchange, in bytes."""
    ends = stack.enter_context(Ends(exchange_ends.product, [(numel, encoding)] * 2))
    ends.tell(ends.answers()[::-1])  # each gets the other's record
    ends.answers()
    return ends, ends.turn("measure memory")


def bare_pair(stack: ExitStack) -> Callable[[int, int], list[Any]]:
    """Turns of bare grpc, a call a round: (bytes each way, rounds)."""
    server = stack.enter_context(Ends(exchange_ends.bare_server, [()]))
    client = stack.enter_context(Ends(exchange_ends.bare_client, [()]))
    client.tell(server.answers())

    def turn(payload_bytes: int, rounds: int) -> list[Any]:
        client.tell([payload_bytes])
        return client.turn(rounds)

    return turn


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
    pairs: dict[str, Callable[[int], list[Any]]] = {}
    peaks: dict[str, int] = {}
    with ExitStack() as stack:
        bare = bare_pair(stack)
        for encoding in ENCODINGS:
            ends, each = product_pair(stack, numel, encoding)
            pairs[encoding], peaks[encoding] = ends.turn, max(each)
            pairs[bare_of(encoding)] = partial(bare, payload_bytes(numel, encoding))
        pairs["hivemind"] = hivemind_pair(stack, numel)
        for _ in range(turns):
            for name, turn in pairs.items():
                seconds.setdefault(name, []).extend(turn(ROUNDS)[0])
    return rows(numel, {name: median(each) for name, each in seconds.items()}, peaks["fp32"], turns)


def bare_of(encoding: Encoding) -> str:
    """The name of the bare pair that moves as many bytes."""
    return f"grpc, {encoding}"


def payload_bytes(numel: int, encoding: Encoding) -> int:
    """How many bytes each end sends."""
    return len(exchange_ends.encoded(numel, encoding))


def rows(numel: int, seconds: dict[str, float], peak_bytes: int, turns: int) -> list[Row]:
    """The rows, from median seconds a round by pair, and the larger peak of the two ends."""
    setting = (
        f"two processes, {numel / 1e6:g} M parameters each way at once, loopback, TLS, median of "
        f"{turns * (ROUNDS - 1)} exchanges in {turns} turns, from the end of one exchange to the end of the next"
    )
    against_hivemind = (
        f"{setting}; DecentralizedAverager, no compression, timed from the trigger, matchmaking left out"
    )
    fp32, bf16, int8 = (_against_grpc(numel, encoding, seconds, setting) for encoding in ENCODINGS)
    return [
        fp32,
        _rate("fp32_vs_hivemind", 2 * payload_bytes(numel, "fp32"), seconds, "fp32", "hivemind", against_hivemind),
        bf16,
        int8,
        Row(
            name="peak_copies",
            value=peak_bytes / payload_bytes(numel, "fp32"),
            unit="model copies",
            baseline="one copy",
            baseline_value=1.0,
            setting="peak of the daemon's resident memory in its first fp32 exchange, the inbox included, over before",
        ),
    ]


def _against_grpc(numel: int, encoding: Encoding, seconds: dict[str, float], setting: str) -> Row:
    size = payload_bytes(numel, encoding)
    compared = f"{setting}; {size / MB:.1f} MB of {encoding} each way against a bare grpc.aio stream of as many bytes"
    name = f"{encoding}_vs_grpc"
    return _rate(name, 2 * size, seconds, encoding, bare_of(encoding), f"{compared} in 1 MiB messages")


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
