from __future__ import annotations

import math
import pickle
import tomllib
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerloom.protocol.errors import SpecError
from peerloom.protocol.runspec import DataSpec, ModelSpec, RunSpec, TrainSpec
from peerloom.protocol.spec_gasloc import GaslocSpec, stable_alpha
from peerloom.protocol.spec_pipeline import PipelineSpec
from peerloom.protocol.spec_rules import RULE, NumberRule, TextRule
from peerloom.protocol.spec_seedflow import SeedflowSpec
from peerloom.protocol.spec_task import TaskSpec
from peerloom.protocol.spec_toml import MAX_SPEC_CHARS

# What no field of a kind may hold, whatever its rule: a field added without a rule fails here.
BAD: dict[Any, list[Any]] = {
    int: [-1, 2**70, 2**20000, 1.5, True, "8", None],
    float: [-1.0, 1e30, 2**20000, math.nan, math.inf, -math.inf, True, "0.5", None],
    str: ["x" * 5000, "a\nb", "a\0b", "\ud800", 7, False, None],
    bool: [0, 1, "true", None],
    Literal: ["no such option", "", 1, None],
}


def leaves(kind: type, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, hint in get_type_hints(kind).items():
        found += leaves(hint, f"{prefix}{name}.") if is_dataclass(hint) else [(prefix + name, hint)]  # type: ignore[arg-type]
    return found


def with_value(spec: RunSpec, key: str, value: Any) -> RunSpec:
    table, _, name = key.rpartition(".")
    if not table:
        return replace(spec, **{name: value})
    return replace(spec, **{table: replace(getattr(spec, table), **{name: value})})


CASES = [(key, value) for key, hint in leaves(RunSpec) for value in BAD[get_origin(hint) or hint]]


@pytest.mark.parametrize(("key", "value"), CASES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(CASES)])
def test_every_field_refuses_what_it_cannot_hold(key: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        with_value(RunSpec(), key, value).check()
    assert [p for p in caught.value.problems if p.startswith(f"{key} = ")] == caught.value.problems


@pytest.mark.parametrize("key", [key for key, _ in leaves(RunSpec)])
def test_every_field_is_named_with_its_line(key: str) -> None:
    table, _, name = key.rpartition(".")
    source = f"# first\n[{table}]\n{name} = []\n" if table else f"# first\n\n{name} = []\n"
    with pytest.raises(SpecError) as caught:
        RunSpec.from_toml(source)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"line 3: {key} = []: must be ")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (ModelSpec(hidden_size=130), "hidden_size = 130: must be a multiple of heads, which is 4"),
        (ModelSpec(hidden_size=132), "must be even"),
        (ModelSpec(kv_heads=3), "kv_heads = 3: must divide heads, which is 4"),
        (ModelSpec(layers=1024, hidden_size=65536), "at most 1e+11"),
        (TrainSpec(warmup_steps=10, total_steps=10), "warmup_steps = 10: must be below total_steps, which is 10"),
        (GaslocSpec(alpha=2.4), "must be below 1.93 with gamma = 0.2 and momentum = 'pre'"),
        (GaslocSpec(alpha=1.5, gamma=0.9, momentum="post"), "'rendezvous' loses consensus; must be below 0.85"),
        (GaslocSpec(alpha=0.0), "above 0"),
        (GaslocSpec(eta=0.0), "above 0"),
        (GaslocSpec(clip_radius=0.5), "clip_radius = 0.5: must be 0 or at least 1"),
        (GaslocSpec(round_s=-1.0), "round_s = -1.0: must be a number from 0 to 86400"),
        (GaslocSpec(local_steps=3, fragments=4), "fragments = 4: must be at most local_steps, which is 3"),
        (TrainSpec(muon_learning_rate=0.0), "above 0"),
        (TrainSpec(rotation_freq=0), "an integer from 1"),
        (TrainSpec(rotation_source="3rd"), "one of '1st', '2nd'"),  # type: ignore[arg-type]
        (TrainSpec(optimizer="sgd"), "one of 'adamw', 'muon', 'soap', 'basis_rotated'"),  # type: ignore[arg-type]
        (GaslocSpec(gamma=1.0), "below 1"),
        (GaslocSpec(match_timeout_s=0.0), "above 0"),
        (DataSpec(held_out=0.5), "below 0.5"),
        (DataSpec(held_out=0.0), "above 0"),
        (RunSpec(name="../x"), "letters, digits"),
        (
            RunSpec(model=ModelSpec(vocab_size=255)),
            'model.vocab_size = 255: must be at least 256 with data.tokenizer = "b',
        ),
        (RunSpec(train=TrainSpec(batch_size=65536), data=DataSpec(sequence_length=2048)), "must be at most 32768"),
        (
            RunSpec(method="pipeline", gasloc=GaslocSpec(pairing="scheduled")),
            "gasloc.pairing = 'scheduled': must be 'rendezvous' with method = \"pipeline\"",
        ),
        (
            RunSpec(method="pipeline", gasloc=GaslocSpec(alpha=1.5)),
            "gasloc.alpha = 1.5: a pair diverges; must be below 1.4 with overlap",
        ),
        (RunSpec(model=3), "model = 3: must be a table"),  # type: ignore[arg-type]
    ],
)
def test_edges_and_faults_between_fields(spec: Any, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec.check()
    assert len(caught.value.problems) == 1 and problem in caught.value.problems[0]


def test_what_is_allowed_at_the_edges() -> None:
    RunSpec(model=ModelSpec(vocab_size=100), data=DataSpec(tokenizer="hub/name")).check()
    RunSpec(model=ModelSpec(vocab_size=100, path="hub/name")).check()
    GaslocSpec(alpha=1.99, eta=10, gamma=0, max_round_skew=0).check()
    GaslocSpec(alpha=1.92).check()
    GaslocSpec(local_steps=3, fragments=4, round_s=3.0).check()
    RunSpec(method="pipeline", gasloc=GaslocSpec(round_s=3.0)).check()
    TrainSpec(warmup_steps=0, total_steps=1, clip_norm=0, learning_rate=1).check()


@pytest.mark.parametrize("momentum", ["pre", "post"])
@pytest.mark.parametrize("gamma", [0.0, 0.2, 0.5, 0.9])
def test_the_bound_on_alpha_is_where_a_pair_starts_to_diverge(momentum: Literal["pre", "post"], gamma: float) -> None:
    def disagreement(alpha: float) -> float:
        """|theta_0 - theta_1| after 4000 rounds without drift, from 1: `y` is its mode, contracted by 1 - alpha."""
        theta = y_prev = x_prev = 1.0
        for _ in range(4000):
            y, x = theta, theta - alpha * theta
            theta = x + gamma * (y - y_prev if momentum == "pre" else x - x_prev)
            y_prev, x_prev = y, x
            if abs(theta) > 1e6:
                break
        return abs(theta)

    limit = stable_alpha(gamma, momentum)
    assert disagreement(limit * 0.99) < 1e-3
    assert disagreement(limit * 1.01) > 1e3


SOURCE = """\
name = "a run"          # 1
eta = 3
[model]                 # 3
hidden_size = 130
heads = 4.0
"kv_heads" = true
[train]                 # 7
note = '''
learning_rate = 1
'''
learning_rate = nan
total_steps = 10
[gasloc]                # 13
momentun = "post"
pairing = "x"
[data]
held_out = 0.5
[gaslog]
alpha = 1.0
"""


def test_all_faults_come_at_once_with_line_value_and_the_closest_key() -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.from_toml(SOURCE)
    slug = "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
    assert caught.value.problems == [
        f"line 1: name = 'a run': must be {slug}",
        "line 2: eta = 3: no such key; the closest known one is gasloc.eta",
        "line 5: model.heads = 4.0: must be an integer from 1 to 1024",
        "line 6: model.kv_heads = true: must be an integer from 1 to 1024",
        "line 8: train.note = 'learning_rate = 1\\n': no such key; the closest known one is train.optimizer",
        "line 11: train.learning_rate = nan: must be a number above 0 and at most 10",
        "line 12: train.warmup_steps = 40: must be below total_steps, which is 10",
        "line 14: gasloc.momentun = 'post': no such key; the closest known one is gasloc.momentum",
        "line 15: gasloc.pairing = 'x': must be one of 'rendezvous', 'scheduled', 'two_peer', 'ring', 'torus', "
        "'complete', 'regular', 'hypercube', 'exponential', 'base'",
        "line 17: data.held_out = 0.5: must be a number above 0 and below 0.5",
        "line 18: gaslog = a table: no such key; the closest known one is gasloc",
    ]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("seed = 2\nmodel.heads = 0", 2),
        ("seed = 2\nmodel = { layers = 2, heads = 0 }", 2),
        ('"model" . "heads" = 0', 1),
        ("[ model ]\r\n# heads = 4\r\n\r\nheads = 0", 4),
        ('[model]\npath = """\nheads = 4\n\\"""heads = 3"""\nheads = 0', 5),
        ("[data]\nheads = [[1,\n2], {heads = 3}]\n[model]\nheads = 0", 5),
    ],
)
def test_the_line_of_a_key_in_every_way_to_write_it(source: str, line: int) -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.from_toml(source)
    assert any(p.startswith(f"line {line}: model.heads = 0: ") for p in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("name = ", "not TOML: "),
        ("seed = 1\nseed = 2", "not TOML: "),
        ("seed = " + "9" * 5000, "not TOML: "),
        ("seed = 0x" + "f" * 5000, "an integer of 20000 bits"),
        ("x" * (MAX_SPEC_CHARS + 1), "characters; at most"),
        ("\n" + ".".join("a" * 30_000) + " = 1", "line 2: more than 8 levels deep"),
        ("[" + ".".join("a" * 30_000) + "]", "line 1: more than 8 levels deep"),
        ('"a\\"b"' + '."a\\"b"' * 6000 + " = 1", "line 1: more than 8 levels deep"),
        ("a = " + "[" * 30_000, "line 1: more than 8 levels deep"),
        ("a = " + "{a=" * 20_000, "line 1: more than 8 levels deep"),
        ("a = '" + "'''" * 9000, "not TOML: "),
        ('"\\u001b[2J" = 1', "'\\x1b[2J'"),
        ("\n".join(f"k{i} = 1" for i in range(6000)), "k5999 = 1: no such key"),
    ],
)
def test_hostile_text_ends_in_a_sentence(source: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.from_toml(source)
    assert problem in str(caught.value) and "\x1b" not in str(caught.value)


def values(item: Any, hint: Any) -> st.SearchStrategy[Any]:
    rule = item.metadata.get(RULE)
    if item.name == "digest":
        return st.just("")  # else it is hex and hangs on path and method
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if hint is bool:
        return st.booleans()
    if isinstance(rule, TextRule):
        plain = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=40).map(lambda t: "x" + t)
        return st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True) if rule.slug else plain
    assert isinstance(rule, NumberRule)
    if hint is int:
        most = rule.high if item.name in ("seed", "token_budget") else min(rule.high, rule.low + 999)
        return st.integers(int(rule.low), int(most))
    reals = st.floats(rule.low, rule.high, exclude_min=rule.open_low, exclude_max=rule.open_high)
    whole = int(rule.low) + 1  # an int is a float too
    return reals | st.just(whole) if rule.holds(whole) else reals


TIED: dict[type, tuple[str, ...]] = {
    ModelSpec: ("hidden_size", "heads", "kv_heads", "layers", "intermediate_size", "vocab_size"),
    DataSpec: (),
    TrainSpec: ("warmup_steps", "total_steps"),
    GaslocSpec: (
        *("alpha", "gamma", "momentum", "pairing", "clip_radius"),
        *("weights", "group_size", "fragments", "local_steps", "round_s", "overlap"),
    ),
    TaskSpec: ("template", "labels", "label_words"),
    SeedflowSpec: ("max_steps", "scalar_bound", "fraction_bits", "period", "rate_burst", "flush_steps", "trainable"),
    PipelineSpec: ("heartbeat_s", "dead_after_s"),
    RunSpec: ("model", "data", "train", "task", "method"),
}


def tables(kind: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    parts = {
        f.name: tables(hints[f.name]) if is_dataclass(hints[f.name]) else values(f, hints[f.name]) for f in fields(kind)
    }

    def repair(table: Any) -> Any:
        try:
            table.check()
        except SpecError:  # between fields: those go back to their defaults, the rest stays as drawn
            return replace(table, **{name: getattr(kind(), name) for name in TIED[kind]})
        return table

    return st.builds(kind, **parts).map(repair)


@settings(max_examples=60, deadline=None)
@given(tables(RunSpec))
def test_the_canonical_text_gives_the_spec_back(spec: RunSpec) -> None:
    text = spec.canonical()
    assert RunSpec.from_toml(text) == spec
    assert RunSpec.from_toml(text).canonical() == text
    assert RunSpec.from_toml(spec.template()) == spec
    assert spec.spec_hash()[:16] == spec.run_id


def test_equal_specs_have_equal_text() -> None:
    ints = RunSpec(train=TrainSpec(clip_norm=1, weight_decay=-0.0))
    floats = RunSpec(train=TrainSpec(clip_norm=1.0, weight_decay=0.0))
    assert ints == floats and ints.canonical() == floats.canonical()
    assert RunSpec.from_toml("[train]\nclip_norm = 1\nweight_decay = -0.0\n").canonical() == floats.canonical()


LATER = {"model.digest", "seedflow.version"}  # keys that came when there were runs already
DIGEST = "0123456789abcdef" * 4


def test_run_ids_of_texts_without_later_keys_stay_and_seedflows_are_new() -> None:
    """An id is written in every invite, and names the folder in every home."""
    assert RunSpec().run_id == "caf5c1e65c7ee7ae" and replace(RunSpec(), method="pipeline").run_id == "25251ec073f0d60c"
    assert RunSpec.from_toml('[model]\ndigest = ""\n[seedflow]\nversion = 4\n').run_id == RunSpec().run_id
    named = replace(RunSpec(), model=ModelSpec(path="hub/name", digest=DIGEST))
    assert f'digest = "{DIGEST}"' in named.canonical() and named.run_id != RunSpec().run_id
    assert RunSpec.from_toml(named.canonical()) == RunSpec.from_toml(named.template()) == named
    flood = replace(RunSpec(), method="seedflow")
    assert "\nversion = 4\n" in flood.canonical() and flood.run_id != "349e51d1ecd6ff95"


@pytest.mark.parametrize("text", ["abc", DIGEST.upper(), DIGEST + "0", " " + DIGEST[1:]])
def test_a_digest_is_64_hex_digits_and_no_pipelines(text: str) -> None:
    with pytest.raises(SpecError, match=r"digest = .*must be empty or the 64 hex digits"):
        ModelSpec(digest=text).check()
    with pytest.raises(SpecError, match=r"digest = .*must be empty without a path"):
        ModelSpec(digest=DIGEST).check()
    with pytest.raises(SpecError, match=r"model\.digest = .*must be empty with method = \"pipeline\""):
        RunSpec(method="pipeline", model=ModelSpec(path="hub/name", digest=DIGEST)).check()


def test_canonical_holds_every_key_and_every_change_changes_the_run_id() -> None:
    flat = tomllib.loads(RunSpec().canonical())
    held = {
        k if not isinstance(v, dict) else f"{k}.{n}"
        for k, v in flat.items()
        for n in (v if isinstance(v, dict) else [""])
    }
    assert held == {key for key, _ in leaves(RunSpec)} - LATER
    ids = {RunSpec().run_id, replace(RunSpec(), seed=2).run_id, with_value(RunSpec(), "gasloc.eta", 0.9).run_id}
    assert len(ids) == 3 and all(len(run_id) == 16 and int(run_id, 16) >= 0 for run_id in ids)


def test_a_bad_spec_has_no_run_id() -> None:
    with pytest.raises(SpecError):
        _ = RunSpec(seed=-1).run_id


def test_the_hash_is_made_once_an_object_and_follows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec()
    first = spec.run_id
    made = []
    monkeypatch.setattr(RunSpec, "canonical", lambda self: made.append(self) or f"other {self.seed}")
    assert spec.run_id == first and not made
    copy, other = pickle.loads(pickle.dumps(spec)), replace(spec, seed=2)
    assert copy == spec and copy.run_id != first and other.run_id not in (first, copy.run_id)
    assert len(made) == 2
