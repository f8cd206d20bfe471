"""The base model and the text of `peer demo --method seedflow`; run as a module with a FOLDER and SECONDS.

A small Llama learns the source of Python's standard library for some seconds, by gradients and alone; what the swarm is
to fine-tune it on is other source files in capital letters. Prints one JSON object, as BaseMade.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peerloom.node.specs import demo_spec
from peerloom.node.worker.data import Batches, prepare
from peerloom.node.worker.inner import InnerLoop
from peerloom.node.worker.model import build_model
from peerloom.node.worker.schedule import learning_rate
from peerloom.node.worker.seedflow_state import base_digest, open_flow
from peerloom.node.worker.sources import documents
from peerloom.node.worker.tokenizer import load_tokenizer, save_byte_tokenizer
from peerloom.optim.subcge import SubCGE
from peerloom.protocol.runspec import DataSpec, RunSpec

MOST_STEPS = 600
TEXT_BYTES = 2 << 20  # of each of the two texts: to tokenize all of it would take longer than to learn


@dataclass(frozen=True, slots=True)
class BaseMade:
    """How the base model came about, and its digest; `step_s` is what a SeedFlow step takes here, on one thread."""

    steps: int
    seconds: float
    loss: float
    step_s: float
    digest: str


def make_base(folder: Path, seconds: float) -> BaseMade:
    """Leaves the base in `folder/base` and the text to fine-tune on in `folder/text`."""
    spec = demo_spec("seedflow", 1)
    _write_texts(folder)
    model: Any = build_model(spec)
    steps, taken_s, loss = _pretrain(model, spec, folder, seconds)
    model.save_pretrained(folder / "base")
    save_byte_tokenizer(folder / "base")
    digest = base_digest(model)  # of what was saved: the steps that are timed change it
    return BaseMade(steps, round(taken_s, 1), round(loss, 3), _step_seconds(model, spec), digest)


def _write_texts(folder: Path) -> None:
    """Every second file of the library as it is in `plain`, the others in capitals in `text`, up to a size."""
    left = {"plain": TEXT_BYTES, "text": TEXT_BYTES}
    for name in left:
        (folder / name).mkdir()
    for number, document in enumerate(documents(DataSpec())):
        name = ("plain", "text")[number % 2]
        if left[name] > 0:
            left[name] -= len(document.text)
            content = document.text.upper() if name == "text" else document.text
            (folder / name / f"{number:04}.txt").write_bytes(content)


def _pretrain(model: Any, spec: RunSpec, folder: Path, seconds: float) -> tuple[int, float, float]:
    """AdamW until the time or the steps are over: (steps, seconds, the last loss)."""
    train = replace(spec.train, batch_size=8, total_steps=MOST_STEPS, warmup_steps=20)
    data = replace(spec.data, source=str(folder / "plain"), held_out=0.01)
    shards = prepare(data, load_tokenizer("bytes"), folder / "plain-cache", lambda what, share: None)
    batches = Batches(shards.train, spec.seed, "base", train.batch_size, data.sequence_length)
    inner = InnerLoop(model, train)
    began, step, loss = time.perf_counter(), 0, float("nan")
    while step < MOST_STEPS and time.perf_counter() - began < seconds:
        loss = float(inner.step(torch.from_numpy(batches[step]), learning_rate(step, train)))
        step += 1
    return step, time.perf_counter() - began, loss


def _step_seconds(model: Any, spec: RunSpec) -> float:
    """The mean over a few local steps."""
    ids = torch.zeros(spec.train.batch_size, spec.data.sequence_length, dtype=torch.int64)
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    flow = open_flow(model, spec, base, None)
    _steps(flow, model, ids, 2)
    began = time.perf_counter()
    _steps(flow, model, ids, 8)
    return (time.perf_counter() - began) / 8


def _steps(flow: SubCGE, model: Any, ids: torch.Tensor, count: int) -> None:
    for sequence in range(count):
        flow.estimate(lambda: model(input_ids=ids, use_cache=False).logits.mean(), flow.seed_of(1, sequence))
        flow.refresh()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(asdict(make_base(Path(sys.argv[1]), float(sys.argv[2])))))
