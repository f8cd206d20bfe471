from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from peerloom.node.identity import Identity
from peerloom.node.specs import (
    MAX_SPEC_BYTES,
    TEMPLATE,
    demo_spec,
    embedded_spec,
    load_spec,
    sign_spec,
    template,
    verify_spec,
)
from peerloom.optim.groups import copies_sent
from peerloom.protocol.errors import (
    AuthenticationError,
    ConfigError,
    LimitExceeded,
    MalformedMessage,
    ProtocolError,
    SpecError,
)
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_gasloc import for_swarm
from peerloom.protocol.types import SignedSpec

ROOT = Path(__file__).parents[3]
PIPELINE_ID = "25251ec073f0d60c"  # of a run.toml that says `method = "pipeline"` and no more


def test_the_embedded_spec_checks_and_reads_text_every_machine_has() -> None:
    spec = embedded_spec()
    assert (spec.data.source, spec.data.tokenizer, spec.model.path) == ("stdlib", "bytes", "")
    assert spec == replace(RunSpec(), name="stdlib-llama", gasloc=replace(RunSpec().gasloc, round_s=3.0))


def test_the_template_is_the_defaults_and_comments_every_key() -> None:
    assert RunSpec.from_toml(TEMPLATE) == RunSpec()
    said = tomllib.loads(TEMPLATE)
    assert said["model"].pop("digest") == "", "which no canonical text says, or all run ids of before would change"
    assert said == tomllib.loads(RunSpec().canonical())
    lines = TEMPLATE.splitlines()
    assert all(lines[i - 1].startswith("#") for i, line in enumerate(lines) if " = " in line and line[0] != "#")


def test_the_example_in_deploy_is_the_template() -> None:
    assert (ROOT / "deploy/run.example.toml").read_text() == TEMPLATE, "write peerloom.node.specs.TEMPLATE to it"


def test_the_pipeline_s_template_and_demo_name_the_optimizer_that_bears_delay() -> None:
    """While a text without these keys is the run that it was."""
    spec = RunSpec.from_toml(template("pipeline"))
    assert spec.train == replace(RunSpec().train, optimizer="basis_rotated", beta2=0.999, learning_rate=2.5e-3)
    assert spec == replace(RunSpec(), method="pipeline", train=spec.train)
    demo = demo_spec("pipeline", 4)
    assert (demo.train.optimizer, demo.train.beta2, demo.pipeline.stages) == ("basis_rotated", 0.999, 4)
    plain = RunSpec.from_toml('method = "pipeline"\n')
    assert (plain.train, plain.run_id) == (RunSpec().train, PIPELINE_ID)
    assert template("gasloc") == TEMPLATE
    with pytest.raises(SpecError, match="method"):
        template("magic")


def test_seedflow_s_template_is_what_fine_tuning_wants_and_weighs_messages_by_the_nodes() -> None:
    spec = RunSpec.from_toml(template("seedflow"))
    assert spec == replace(RunSpec(), method="seedflow", seedflow=spec.seedflow)
    chosen = (spec.seedflow.period, spec.seedflow.scalar_bound, spec.seedflow.decay)
    assert chosen == (100, 1.0, "linear")
    assert spec.seedflow.clients == 16
    few = RunSpec.from_toml(template("seedflow", 4))
    assert few == replace(spec, seedflow=replace(spec.seedflow, clients=4))
    named = "# `period`, `decay`, `clients` and `scalar_bound`, as fine-tuning wants them."
    assert named in template("seedflow", 4).splitlines()[2]


def test_the_template_for_many_nodes_is_the_frontier_s_form_at_the_plain_one_s_bytes() -> None:
    assert template("gasloc", 7) == TEMPLATE
    many, plain = RunSpec.from_toml(template("gasloc", 16)), RunSpec().gasloc
    form = (many.gasloc.pairing, many.gasloc.group_size, many.gasloc.fragments, many.gasloc.momentum)
    assert form == ("hypercube", 4, 4, "post")
    assert copies_sent(4) / many.gasloc.local_steps == pytest.approx(1 / plain.local_steps)
    assert "but [gasloc]'s form" in template("gasloc", 16)
    timed = for_swarm(16, embedded_spec().gasloc)
    timed.check()
    assert timed.round_s == 1.5 * embedded_spec().gasloc.round_s


def test_a_file_is_read_with_and_without_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbfseed = 5\r\n")
    assert load_spec(file) == RunSpec(seed=5)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (None, "cannot read the run spec"),
        (b"\x80\x02\x00", "is not UTF-8 text (byte 0)"),
        (b"#" * (MAX_SPEC_BYTES + 1), f"is larger than {MAX_SPEC_BYTES} bytes"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path: Path, data: bytes | None, sentence: str) -> None:
    file = tmp_path / "run.toml"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_spec(file)
    assert str(file) in str(caught.value) and sentence in str(caught.value)


def test_a_folder_is_no_spec(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the run spec"):
        load_spec(tmp_path)


def test_every_problem_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = -1\n[gasloc]\netta = 1\n")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert [p.partition(": ")[0] for p in caught.value.problems] == [str(file), str(file)]
    assert "line 3: gasloc.etta = 1: no such key; the closest known one is gasloc.eta" in caught.value.problems[1]


def test_a_signed_spec_comes_back() -> None:
    owner = Identity.generate()
    spec = RunSpec(name="mine", seed=9)
    signed = sign_spec(spec, owner)
    assert verify_spec(signed) == spec and signed.owner == owner.peer_id


def signed_text(text: str) -> SignedSpec:
    owner = Identity.generate()
    return SignedSpec(text=text, owner=owner.peer_id, signature=owner.sign(b"peerloom-spec-v1\0" + text.encode()))


def forged() -> list[tuple[SignedSpec, type[ProtocolError]]]:
    good = sign_spec(RunSpec(), Identity.generate())
    other = Identity.generate()
    return [
        (replace(good, text=good.text.replace("seed = 1", "seed = 2")), AuthenticationError),
        (replace(good, owner=other.peer_id), AuthenticationError),
        (replace(good, signature=b""), AuthenticationError),
        (replace(good, signature=other.sign(good.text.encode())), AuthenticationError),
        (replace(good, owner="not a peer id"), AuthenticationError),  # type: ignore[arg-type]
        (replace(good, text=good.text + "#" * 20_000), LimitExceeded),
        (replace(good, text="\ud800"), MalformedMessage),
        (signed_text("seed = 1\n"), MalformedMessage),
        (signed_text(good.text + "# more\n"), MalformedMessage),
        (signed_text(good.text.replace("seed = 1", "seed = -1")), MalformedMessage),
        (signed_text("\x00"), MalformedMessage),
    ]


@pytest.mark.parametrize(("signed", "error"), forged())
def test_a_forged_or_malformed_spec_is_refused(signed: SignedSpec, error: type[ProtocolError]) -> None:
    with pytest.raises(error) as caught:
        verify_spec(signed)
    assert type(caught.value) is error and len(str(caught.value)) < 1000
