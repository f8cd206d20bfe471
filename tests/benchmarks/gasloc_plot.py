"""The plot of the sweep: final loss against bytes, and loss against tokens. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.gasloc_methods import Setting
from tests.benchmarks.gasloc_train import Result

Best = tuple[Setting, list[Result]]

TICKS = (10, 20, 50, 100, 200, 500)  # MB


def plot(best: Sequence[Best], numel: int, tokens_per_step: int, path: Path) -> bool:
    """Writes the PNG; False, with nothing written, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6), constrained_layout=True)
    colours = [*pyplot.get_cmap("tab20").colors, *pyplot.get_cmap("tab20b").colors]
    for k, (setting, results) in enumerate(best):
        losses = [result["loss"] for result in results]
        colour, marker = colours[k % len(colours)], "o" if setting.label.startswith("GASLoC") else "s"
        megabytes = results[0]["copies"] * numel * 4 / 1e6
        mean = sum(losses) / len(losses)
        spread = [[mean - min(losses)], [max(losses) - mean]]
        if megabytes:
            left.errorbar(megabytes, mean, spread, color=colour, marker=marker, capsize=3, label=setting.label)
        else:
            left.axhline(mean, color=colour, linestyle=":", label=setting.label)
        steps, curve = zip(*results[0]["curve"], strict=True)
        right.plot([step * tokens_per_step / 1e6 for step in steps], curve, color=colour, label=setting.label)
    left.set(xscale="log", xlabel="MB sent a worker, fp32", ylabel="held-out loss of the average, nats a byte")
    left.set_xticks(TICKS, labels=[str(tick) for tick in TICKS])
    left.minorticks_off()
    right.set(xlabel="million tokens, all workers", ylabel="held-out loss of the average", ylim=_limits(best))
    left.legend(fontsize=6)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _limits(best: Sequence[Best]) -> tuple[float, float]:
    losses = [result["loss"] for _, results in best for result in results]
    return min(losses) - 0.05, min(losses) + 1.0
