"""The RunSpec's table of the task: plain text, or classification by the word that follows a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from peerloom.protocol.spec_rules import Fault, choice, number, text
from peerloom.protocol.spec_table import Table

SLOT = "{text}"
SEPARATOR = "|"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec(Table):
    """What the loss is. Classification reads data.source as TSV with a header or JSONL, its text in data.text_field."""

    kind: Literal["text", "classification"] = choice(
        "text", "loss over all tokens, or over the label words after the prompt"
    )
    template: str = text(f"{SLOT} It was", f"the prompt, with {SLOT} for the row's text")
    label_field: str = text("label", "of TSV and JSONL rows", most=128)
    labels: str = text("0|1", "values of label_field, with | between")
    label_words: str = text(" terrible| great", "a word each, as the model writes it: mostly with a space before it")
    train_examples: int = number(0, 0, 10**9, "rows to train on, spread over the clients; 0: all that are not held out")

    def classes(self) -> tuple[tuple[str, str], ...]:
        """(label, word) pairs in the order of the spec."""
        return tuple(zip(self.labels.split(SEPARATOR), self.label_words.split(SEPARATOR), strict=True))

    def cross(self) -> Iterator[Fault]:
        if self.template.count(SLOT) != 1:
            yield Fault(("template",), f"{self.template!r}: must hold {SLOT} once")
        labels, words = self.labels.split(SEPARATOR), self.label_words.split(SEPARATOR)
        for key, found in (("labels", labels), ("label_words", words)):
            if len(set(found)) != len(found) or len(found) < 2 or not all(each.strip() for each in found):
                yield Fault((key,), f"{SEPARATOR.join(found)!r}: must be two or more, all different, none empty")
        if len(labels) != len(words):
            yield Fault(
                ("label_words", "labels"), f"{len(words)} words: must be as many as labels, which are {len(labels)}"
            )
