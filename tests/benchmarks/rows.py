"""What every benchmark prints and writes: rows of product against baseline, with the machine named once."""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: `ratio` is value / baseline_value."""

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    setting: str

    @property
    def ratio(self) -> float:
        return self.value / self.baseline_value


def machine() -> str:
    """The machine, in words."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{psutil.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def median(values: Sequence[float]) -> float:
    """The median; raises ValueError when nothing was measured."""
    if not values:
        raise ValueError("nothing was measured")
    return statistics.median(values)


def main(
    description: str,
    measure: Callable[[argparse.Namespace], list[Row]],
    more: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> None:
    """Parses the flags all benchmarks share and `more`, measures, prints the rows and writes them with --json."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="end within 60 s on 2 cores")
    parser.add_argument("--full", action="store_true", help="more repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    more(parser)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended then too
    rows = measure(arguments)
    print(machine())
    for row in rows:
        print(
            f"{row.name}: {row.value:.4g} {row.unit}, {row.baseline} {row.baseline_value:.4g}, ratio {row.ratio:.3f}"
            f"  [{row.setting}]"
        )
    if arguments.json is not None:
        written = [{**asdict(row), "ratio": row.ratio} for row in rows]
        written[0]["setting"] = f"{machine()}; {rows[0].setting}"  # the machine, once
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
