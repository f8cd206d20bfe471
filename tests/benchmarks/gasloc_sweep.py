"""The families compared, each tuned by the same rule on one seed, its best then run on the others."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace

import torch

from tests.benchmarks.gasloc_methods import Setting
from tests.benchmarks.gasloc_train import Result, Store, run

Log = Callable[[str], None]
Outer = Sequence[tuple[float, float]]  # (eta, gamma)

OUTER: Outer = ((1.0, 0.0), (1.0, 0.3), (1.0, 0.5))
PRE: Outer = ((1.0, 0.1), (1.0, 0.2), (1.0, 0.3))
START = 5e-3  # the inner lr that all begin from
RATES = (2.5e-3, 5e-3, 1e-2)
EVERY_STEP_RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)
MOST_RUNS = 12  # that tune a family


@dataclass(frozen=True, slots=True)
class Family:
    """A method in one form, tuned on seed 0 by its candidates; with `refine`, then by the best one's inner lr."""

    name: str
    candidates: tuple[Setting, ...]
    refine: bool = True


def outer(base: Setting, values: Outer) -> Family:
    """A family tuned over (eta, gamma)."""
    return Family(base.label, tuple(replace(base, eta=eta, gamma=gamma, lr=START) for eta, gamma in values))


def rates(base: Setting) -> Family:
    """A family without outer parameters, tuned over the inner lr."""
    return Family(base.label, tuple(replace(base, lr=lr) for lr in (EVERY_STEP_RATES if base.h == 1 else RATES)))


def accelerated(base: Setting, values: Sequence[tuple[float, float, float]]) -> Family:
    """GASLoC at H = 1, tuned over (lr, gamma, alpha)."""
    return Family(base.label, tuple(replace(base, lr=lr, gamma=g, alpha=a) for lr, g, a in values))


def groups(h: int, fragments: int = 4, group: int = 4) -> Setting:
    """GASLoC in groups on rotating hypercube dimensions."""
    parts = f", {fragments} fragments" if fragments > 1 else ""
    label = f"GASLoC groups of {group}{parts}, H={h}"
    return Setting(label=label, partners="cube-groups", group=group, fragments=fragments, h=h)


def diloco(h: int, fragments: int = 1) -> Setting:
    """DiLoCo, in fragments as Streaming DiLoCo has it."""
    parts = f", {fragments} fragments" if fragments > 1 else ""
    return Setting(label=f"DiLoCo H={h}{parts}", partners="all", fragments=fragments, h=h)


ONE_PEER = Setting(label="GASLoC 1-peer H=16", partners="1peer")
NOLOCO = Setting(label="NoLoCo H=16", method="noloco", partners="1peer")
LOCAL_STEPS = (
    outer(diloco(16), OUTER),
    outer(groups(16), OUTER),
    outer(diloco(16, fragments=4), OUTER),
    outer(groups(16, group=8), OUTER),
    outer(groups(24), OUTER),
    outer(ONE_PEER, OUTER),
    rates(Setting(label="gossip 1-peer H=16", partners="1peer")),
    outer(NOLOCO, ((1.0, 0.3), (1.0, 0.5), (0.7, 0.5))),
    outer(diloco(28, fragments=4), OUTER),
    outer(groups(28, group=8), OUTER),
    outer(groups(16, fragments=1), OUTER),
)
EVERY_STEP = (
    accelerated(
        Setting(label="GASLoC ring H=1", partners="ring", h=1, momentum="pre"),
        ((5e-3, 0.45, 1.4), (1e-2, 0.45, 1.4), (2e-2, 0.45, 1.4), (1e-2, 0.2, 1.0), (2e-2, 0.2, 1.0)),
    ),
    rates(Setting(label="gossip ring H=1", partners="ring", h=1, alpha=2 / 3)),
    rates(Setting(label="D-PSGD ring H=1", method="dpsgd", partners="ring", h=1, alpha=2 / 3)),
    accelerated(
        Setting(label="GASLoC 1-peer H=1", partners="1peer", h=1, momentum="post"),
        ((5e-3, 0.3, 1.0), (1e-2, 0.3, 1.0), (2e-2, 0.3, 1.0), (1e-2, 0.1, 1.0), (2e-2, 0.1, 1.0)),
    ),
    rates(Setting(label="gossip 1-peer H=1", partners="1peer", h=1)),
    rates(Setting(label="D-PSGD 1-peer H=1", method="dpsgd", partners="1peer", h=1)),
    rates(Setting(label="synchronous all-reduce", method="sync", partners="all", h=1)),
)
FURTHER = (
    rates(Setting(label="local only", method="local", partners="alone")),
    outer(diloco(32), OUTER),
    outer(Setting(label="GASLoC 1-peer H=16, pre", partners="1peer", momentum="pre"), PRE),  # as a spec has it unsaid
    outer(Setting(label="GASLoC 2-peer H=16", partners="2peer"), OUTER),
    outer(Setting(label="GASLoC 1-peer H=8", partners="1peer", h=8), OUTER),
    outer(Setting(label="GASLoC 1-peer H=24", partners="1peer", h=24), OUTER),
    # unit weights, largest eigenvalue 2: at alpha 1 plain gossip would be marginal
    outer(Setting(label="GASLoC ring H=16", partners="ring", momentum="pre", alpha=2 / 3), OUTER),
)
SIZES = tuple(  # at the bytes of the plain form: does the default hang on the size of the swarm?
    outer(replace(base, workers=n, label=f"{base.label}, {n} workers"), OUTER)
    for n in (4, 8)
    for base in (ONE_PEER, groups(24))
)
FAMILIES = LOCAL_STEPS + EVERY_STEP + FURTHER


def best(family: Family, store: Store) -> tuple[Setting, Result] | None:
    """The candidate with the lowest loss on seed 0, None before any has been run."""
    done = [(setting, store.get(setting, 0)) for setting in tried(family, store)]
    finished = [(setting, result) for setting, result in done if result is not None]
    return min(finished, key=lambda pair: _finite(pair[1]["loss"]), default=None)


def tried(family: Family, store: Store) -> list[Setting]:
    """The candidates; then the best one's neighbours, until all of them are worse."""
    settings = list(family.candidates)
    while family.refine and len(settings) < MOST_RUNS:
        results = [store.get(setting, 0) for setting in settings]
        if any(result is None for result in results):
            break
        losses = [_finite(result["loss"]) for result in results if result is not None]
        winner = settings[losses.index(min(losses))]
        following = next((neighbour for neighbour in neighbours(winner) if neighbour not in settings), None)
        if following is None:
            break
        settings.append(following)
    return settings


def neighbours(setting: Setting) -> Iterator[Setting]:
    """Its lr doubled and halved; at H = 1 also its alpha halved, since nodes that differ more make a better average."""
    for factor in (2.0, 0.5):
        yield replace(setting, lr=setting.lr * factor)
    if setting.h == 1 and setting.method != "sync":
        yield replace(setting, alpha=setting.alpha / 2)


def chosen(family: Family, seeds: int, store: Store) -> tuple[Setting, list[Result]] | None:
    """The best on seed 0 with what there is of it on all seeds."""
    first = best(family, store)
    if first is None:
        return None
    results = [store.get(first[0], seed) for seed in range(seeds)]
    return first[0], [result for result in results if result is not None]


def sweep(families: Iterable[Family], seeds: int, store: Store, processes: int, log: Log) -> None:
    """Runs what the store lacks: tuning on seed 0 family by family, then the best of each on the other seeds."""
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
            first = best(family, store)
            assert first is not None  # it has candidates, and all were run
            others += [(first[0], seed) for seed in range(1, seeds) if store.get(first[0], seed) is None]
    return tuning + others


def _finite(loss: float) -> float:
    return loss if loss == loss else float("inf")


def dump(families: Iterable[Family], store: Store) -> str:
    """The families' runs as JSON, for what reads the figures later."""
    return json.dumps({f.name: [store.get(s, 0) for s in tried(f, store)] for f in families})
