"""Prompt classification: files, splits, batches, scores; faults named with file and line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from peerloom.node.worker.classification import Example, Prompt, PromptClassifier, read_examples, split
from peerloom.node.worker.model import build_model
from peerloom.protocol.errors import DataError
from peerloom.protocol.runspec import RunSpec
from tests.unit.node.tiny import MODEL

PROMPT = Prompt("{text} It was", (" bad", "good"))


class Bytes:
    """A tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


def classifier(most: int = 40) -> PromptClassifier:
    return PromptClassifier(Bytes(), PROMPT, most)


def test_tsv_and_jsonl_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\tA fine film.\n\ngood\tTab\there\r\n0\tDull…\n")
    rows = ['{"label": 1, "text": "A fine film."}', '{"label": "good", "text": "Tab\\there"}',
            '{"text": "Dull…", "label": "0"}']  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    expected = [Example("A fine film.", 1), Example("Tab\there", 1), Example("Dull…", 0)]
    assert read_examples(tmp_path / "a.tsv", PROMPT.words) == expected
    assert read_examples(tmp_path / "a.jsonl", PROMPT.words) == expected


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.tsv", b"1\tfine\n1 no tab\n", "line 2: no tab"),
        ("a.tsv", b"2\tfine\n", "line 1: the label '2' is none of 0, 1, bad, good"),
        ("a.tsv", b"\n", "holds no example"),
        ("a.tsv", b"1\t\xff\n", r"not UTF-8 \(byte 3\)"),
        ("a.jsonl", b'{"label": 1, "text": "x"}\n{"label": 1\n', "line 2: not JSON"),
        ("a.jsonl", b'{"label": 1, "text": 5}\n', "line 1: an example is"),
        ("a.jsonl", b"[1]\n", "line 1: an example is"),
        ("a.csv", b"", "none of .tsv, .jsonl"),
    ],
)
def test_faults_are_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_examples(tmp_path / name, PROMPT.words)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_examples(tmp_path / "none.tsv", PROMPT.words)


def test_parts_are_disjoint_and_the_same_whatever_the_order() -> None:
    examples = [Example(f"text {number % 90}", number % 2) for number in range(100)]
    parts = split(examples, 3, [50, 20, 20])
    assert [len(part) for part in parts] == [50, 20, 20]
    texts = [example.text for part in parts for example in part]
    assert len(set(texts)) == 90
    again = split(sorted(examples[:90], key=lambda one: one.text), 3, [50, 20, 20])
    assert [example.text for part in again for example in part] == texts
    assert [example.text for part in split(examples, 4, [90]) for example in part] != texts
    with pytest.raises(DataError, match="takes 91 different examples; the data has 90"):
        split(examples, 3, [91])


def test_prompts_end_in_the_last_column_and_long_texts_are_cut() -> None:
    batch = classifier(20).batch([Example("ab", 1), Example("x" * 50, 0)])
    assert batch.ids.shape == (2, 20)
    assert bytes(batch.ids[1].tolist()) == b"x" * 13 + b" It was"
    assert bytes(batch.ids[0, 11:].tolist()) == b"ab It was" and batch.mask[0].tolist() == [0] * 11 + [1] * 9
    assert batch.positions[0, 11:].tolist() == list(range(9))
    assert batch.labels.tolist() == [1, 0]


def test_padding_changes_no_score_and_the_label_words_are_compared() -> None:
    model = build_model(replace(RunSpec(), model=MODEL))
    short, long = Example("ab", 1), Example("x" * 30, 0)
    scorer = classifier()
    with torch.no_grad():
        both = scorer.scores(model, scorer.batch([short, long]))
        alone = scorer.batch([short])
        torch.testing.assert_close(both[:1], scorer.scores(model, alone), rtol=1e-4, atol=1e-5)
        logits = model(input_ids=alone.ids).logits[0, -1]
    torch.testing.assert_close(both[0], logits[[ord(" "), ord("g")]], rtol=1e-4, atol=1e-5)
    loss = nn.functional.cross_entropy(both, torch.tensor([1, 0]))
    torch.testing.assert_close(scorer.loss(model, scorer.batch([short, long])), loss)


def test_accuracy_counts_the_likelier_word_and_keeps_the_mode() -> None:
    model = build_model(replace(RunSpec(), model=MODEL)).train()
    scorer = classifier()
    examples = [Example(f"text {number}", 0) for number in range(5)]
    with torch.no_grad():
        found = scorer.scores(model, scorer.batch(examples)).argmax(1).tolist()
    labelled = [replace(one, label=label) for one, label in zip(examples, found, strict=True)]
    assert scorer.accuracy(model, labelled, size=2) == 1
    wrong = [replace(labelled[0], label=1 - labelled[0].label), *labelled[1:]]
    assert scorer.accuracy(model, wrong, size=2) == 0.8
    assert model.training


@pytest.mark.parametrize(
    ("template", "words", "said"),
    [("none", ("a", "b"), "must hold"), ("{text}{text}", ("a", "b"), "must hold"), ("{text}", ("a",), "two or more"),
     ("{text}", ("a", "a"), "all different")],
)  # fmt: skip
def test_prompts_that_are_none(template: str, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(DataError, match=said):
        Prompt(template, words)


def test_words_that_begin_alike_and_templates_that_fill_the_room() -> None:
    with pytest.raises(DataError, match="begin with different tokens"):
        PromptClassifier(Bytes(), Prompt("{text}", (" bad", " good")), 40)
    with pytest.raises(DataError, match="no room"):
        classifier(7)
