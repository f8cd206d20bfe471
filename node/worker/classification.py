"""Classification by prompt: a text inside a template, and the label whose word the language model finds likeliest next.

Examples come from a TSV file, `label<TAB>text` a line or with a header that names the columns, or a JSONL file; a label
is one of the spec's, or the number of its word, from 0, or the word itself.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import Tensor, nn

from peerloom.protocol.errors import DataError

SUFFIXES = (".tsv", ".jsonl")
HOLE = "{text}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads, with `{text}` where the example goes, and the word that stands for each label."""

    template: str
    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.template.count(HOLE) != 1:
            raise DataError(f"the prompt template {self.template!r} must hold {HOLE} once")
        if len(set(self.words)) != len(self.words) or len(self.words) < 2:
            raise DataError(f"the label words {self.words} must be two or more, all different")


@dataclass(frozen=True, slots=True)
class Example:
    """One labelled text."""

    text: str
    label: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts padded on the left, so that each ends in the last column: ids, mask, positions (n, T); labels (n,)."""

    ids: Tensor
    mask: Tensor
    positions: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(*(tensor.to(device) for tensor in (self.ids, self.mask, self.positions, self.labels)))


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of what a row holds, in a TSV's header or as JSONL's fields."""

    label: str = "label"
    text: str = "text"


DEFAULT_COLUMNS = Columns()


def read_examples(
    path: Path, words: Sequence[str], named: Sequence[str] = (), columns: Columns = DEFAULT_COLUMNS
) -> list[Example]:
    """All examples of a file in its order; `named` are the labels' own names. Raises DataError with file and line."""
    if path.suffix not in SUFFIXES:
        raise DataError(f"the labelled data {path} is none of {', '.join(SUFFIXES)}; convert it")
    labels = {str(number): number for number in range(len(words))}
    labels |= {word.strip(): number for number, word in enumerate(words)}
    labels |= {name.strip(): number for number, name in enumerate(named)}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"the labelled data {path} is not UTF-8 (byte {error.start + 1}); save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"the labelled data {path} cannot be read: {error.strerror}") from error
    examples = list(_examples(path, lines, labels, columns))
    if not examples:
        raise DataError(f"the labelled data {path} holds no example; add some, or point at another file")
    return examples


def split(examples: Sequence[Example], seed: int, sizes: Sequence[int]) -> list[list[Example]]:
    """Disjoint parts of these sizes, the same on every machine: in the order of a hash of (seed, text).

    Equal texts count once, so that none lies in two parts. Raises DataError when there are too few.
    """
    unique = {example.text: example for example in examples}
    if sum(sizes) > len(unique):
        raise DataError(f"the split takes {sum(sizes)} different examples; the data has {len(unique)}")
    ordered = sorted(unique.values(), key=lambda one: blake3(f"{seed}\0{one.text}".encode()).digest())
    parts, start = [], 0
    for size in sizes:
        parts.append(ordered[start : start + size])
        start += size
    return parts


class PromptClassifier:
    """Turns examples into batches and a model's logits into loss and accuracy.

    A label is scored by the first token of its word. `tokenizer` is a transformers tokenizer; `most` limits a
    prompt's tokens, taken from the text's end. Raises DataError when two words begin with the same token or the
    template alone exceeds `most`.
    """

    def __init__(self, tokenizer: Any, prompt: Prompt, most: int) -> None:
        self._tokenizer = tokenizer
        before, after = prompt.template.split(HOLE)
        self._before, self._after = self._encode(before), self._encode(after)
        self._room = most - len(self._before) - len(self._after)
        if self._room < 1:
            raise DataError(f"the prompt template leaves no room for a text in {most} tokens; raise the length")
        first = [self._encode(word)[:1] for word in prompt.words]
        if not all(first) or len({tuple(ids) for ids in first}) < len(first):
            raise DataError(f"the label words {prompt.words} must begin with different tokens; choose others")
        self.label_tokens = torch.tensor([ids[0] for ids in first])

    def batch(self, examples: Sequence[Example]) -> Batch:
        """The examples' prompts, padded to the longest."""
        rows = [self._before + self._encode(one.text)[: self._room] + self._after for one in examples]
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.int64)
        for row, (tokens, marks) in zip(rows, zip(ids, mask, strict=True), strict=True):
            tokens[width - len(row) :] = torch.tensor(row)
            marks[width - len(row) :] = 1
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        return Batch(ids, mask, positions, torch.tensor([one.label for one in examples]))

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """(n, labels): the logits of the label words after each prompt."""
        only_last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        output = model(
            input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False, **only_last
        )
        scores: Tensor = output.logits[:, -1, self.label_tokens.to(batch.ids.device)].float()
        return scores

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy among the label words."""
        return F.cross_entropy(self.scores(model, batch), batch.labels)

    def accuracy(self, model: nn.Module, examples: Sequence[Example], size: int = 32) -> float:
        """The share of examples whose own word scores highest, in eval mode and without gradients."""
        training = model.training
        model.eval()
        device = next(model.parameters()).device
        right = 0
        with torch.no_grad():
            for start in range(0, len(examples), size):
                batch = self.batch(examples[start : start + size]).to(device)
                right += int((self.scores(model, batch).argmax(1) == batch.labels).sum())
        model.train(training)
        return right / len(examples)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []


def _examples(path: Path, lines: Sequence[str], labels: dict[str, int], columns: Columns) -> Iterator[Example]:
    places = (0, 1)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if path.suffix == ".tsv":
            header = line.rstrip("\r").split("\t") if number == 1 else []
            if {columns.label, columns.text} <= set(header):
                places = (header.index(columns.label), header.index(columns.text))
                continue
            label, text = _tsv(line, where, places)
        else:
            label, text = _json(line, where, columns)
        if label not in labels:
            raise DataError(f"{where}: the label {label!r} is none of {', '.join(labels)}")
        yield Example(text, labels[label])


def _tsv(line: str, where: str, places: tuple[int, int]) -> tuple[str, str]:
    plain = places == (0, 1)  # a text in the last column may hold tabs
    cells = line.rstrip("\r").split("\t", 1 if plain else -1)
    if len(cells) <= max(places):
        raise DataError(f"{where}: no tab; a line is label, tab, text" if plain else f"{where}: too few columns")
    return cells[places[0]].strip(), cells[places[1]]


def _json(line: str, where: str, columns: Columns) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); JSONL holds one object a line") from error
    if not isinstance(row, dict) or columns.label not in row or not isinstance(row.get(columns.text), str):
        raise DataError(f'{where}: an example is {{"{columns.label}": …, "{columns.text}": "…"}}')
    return str(row[columns.label]).strip(), row[columns.text]
