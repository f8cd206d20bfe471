"""The plots: of a sweep its losses with and without delay and its slowdowns; of all sweeps the slowdowns by size and
length. They need matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from tests.benchmarks.basis_rotation_sweep import MEAN_OF, Curves, Outcome
from tests.benchmarks.basis_rotation_train import Kind, smoothed


def plot(curves: Curves, found: Sequence[Outcome], seeds: Sequence[int], target: float, path: Path) -> bool:
    """Writes the PNG; False, with nothing written, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    plan = curves.plan
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6), constrained_layout=True, width_ratios=(3, 2))
    kinds = list(dict.fromkeys(best.kind for best in found))
    colours = dict(zip(kinds, pyplot.get_cmap("tab10").colors, strict=False))
    for best in found:
        rows = [curves.get(best.kind, best.lr, best.depth, seed) for seed in seeds]
        losses = [mean(each) for each in zip(*(smoothed(row, MEAN_OF) for row in rows if row), strict=True)]
        steps = [k * plan.eval_every for k in range(len(losses))]
        label = best.kind if best.depth > 1 else None
        style = "-" if best.depth > 1 else ":"
        left.plot(steps, losses, style, color=colours[best.kind], label=label, linewidth=1.2)
    left.axhline(target, color="black", linewidth=0.8)
    left.set(
        xlabel="steps", ylabel="held-out loss, nats a byte", ylim=(None, 3.2),
        title=f"delays of P = {plan.depth} (lines) and none (dots), best rates, mean of {len(seeds)} seeds",
    )  # fmt: skip
    left.legend(fontsize=8)
    ratios = {}
    for kind in kinds:
        alone = next((best.steps for best in found if best.kind == kind and best.depth == 1), None)
        late = next((best for best in found if best.kind == kind and best.depth == plan.depth), None)
        if alone is not None and late is not None:
            ratios[kind] = ((plan.steps if late.steps is None else late.steps) / alone, late.steps is not None)
    names = sorted(ratios, key=lambda kind: ratios[kind][0])
    right.margins(x=0.2)
    bars = right.barh(names, [ratios[kind][0] for kind in names], color=[colours[kind] for kind in names])
    right.bar_label(bars, [f"{ratios[kind][0]:.2f}" + ("" if ratios[kind][1] else " or more") for kind in names])
    right.set(xlabel=f"steps to {target:.2f} over the method's own without delay", title="slowdown")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def plot_trends(found: Sequence[tuple[int, int, dict[Kind, float]]], path: Path) -> bool:
    """Slowdowns by (parameters, steps); False, with nothing written, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), constrained_layout=True, sharey=True)
    for axis, (by, other, name) in zip(axes, ((0, 1, "parameters"), (1, 0, "steps")), strict=True):
        shared = Counter(each[other] for each in found).most_common(1)[0][0]
        row = sorted(each for each in found if each[other] == shared)
        for kind in dict.fromkeys(kind for _, _, ratios in row for kind in ratios):
            points = [(each[by], each[2][kind]) for each in row if kind in each[2]]
            axis.plot(*zip(*points, strict=True), "o-", label=kind)
        axis.axhline(1.3, color="black", linewidth=0.8, linestyle=":")
        title = f"{shared:,} {'steps' if by == 0 else 'parameters'}"
        axis.set(xlabel=name, ylabel="slowdown", xscale="log", title=title)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
