"""What the measured costs would give on 16 to 64 ranks, beside the paper's tables: a model, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from peerloom.optim.matrix_fsdp import plan_owners
from peerloom.optim.matrix_fsdp.planner import Shape
from tests.benchmarks.matrix_fsdp_model import Size

PAPER = {8: 4.2, 16: 14.5, 32: 34.0, 64: 54.6}  # optimizer step, stock / ours; blocks grow with the ranks
BLOCKS_A_RANK = 2  # the paper's: 16 blocks on 8 ranks, 128 on 64
ASSUMPTIONS = """assumptions: a core a rank; Newton-Schulz as measured here, the same on every rank; each gather is an
all-gather of one matrix with the latency and the bandwidth a rank that were measured here on 4 ranks of loopback, its
latency growing with the ranks - 1 (a ring); FSDP2's ranks each orthogonalize every matrix; two blocks a rank as in the
paper, whose figures are of A100s over InfiniBand with matrices 16 times wider; AdamW left out on both sides"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Seconds of one optimizer step."""

    ranks: int
    stock_s: float
    orthogonalizing_s: float  # the part of stock_s that is no gathering
    ours_s: float
    gamma: float

    @property
    def ratio(self) -> float:
        return self.stock_s / self.ours_s

    @property
    def compute_ratio(self) -> float:
        """With gathering for nothing: the ranks over the imbalance of the plan."""
        return self.orthogonalizing_s / self.ours_s


def simulate(ranks: int, size: Size, costs: dict[str, float]) -> Simulated:
    """One number of ranks, from the costs that the ranks of the benchmark measured."""
    matrices: dict[str, Shape] = {name: (size.width, size.width) for name in "qkvo"}
    matrices |= {"gate": (size.mlp, size.width), "up": (size.mlp, size.width), "down": (size.width, size.mlp)}
    units = {
        str(block): {f"{block}.{name}": shape for name, shape in matrices.items()}
        for block in range(BLOCKS_A_RANK * ranks)
    }
    plan = plan_owners(units, ranks, cost="newton_schulz")
    loads = [0.0] * ranks
    gathers = 0.0
    for unit in plan.units:
        for role in unit.roles:
            (name,) = role.names
            loads[role.owner] += costs[f"ns_{max(unit.shapes[name])}"]
            gathers += _gather_s(4 * role.numel, ranks, costs)
    gamma = max(unit.gamma for unit in plan.units)
    return Simulated(
        ranks=ranks, stock_s=sum(loads) + gathers, orthogonalizing_s=sum(loads), ours_s=max(loads), gamma=gamma
    )


def table(size: Size, costs: dict[str, float]) -> str:
    """The simulated ratios beside the paper's, and what they rest on."""
    head = "ranks blocks  stock ms   ours ms  ratio  without gathers  paper  gamma"
    lines = ["simulated optimizer step, not measured:", head]
    for ranks, paper in PAPER.items():
        found = simulate(ranks, size, costs)
        lines.append(
            f"{ranks:>5} {BLOCKS_A_RANK * ranks:>6} {found.stock_s * 1e3:>9.1f} {found.ours_s * 1e3:>9.1f} "
            f"{found.ratio:>6.1f} {found.compute_ratio:>16.1f} {paper:>6.1f} {found.gamma:>6.2f}"
        )
    return "\n".join([*lines, ASSUMPTIONS])


def _gather_s(matrix_bytes: int, ranks: int, costs: dict[str, float]) -> float:
    """Latency and bandwidth from two measured all-gathers on four ranks."""
    small_s, large_s = costs["gather_small_s"], costs["gather_large_s"]
    small_bytes, large_bytes = costs["gather_small_bytes"], costs["gather_large_bytes"]
    per_byte = max(large_s - small_s, 0.0) / (large_bytes - small_bytes)
    return small_s * (ranks - 1) / 3 + per_byte * matrix_bytes * (ranks - 1) / ranks
