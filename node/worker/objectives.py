"""What SeedFlow lowers: the loss over all tokens of a text, or over the label word after a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerloom.node.worker.classification import Columns, Example, Prompt, PromptClassifier, read_examples, split
from peerloom.node.worker.data import Batches, check_enough, prepare
from peerloom.node.worker.tasks.common import HELD_OUT
from peerloom.node.worker.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from peerloom.node.worker_seams import Evaluation, WorkerSetup
from peerloom.protocol.errors import DataError, SpecError
from peerloom.protocol.flood_messages import origin_key
from peerloom.protocol.runspec import DataSpec

Progress = Callable[[str, float], None]


class Objective(Protocol):
    """A task's data and loss on one node."""

    def draw(self, index: int) -> tuple[Callable[[], Tensor], int]:
        """The loss on this node's batch `index`, as a function of the weights as they are, and its tokens."""
        ...

    def evaluate(self) -> Evaluation:
        """On the held-out part, the same for all nodes."""
        ...


def open_objective(
    setup: WorkerSetup, tokenizer: Tokenizer, model: nn.Module, device: torch.device, progress: Progress
) -> Objective:
    """The objective of the spec's task; raises DataError, SpecError or StorageError."""
    data = setup.spec.data
    if setup.data_source:
        data = replace(data, source=setup.data_source)
    vocabulary = getattr(model.config, "vocab_size", None)
    if isinstance(vocabulary, int) and tokenizer.vocab_size > vocabulary:
        raise SpecError(
            [f"model.vocab_size: {vocabulary} is less than the tokenizer's {tokenizer.vocab_size}; raise it"]
        )
    kind = PromptObjective if setup.spec.task.kind == "classification" else TextObjective
    return kind(setup, data, tokenizer, model, device, progress)


class TextObjective:
    """Mean cross-entropy of the next token, in nats."""

    def __init__(
        self,
        setup: WorkerSetup,
        data: DataSpec,
        tokenizer: Tokenizer,
        model: nn.Module,
        device: torch.device,
        progress: Progress,
    ) -> None:
        spec, train = setup.spec, setup.spec.train
        shards = prepare(data, tokenizer, setup.cache_dir, progress)
        check_enough(shards, data, train.batch_size)
        size = (train.batch_size, data.sequence_length)
        self._model, self._device = model, device
        self._tokens = train.batch_size * data.sequence_length
        self._batches = Batches(shards.train, spec.seed, setup.peer_id, *size)
        held_out = Batches(shards.held_out, spec.seed, HELD_OUT, *size)
        self._held_out = [torch.from_numpy(held_out[index]) for index in range(train.eval_batches)]

    def draw(self, index: int) -> tuple[Callable[[], Tensor], int]:
        """The batch's windows, a function of run seed, peer and index."""
        windows = torch.from_numpy(self._batches[index]).to(self._device)
        return lambda: self._loss(windows), self._tokens

    def evaluate(self) -> Evaluation:
        """The mean over the spec's evaluation batches."""
        self._model.eval()
        with torch.no_grad():
            losses = [float(self._loss(windows.to(self._device))) for windows in self._held_out]
        return Evaluation(loss=sum(losses) / len(losses), accuracy=None)

    def _loss(self, windows: Tensor) -> Tensor:
        logits = self._model(input_ids=windows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


class PromptObjective:
    """Cross-entropy among the label words after each prompt.

    Of the rows that are not held out, the first `task.train_examples` in the order of a hash are trained on; this node
    has every `seedflow.clients`-th of them, from a place that its peer id gives.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        data: DataSpec,
        tokenizer: Tokenizer,
        model: nn.Module,
        device: torch.device,
        progress: Progress,
    ) -> None:
        spec, task = setup.spec, setup.spec.task
        labels, words = zip(*task.classes(), strict=True)
        progress("reading the examples", 0.0)
        path = Path(data.source).expanduser()
        examples = read_examples(path, words, labels, Columns(task.label_field, data.text_field))
        train, self._held_out = parts(examples, spec.seed, data.held_out, task.train_examples)
        self._own = train[origin_key(setup.peer_id) % spec.seedflow.clients :: spec.seedflow.clients] or train
        self._held_out = self._held_out[: spec.train.eval_batches * spec.train.batch_size]
        prompt = Prompt(task.template, words)
        self._classifier = PromptClassifier(_encoder(tokenizer), prompt, data.sequence_length)
        self._model, self._device, self._batch = model, device, spec.train.batch_size
        self._draws = Batches(np.arange(len(self._own) + 1), spec.seed, setup.peer_id, self._batch, 1)

    def draw(self, index: int) -> tuple[Callable[[], Tensor], int]:
        """Examples drawn with replacement, a function of run seed, peer and index."""
        chosen = [self._own[row] for row in self._draws[index][:, 0]]
        batch = self._classifier.batch(chosen).to(self._device)
        return lambda: self._classifier.loss(self._model, batch), int(batch.mask.sum())

    def evaluate(self) -> Evaluation:
        """Loss and accuracy over `train.eval_batches` batches of the held-out rows."""
        self._model.eval()
        total, right = 0.0, 0
        with torch.no_grad():
            for start in range(0, len(self._held_out), self._batch):
                batch = self._classifier.batch(self._held_out[start : start + self._batch]).to(self._device)
                scores = self._classifier.scores(self._model, batch)
                total += float(F.cross_entropy(scores, batch.labels, reduction="sum"))
                right += int((scores.argmax(1) == batch.labels).sum())
        return Evaluation(loss=total / len(self._held_out), accuracy=right / len(self._held_out))


def parts(
    examples: Sequence[Example], seed: int, held_out: float, train_examples: int
) -> tuple[list[Example], list[Example]]:
    """(training, held-out) rows, disjoint, the same on every machine. Raises DataError when there are too few."""
    different = len({example.text for example in examples})
    aside = max(1, round(held_out * different))
    if different - aside < max(1, train_examples):
        raise DataError(
            f"the data has {different} different rows, {aside} of them held out: too few for "
            f"{max(1, train_examples)} to train on; add rows, or lower task.train_examples or data.held_out"
        )
    first, second = split(examples, seed, (aside, train_examples or different - aside))
    return second, first


class _ByteEncoder:
    """The byte tokenizer as a transformers one, as far as prompts need it."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Its bytes."""
        return list(text.encode())


def _encoder(tokenizer: Tokenizer) -> Any:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.inner
    assert isinstance(tokenizer, ByteTokenizer)  # ours: there are these two
    return _ByteEncoder()
