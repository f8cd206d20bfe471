"""SeedFlow's accuracy on labelled film reviews, with a pre-trained model: clients in one process, messages for real.

All clients hold one model between flushes, bit for bit (the tests show it), so one copy serves them all: each step
every client estimates on a minibatch of its own shard, and every `FLUSH` steps all messages are applied. Accuracy is
over prompts scored by two label words; the upper layers are trained over cached activations of the frozen lower ones.
Finished runs are kept in a file and never run twice.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from peerloom.node.worker.classification import Prompt, PromptClassifier, read_examples, split
from peerloom.node.worker.gguf import open_model, open_tokenizer
from peerloom.optim.subcge import FRACTION_BITS, SCALAR_LIMIT, MeZO, SubCGE
from tests.benchmarks.seedflow_upper import Cached, UpperLayers, load, lower_activations, save

PROMPT = Prompt("{text} It was", (" terrible", " great"))
SIZES = {"train": 1024, "validation": 256, "test": 512}
CHARACTERS = 80  # longer reviews are left out: the machine is small
UPPER = 1
TRAINABLE = r"_proj\.weight$"
BATCH = 8
FLUSH = 5
EVAL_EVERY = 50
RANK, PERIOD, EPS = 32, 1000, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: `lr` is of the mean over clients."""

    method: str
    clients: int
    steps: int
    lr: float
    seed: int

    @property
    def label(self) -> str:
        names = {"seedflow": f"SeedFlow, {self.clients} clients", "mezo": f"MeZO, {self.clients} directions a step"}
        return names.get(self.method, "AdamW")


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
    files = {name: cache / f"{name}-{UPPER}.pt" for name in SIZES}
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
    logits = []
    with torch.no_grad():
        for rows in torch.arange(len(data)).split(64):
            logits.append(upper(data.pick(rows)))
    scores = torch.cat(logits)
    right = (scores.argmax(1) == data.labels).float().mean()
    return float(F.cross_entropy(scores, data.labels)), float(right)


def perform(run: Run, data: Data, say: Callable[[str], None]) -> dict[str, Any]:
    """Trains a copy of the upper layers; the curve's points are (step, validation loss, accuracy, test accuracy)."""
    upper = copy.deepcopy(data.upper)
    curve = []
    steps = _first_order(run, upper, data.train) if run.method == "adamw" else _zeroth_order(run, upper, data.train)
    for step in steps:
        if step % EVAL_EVERY == 0 or step == run.steps:
            loss, accuracy = measure(upper, data.validation)
            curve.append([step, loss, accuracy, measure(upper, data.test)[1]])
            say(f"{run.label} lr {run.lr:g} seed {run.seed} step {step}: {loss:.4f} {accuracy:.3f} {curve[-1][3]:.3f}")
            if not loss < 3:
                break  # it has diverged
    return {**asdict(run), "upper": UPPER, "curve": curve}


def _zeroth_order(run: Run, upper: UpperLayers, train: Cached) -> Iterator[int]:
    """Yields the steps done, after each flush."""
    common = {"eps": EPS, "lr": run.lr / run.clients, "run_seed": run.seed, "trainable": TRAINABLE}
    flow: SubCGE | MeZO
    flow = MeZO(upper, **common) if run.method == "mezo" else SubCGE(upper, rank=RANK, period=PERIOD, **common)
    draws = [torch.Generator().manual_seed(run.seed * 1000 + client) for client in range(run.clients)]
    outbox: list[tuple[int, int, int, int]] = []
    for step in range(run.steps):
        if isinstance(flow, SubCGE):
            flow.advance(step)
        picked: list[torch.Tensor] = []
        for client, draw in enumerate(draws):
            picked.append(_minibatch(len(train), client, run.clients, draw))
        seeds = [flow.seed_of(client, step) for client in range(run.clients)]
        if isinstance(flow, SubCGE):
            scalars = estimate_all(flow, upper, train.pick(torch.cat(picked)), seeds)
        else:
            pairs = zip(picked, seeds, strict=True)
            scalars = [flow.estimate(_loss(upper, train.pick(rows)), seed) for rows, seed in pairs]
        outbox += [(client, step, step, scalar) for client, scalar in enumerate(scalars)]
        if (step + 1) % FLUSH == 0:
            flow.apply(outbox)
            outbox.clear()
            yield step + 1


def estimate_all(flow: SubCGE, upper: UpperLayers, batch: Cached, seeds: Sequence[int]) -> list[int]:
    """What `flow.estimate` gives for each seed on its share of the rows, in one pass: directions have rank one."""
    each = len(batch) // len(seeds)
    both = Cached(*(torch.cat([one, one]) for one in (batch.hidden, batch.lengths, batch.labels)))
    signs = torch.tensor([flow.eps, -flow.eps]).repeat_interleave(len(batch)).view(-1, 1, 1)
    handles = []
    for name, pair in flow.directions(seeds).items():
        u, v = (one.repeat_interleave(each, 0).repeat(2, 1) for one in pair)
        module = upper.get_submodule(name.removesuffix(".weight"))
        handles.append(module.register_forward_hook(_added(u.unsqueeze(1) * signs, v.unsqueeze(2))))
    with torch.no_grad():
        losses = F.cross_entropy(upper(both), both.labels, reduction="none").view(2, len(seeds), each).mean(2)
    for handle in handles:
        handle.remove()
    slopes = ((losses[0] - losses[1]) / (2 * flow.eps)).tolist()
    return [round(max(-SCALAR_LIMIT, min(SCALAR_LIMIT, slope * 2**FRACTION_BITS))) for slope in slopes]


def _added(u: torch.Tensor, v: torch.Tensor) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
    """y_i += (x_i . v_i) u_i, for u (rows, 1, m) and v (rows, n, 1)."""
    return lambda module, args, output: output.addcmul_(args[0] @ v, u)


def _loss(upper: UpperLayers, batch: Cached) -> Callable[[], torch.Tensor]:
    return lambda: F.cross_entropy(upper(batch), batch.labels)


def _minibatch(examples: int, client: int, clients: int, draw: torch.Generator) -> torch.Tensor:
    """Rows of the client's shard, which is every `clients`-th example."""
    return torch.randint(examples // clients, (BATCH,), generator=draw) * clients + client


def _first_order(run: Run, upper: UpperLayers, train: Cached) -> Iterator[int]:
    parameters = [p for name, p in upper.named_parameters() if name.endswith("_proj.weight")]
    for parameter in upper.parameters():
        parameter.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=run.lr, weight_decay=0.0)
    draw = torch.Generator().manual_seed(run.seed)
    for step in range(run.steps):
        batch = train.pick(_minibatch(len(train), 0, 1, draw))
        optimizer.zero_grad()
        F.cross_entropy(upper(batch), batch.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield step + 1


class Store:
    """Finished runs, a JSON line each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.results: list[dict[str, Any]] = [json.loads(line) for line in lines]

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


def tuned(candidates: Sequence[Run], store: Store, data: Data, say: Callable[[str], None]) -> Run:
    """The candidate with the lowest validation loss at the end on seed 0."""
    return min(candidates, key=lambda run: final(store.perform(run, data, say))[1])


def final(result: dict[str, Any]) -> tuple[float, float, float, float]:
    """(step, validation loss, validation accuracy, test accuracy) at the end; of AdamW at its best validation loss."""
    curve = result["curve"]
    last = min(curve, key=lambda point: point[1]) if result["method"] == "adamw" else curve[-1]
    step, loss, accuracy, test = last
    return step, loss, accuracy, test


def test_accuracy(run: Run, seeds: int, store: Store) -> tuple[float, float]:
    """Mean and standard deviation over seeds."""
    found = [final(result)[3] for seed in range(seeds) if (result := store.get(replace(run, seed=seed))) is not None]
    return statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0
