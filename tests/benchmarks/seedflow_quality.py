"""SeedFlow's accuracy on labelled film reviews, with a pre-trained model: clients in one process, messages for real.

All clients hold one model between flushes, bit for bit (the tests show it), so one copy serves them all: each step
every client estimates on a minibatch of its own shard, and every `FLUSH` steps all messages are applied. Accuracy is
over prompts scored by two label words; the last layer is trained over cached activations of the frozen ones below.
Finished runs are kept in a file and never run twice.
"""

from __future__ import annotations

import copy
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from peerloom.node.worker.classification import Prompt, PromptClassifier, read_examples, split
from peerloom.node.worker.gguf import open_model, open_tokenizer
from peerloom.optim.subcge import FRACTION_BITS, SubCGE
from tests.benchmarks.seedflow_last import LastLayer
from tests.benchmarks.seedflow_swarm import MeZOSwarm, SubCGESwarm, Swarm, TableMeZO
from tests.benchmarks.seedflow_upper import Cached, UpperLayers, load, lower_activations, save

PROMPT = Prompt("{text} It was", (" terrible", " great"))
SIZES = {"train": 1024, "validation": 400, "test": 800}
CHARACTERS = 80  # longer reviews are left out: the machine is small
UPPER = 1
FLUSH = 5
PATIENCE = 8  # points without a lower validation loss after which AdamW is stopped: it overfits


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: `lr` is of the mean over clients at the first step; `decay` to 0 at the last.

    AdamW takes the clients' minibatches as one. `trainable` is a regular expression of names; `bound` is what slopes
    are clipped to.
    """

    method: str
    clients: int
    steps: int
    lr: float
    seed: int = 0
    decay: str = "none"
    trainable: str = r"_proj\.weight$"
    eps: float = 1e-3
    rank: int = 32
    period: int = 1000
    bound: float = 256.0
    batch: int = 8  # examples of a client and step

    def share(self, step: int) -> float:
        """Of the learning rate, at a step."""
        done = step / self.steps
        return {"none": 1.0, "linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[self.decay]

    @property
    def eval_every(self) -> int:
        """Steps between two points of the curve; AdamW overfits soon and its best point counts, so it has more."""
        return 25 if self.method == "adamw" else 100


@dataclass(frozen=True, slots=True)
class Data:
    """The cached activations of the three parts, and the model above them."""

    train: Cached
    validation: Cached
    test: Cached
    upper: UpperLayers


def prepare(model_path: Path, reviews: Path, cache: Path, say: Callable[[str], None]) -> Data:
    """Model and activations from the cache; what it lacks is made: the lower layers run over all examples once."""
    cache.mkdir(parents=True, exist_ok=True)
    files = {name: cache / f"{name}-{size}-{UPPER}.pt" for name, size in SIZES.items()}
    upper = cache / f"upper-{UPPER}.pt"
    if not all(path.exists() for path in (*files.values(), upper)):
        _fill(model_path, reviews, files, upper, say)
    found = {name: load(path) for name, path in files.items()}
    return Data(**found, upper=torch.load(upper, weights_only=False))  # a file of this benchmark's own


def _fill(model_path: Path, reviews: Path, files: dict[str, Path], upper: Path, say: Callable[[str], None]) -> None:
    """Makes the files that are not there."""
    classifier = PromptClassifier(open_tokenizer(str(model_path)), PROMPT, 64)
    examples = [one for one in read_examples(reviews, PROMPT.words) if len(one.text) <= CHARACTERS]
    parts = dict(zip(SIZES, split(examples, 0, list(SIZES.values())), strict=True))
    model = open_model(str(model_path)).eval()
    for name, path in files.items():
        if not path.exists():
            say(f"lower layers over {len(parts[name])} examples for {name}")
            save(path, lower_activations(model, UPPER, classifier, parts[name]))
    torch.save(UpperLayers(model, UPPER, classifier.label_tokens).eval(), upper)


def measure(upper: UpperLayers, data: Cached) -> tuple[float, float]:
    """(loss, accuracy)."""
    return LastLayer(upper, data).measure()


def perform(run: Run, data: Data, say: Callable[[str], None]) -> dict[str, Any]:
    """Trains a copy of the last layer; the curve's points are (step, validation loss, accuracy, test accuracy)."""
    upper = copy.deepcopy(data.upper)
    parts = [LastLayer(upper, part) for part in (data.validation, data.test)]
    curve = []
    steps = _first_order if run.method == "adamw" else _zeroth_order
    for step in steps(run, upper, data.train):
        if step % run.eval_every == 0 or step == run.steps:
            for part in parts:
                part.begin()
            (loss, accuracy), (_, test) = (part.measure() for part in parts)
            curve.append([step, loss, accuracy, test])
            say(f"{run} step {step}: {loss:.4f} {accuracy:.3f}")  # not the test's: nobody is to choose by it
            since = len(curve) - 1 - min(range(len(curve)), key=lambda index: curve[index][1])
            if not loss < 3 or run.method == "adamw" and since >= PATIENCE:
                break  # it has diverged, or overfits
    return {**asdict(run), "upper": UPPER, "curve": curve}


def _zeroth_order(run: Run, upper: UpperLayers, train: Cached) -> Iterator[int]:
    """Yields the steps done, after each flush."""
    common: dict[str, Any] = {"eps": run.eps, "lr": run.lr / run.clients, "run_seed": run.seed}
    common |= {"trainable": run.trainable, "bound": round(run.bound * 2**FRACTION_BITS)}
    swarm: Swarm
    if run.method == "mezo":
        swarm = MeZOSwarm(TableMeZO(upper, **common), upper, train)
    else:
        flow = SubCGE(upper, rank=run.rank, period=run.period, **common)
        swarm = SubCGESwarm(flow, upper, train, run.period, run.lr / run.clients)
    draws = [torch.Generator().manual_seed(run.seed * 1000 + client) for client in range(run.clients)]
    outbox: list[tuple[int, int, int, int]] = []
    for step in range(run.steps):
        picked = [_minibatch(len(train), client, run, draw) for client, draw in enumerate(draws)]
        scalars = swarm.estimate(step, picked, run.share(step))
        outbox += [(client, step, step, scalar) for client, scalar in enumerate(scalars)]
        if (step + 1) % FLUSH == 0:
            swarm.apply(outbox)
            outbox.clear()
            yield step + 1


def _minibatch(examples: int, client: int, run: Run, draw: torch.Generator) -> torch.Tensor:
    """Rows of the client's shard, which is every `clients`-th example."""
    return torch.randint(examples // run.clients, (run.batch,), generator=draw) * run.clients + client


def _first_order(run: Run, upper: UpperLayers, train: Cached) -> Iterator[int]:
    """AdamW on all clients' minibatches together."""
    parameters = []
    for name, parameter in upper.named_parameters():
        parameter.requires_grad_(re.search(run.trainable, name) is not None)
        if parameter.requires_grad:
            parameters.append(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=run.lr, weight_decay=0.0)
    draws = [torch.Generator().manual_seed(run.seed * 1000 + client) for client in range(run.clients)]
    for step in range(run.steps):
        optimizer.param_groups[0]["lr"] = run.lr * run.share(step)
        picked = [_minibatch(len(train), client, run, draw) for client, draw in enumerate(draws)]
        batch = train.pick(torch.cat(picked))
        optimizer.zero_grad()
        F.cross_entropy(upper(batch), batch.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield step + 1


class Store:
    """Finished runs, a JSON line each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.results: list[dict[str, Any]] = [{"batch": 8} | json.loads(line) for line in lines]

    def get(self, run: Run) -> dict[str, Any] | None:
        about = {**asdict(run), "upper": UPPER}
        return next((one for one in self.results if about.items() <= one.items()), None)

    def perform(self, run: Run, data: Data, say: Callable[[str], None]) -> dict[str, Any]:
        """The run's result, from the file or now."""
        found = self.get(run)
        if found is None:
            found = perform(run, data, say)
            self.results.append(found)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(found) + "\n")
        return found


def final(result: dict[str, Any]) -> tuple[float, float, float, float]:
    """(step, validation loss, validation accuracy, test accuracy) at the lowest validation loss: early stopping."""
    step, loss, accuracy, test = min(result["curve"], key=lambda point: point[1])
    return step, loss, accuracy, test


def test_accuracy(run: Run, seeds: int, store: Store) -> tuple[float, float]:
    """Mean and standard deviation over seeds."""
    found = [final(result)[3] for seed in range(seeds) if (result := store.get(replace(run, seed=seed))) is not None]
    return statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0
