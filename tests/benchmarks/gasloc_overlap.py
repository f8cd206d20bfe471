"""What an exchange beneath the next local steps does to the loss: one random peer, mixed at once or some steps late."""

from __future__ import annotations

import statistics
from dataclasses import replace

from tests.benchmarks.gasloc_methods import Setting
from tests.benchmarks.gasloc_sweep import Family
from tests.benchmarks.gasloc_train import Store
from tests.benchmarks.rows import Row

SEEDS = 2
DELAYS = (4, 8)  # of 16 steps; the product allows the first
BLOCKING = tuple(
    Setting(label=f"GASLoC 1-peer H=16, {form}, 320 steps", partners="1peer", momentum=form, gamma=gamma, steps=320)
    for form, gamma in (("pre", 0.2), ("post", 0.3))
)


def late(setting: Setting, delay: int) -> Setting:
    """The same with the mixing term so many steps late."""
    return replace(setting, delay=delay, label=f"overlapped {setting.label}, {delay} steps late")


OVERLAP = tuple(
    Family(setting.label, (setting,), refine=False)
    for blocking in BLOCKING
    for setting in (blocking, *(late(blocking, delay) for delay in DELAYS))
)


def overlap_rows(store: Store) -> list[Row]:
    """Late against at once, a row a delay: the means over forms and seeds, and from where to where single runs went."""
    rows = []
    for delay in DELAYS:
        pairs = [
            (_loss(store, late(setting, delay), seed), _loss(store, setting, seed))
            for setting in BLOCKING
            for seed in range(SEEDS)
        ]
        gaps = [100 * (ours / theirs - 1) for ours, theirs in pairs]
        rows.append(
            Row(
                name=f"loss_overlap_{delay}_steps",
                value=statistics.mean(ours for ours, _ in pairs),
                unit="nats a byte",
                baseline="mixed at once",
                baseline_value=statistics.mean(theirs for _, theirs in pairs),
                setting=f"1-peer, {BLOCKING[0].workers} workers, {BLOCKING[0].steps} steps, {delay} of 16 steps late:"
                f' {min(gaps):+.1f} to {max(gaps):+.1f} % in {len(pairs)} runs, "pre" and "post", {SEEDS} seeds',
            )
        )
    return rows


def _loss(store: Store, setting: Setting, seed: int) -> float:
    result = store.get(setting, seed)
    assert result is not None  # the sweep before has run it
    return float(result["loss"])
