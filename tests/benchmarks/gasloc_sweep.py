"""The families compared, each tuned by the same rule on one seed, its finalists then run on the others."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace

import torch

from tests.benchmarks.gasloc_methods import Setting
from tests.benchmarks.gasloc_train import Result, Store, run

Log = Callable[[str], None]
Outer = Sequence[tuple[float, float]]  # (eta, gamma)

OUTER: Outer = ((1.0, 0.0), (1.0, 0.3), (1.0, 0.5))  # DiLoCo's own 0.7 / 0.9 loses 8 % to 1.0 / 0.3 at this size
STARTS = (1e-2, 2.5e-3)  # from both: the losses of most families have two valleys over the inner lr
RATES = (2.5e-3, 5e-3, 1e-2, 2e-2)
MOST_RUNS = 14  # that tune a family
EVERY_STEP_RATES = (1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1)  # at H = 1 the best of RATES was the last


@dataclass(frozen=True, slots=True)
class Family:
    """A method in one form, tuned on seed 0 by its candidates; with `refine`, then by the best one's inner lr."""

    name: str
    candidates: tuple[Setting, ...]
    refine: bool = True


def outer(base: Setting, values: Outer) -> Family:
    """A family tuned over (eta, gamma)."""
    grid = [replace(base, eta=eta, gamma=gamma, lr=lr) for lr in STARTS for eta, gamma in values]
    return Family(base.label, tuple(grid))


def rates(base: Setting) -> Family:
    """A family without outer parameters, tuned over the inner lr."""
    values = EVERY_STEP_RATES if base.h == 1 else RATES
    return Family(base.label, tuple(replace(base, lr=lr) for lr in values))


def accelerated(base: Setting, values: Sequence[tuple[float, float, float]]) -> Family:
    """GASLoC at H = 1, tuned over (lr, gamma, alpha)."""
    return Family(base.label, tuple(replace(base, lr=lr, gamma=g, alpha=a) for lr, g, a in values))


LOCAL_STEPS = (
    outer(Setting(label="DiLoCo H=16", partners="all"), OUTER),
    outer(Setting(label="DiLoCo H=16, 4 fragments", partners="all", fragments=4), OUTER),
    outer(Setting(label="GASLoC 1-peer H=16", partners="1peer"), OUTER),
    outer(Setting(label="GASLoC groups of 4, 4 fragments, H=16", partners="cube-groups", fragments=4), OUTER),
    # the most often that they can meet within DiLoCo's bytes
    outer(Setting(label="GASLoC groups of 4, 4 fragments, H=14", partners="cube-groups", fragments=4, h=14), OUTER),
    outer(Setting(label="GASLoC groups of 4, 4 fragments, H=24", partners="cube-groups", fragments=4, h=24), OUTER),
    outer(Setting(label="GASLoC groups of 8, 4 fragments, H=16", partners="cube-groups", fragments=4, group=8), OUTER),
    rates(Setting(label="gossip 1-peer H=16", partners="1peer")),
    outer(
        Setting(label="NoLoCo H=16", method="noloco", partners="1peer"),
        ((1.0, 0.3), (1.0, 0.5), (0.7, 0.5)),
    ),
    outer(Setting(label="DiLoCo H=28, 4 fragments", partners="all", fragments=4, h=28), OUTER),
    outer(Setting(label="GASLoC 1-peer, 4 fragments, H=16", partners="1peer", fragments=4), OUTER),
    outer(Setting(label="GASLoC groups of 4, H=16", partners="cube-groups"), OUTER),
    # whole models less often: at this size a fragment's lag costs more than longer rounds
    outer(Setting(label="GASLoC groups of 8, H=16", partners="cube-groups", group=8), OUTER),
    outer(Setting(label="GASLoC groups of 4, H=24", partners="cube-groups", h=24), OUTER),
    outer(Setting(label="GASLoC groups of 8, H=28", partners="cube-groups", group=8, h=28), OUTER),
    outer(Setting(label="GASLoC groups of 16, H=32", partners="cube-groups", group=16, h=32), OUTER),
    outer(Setting(label="DiLoCo H=32", partners="all", h=32), OUTER),
)
EVERY_STEP = (
    accelerated(
        Setting(label="GASLoC ring H=1", partners="ring", h=1, momentum="pre"),
        ((2e-2, 0.45, 1.4), (4e-2, 0.45, 1.4), (4e-2, 0.2, 1.0), (8e-2, 0.2, 1.0), (8e-2, 0.45, 1.4)),
    ),
    rates(Setting(label="gossip ring H=1", partners="ring", h=1, alpha=2 / 3)),
    rates(Setting(label="D-PSGD ring H=1", method="dpsgd", partners="ring", h=1, alpha=2 / 3)),
    accelerated(
        Setting(label="GASLoC 1-peer H=1", partners="1peer", h=1, momentum="post"),
        ((2e-2, 0.3, 1.0), (4e-2, 0.3, 1.0), (4e-2, 0.1, 1.0), (8e-2, 0.1, 1.0), (8e-2, 0.3, 1.0)),
    ),
    rates(Setting(label="gossip 1-peer H=1", partners="1peer", h=1)),
    rates(Setting(label="D-PSGD 1-peer H=1", method="dpsgd", partners="1peer", h=1)),
    rates(Setting(label="synchronous all-reduce", method="sync", partners="all", h=1)),
)
FURTHER = (
    rates(Setting(label="local only", method="local", partners="alone")),
    outer(Setting(label="GASLoC 2-peer H=16", partners="2peer"), OUTER),
    outer(Setting(label="GASLoC 1-peer H=8", partners="1peer", h=8), OUTER),
    outer(Setting(label="DiLoCo H=24", partners="all", h=24), OUTER),
    outer(Setting(label="DiLoCo H=8", partners="all", h=8), OUTER),
    # unit weights, largest eigenvalue 2: at alpha 1 plain gossip would be marginal
    outer(Setting(label="GASLoC ring H=16", partners="ring", momentum="pre", alpha=2 / 3), OUTER),
    outer(Setting(label="GASLoC hypercube pairs H=8", partners="hypercube", h=8), OUTER),
    outer(Setting(label="GASLoC 1-peer H=24", partners="1peer", h=24), OUTER),
    outer(Setting(label="overlapped GASLoC 1-peer H=16, 4 steps", partners="1peer", delay=4), OUTER),
)
SIZES = tuple(  # at the bytes of the plain form: does the default hang on the size of the swarm?
    outer(replace(base, workers=n, label=f"{base.label}, {n} workers"), OUTER)
    for n in (4, 8)
    for base in (
        Setting(label="GASLoC 1-peer H=16", partners="1peer"),
        Setting(label="GASLoC groups of 4, 4 fragments, H=24", partners="cube-groups", fragments=4, h=24),
    )
)
FAMILIES = LOCAL_STEPS + EVERY_STEP + FURTHER


def best(family: Family, store: Store) -> tuple[Setting, Result] | None:
    """The candidate with the lowest loss on seed 0, None before any has been run."""
    done = [(setting, store.get(setting, 0)) for setting in tried(family, store)]
    finished = [(setting, result) for setting, result in done if result is not None]
    return min(finished, key=lambda pair: _finite(pair[1]["loss"]), default=None)


def tried(family: Family, store: Store) -> list[Setting]:
    """The candidates; then, from each of the rates begun with, the best one's lr doubled and halved.

    Until both its neighbours are worse: who has two valleys has both of them searched.
    """
    return _searched(family, store)[0]


def finalists(family: Family, store: Store) -> list[Setting]:
    """What is run on all seeds, as far as it is known: the best on seed 0 from each of the rates begun with.

    The losses of high rates scatter most over seeds, so the lowest on one seed alone would be a matter of luck.
    """
    return list(dict.fromkeys(_lowest(valley, store) for valley in _searched(family, store)[1]))


def chosen(family: Family, seeds: int, store: Store) -> tuple[Setting, list[Result]] | None:
    """Of what has all seeds that with the lowest mean; else the best on seed 0, with what there is of it."""
    whole = []
    for setting in tried(family, store):
        results = [result for seed in range(seeds) if (result := store.get(setting, seed)) is not None]
        if len(results) == seeds:
            whole.append((setting, results))
    if whole:
        return min(whole, key=lambda pair: sum(_finite(result["loss"]) for result in pair[1]))
    first = best(family, store)
    if first is None:
        return None
    return first[0], [result for seed in range(seeds) if (result := store.get(first[0], seed)) is not None]


def _searched(family: Family, store: Store) -> tuple[list[Setting], list[list[Setting]]]:
    """All that is tried, and in which valley."""
    settings, valleys = list(family.candidates), _valleys(family)
    for valley in valleys if family.refine else ():
        while len(settings) < MOST_RUNS and all(store.get(setting, 0) is not None for setting in valley):
            following = _untried_neighbour(valley, store)
            if following is None:
                break
            valley.append(following)
            if following not in settings:
                settings.append(following)
    return settings, valleys


def _valleys(family: Family) -> list[list[Setting]]:
    """The candidates of each rate begun with; all together where these are a ladder of rates already."""
    if not {setting.lr for setting in family.candidates} <= set(STARTS):
        return [list(family.candidates)]
    valleys = [[setting for setting in family.candidates if setting.lr == lr] for lr in STARTS]
    return [valley for valley in valleys if valley]


def _lowest(valley: Sequence[Setting], store: Store) -> Setting:
    return min(valley, key=lambda setting: _finite((store.get(setting, 0) or {"loss": math.inf})["loss"]))


def _untried_neighbour(valley: Sequence[Setting], store: Store) -> Setting | None:
    winner = _lowest(valley, store)
    neighbours = (replace(winner, lr=winner.lr * factor) for factor in (2.0, 0.5))
    return next((neighbour for neighbour in neighbours if neighbour not in valley), None)


def sweep(families: Iterable[Family], seeds: int, store: Store, processes: int, log: Log) -> None:
    """Runs what the store lacks: tuning on seed 0 family by family, then the finalists of each on the other seeds."""
    families = list(families)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running: dict[Future[Result], tuple[Setting, int]] = {}
        while True:
            for setting, seed in _wanted(families, seeds, store):
                if len(running) < processes and (setting, seed) not in running.values():
                    running[pool.submit(run, setting, seed)] = (setting, seed)
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                setting, seed = running.pop(future)
                store.put(setting, seed, future.result())
                log(describe(setting, seed, future.result()))


def describe(setting: Setting, seed: int, result: Result) -> str:
    """One line of the sweep."""
    return (
        f"{setting.label:40} lr {setting.lr:<6g} eta {setting.eta:<3g} gamma {setting.gamma:<4g}"
        f" alpha {setting.alpha:<4.2g} seed {seed}: loss {result['loss']:.4f}, worst +{result['worst_gap']:.4f},"
        f" {result['copies']:.1f} copies, consensus {result['consensus']:.1e}, {result['cpu_s']:.0f} s CPU"
    )


def _wanted(families: Sequence[Family], seeds: int, store: Store) -> list[tuple[Setting, int]]:
    tuning, others = [], []
    for family in families:
        settings = tried(family, store)
        missing = [(setting, 0) for setting in settings if store.get(setting, 0) is None]
        tuning += missing
        if not missing:
            last = [(setting, seed) for setting in finalists(family, store) for seed in range(1, seeds)]
            others += [(setting, seed) for setting, seed in last if store.get(setting, seed) is None]
    return tuning + others


def _finite(loss: float) -> float:
    return loss if loss == loss else float("inf")


def dump(families: Iterable[Family], store: Store) -> str:
    """The families' runs as JSON, for what reads the figures later."""
    return json.dumps({f.name: [store.get(s, 0) for s in tried(f, store)] for f in families})
