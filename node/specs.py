"""Run specs from files, from the package, and signed as they travel."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from peerloom.node.identity import Identity, verify
from peerloom.protocol.errors import AuthenticationError, ConfigError, LimitExceeded, MalformedMessage, SpecError
from peerloom.protocol.runspec import RunSpec, TrainSpec
from peerloom.protocol.spec_gasloc import for_swarm
from peerloom.protocol.spec_seedflow import for_fine_tuning
from peerloom.protocol.types import SignedSpec

MAX_SPEC_BYTES = 65_536
MAX_SIGNED_BYTES = 16_384  # a canonical text has no comments: the longest possible is below this
SIGNATURE_CONTEXT = b"peerloom-spec-v1\0"

HEADING = (
    "# A run of Peerloom: the same for all its nodes. Check it with `peer run check FILE`, start it with\n"
    "# `peer bootstrap --run FILE`. Every key may be left out; the values here are the defaults{but}.\n\n"
)
TEMPLATE = HEADING.format(but="") + RunSpec().template()


def template(method: str, nodes: int = 1) -> str:
    """A run.toml of a method with all its keys, for about so many nodes; raises SpecError for a method that is none.

    A pipeline's names what its late gradients want, SeedFlow's what fine-tuning does. A text that leaves these keys out
    has the defaults, AdamW in a pipeline too: its run id is that of its values, and the defaults stay.
    """
    if method == RunSpec().method:
        plain = RunSpec()
        spec = replace(plain, gasloc=for_swarm(nodes, plain.gasloc))
        if spec == plain:
            return TEMPLATE
        return HEADING.format(but=f", but [gasloc]'s form, which is for {nodes} nodes or so") + spec.template()
    spec = replace(RunSpec(), method=method)  # type: ignore[arg-type]  # template() says if it is none
    if method == "seedflow":
        keys = "`period`, `decay`, `clients` and `scalar_bound`"
        changed = f", but `method` and\n# {keys}, as fine-tuning wants them"
        return HEADING.format(but=changed) + replace(spec, seedflow=for_fine_tuning(nodes, spec.seedflow)).template()
    if method != "pipeline":
        return HEADING.format(but=", but `method`") + spec.template()
    changed = ", but `method`, `optimizer`, its rate and `beta2`"
    return HEADING.format(but=changed) + replace(spec, train=late_gradients(spec.train)).template()


def late_gradients(train: TrainSpec) -> TrainSpec:
    """With the optimizer that bears gradients of old weights, and the paper's memory of a thousand steps for its bases
    (arXiv 2602.03515: beta2 decays L, R and the second moment).

    That wants half the rate: the demo's updates 191 to 200 have a loss of 2.48 on average, 2.75 at the full rate, and
    2.50 at the full rate with beta2 = 0.95.
    """
    return replace(train, optimizer="basis_rotated", beta2=0.999, learning_rate=train.learning_rate / 2)


def load_spec(path: Path) -> RunSpec:
    """The spec of a file; raises ConfigError when it cannot be read, SpecError when it does not check."""
    return _parse(_read(path), str(path))


def embedded_spec() -> RunSpec:
    """The run that a node trains when it is given none."""
    return _parse(files("peerloom.node").joinpath("default_run.toml").read_text(encoding="utf-8"), "default_run.toml")


def demo_spec(method: str, nodes: int) -> RunSpec:
    """The embedded run for a method and a number of nodes; raises SpecError for a method that is none."""
    plain = embedded_spec()
    if method == "seedflow":
        return _seedflow_demo(plain, nodes)
    if method != "pipeline":
        return replace(plain, method=method)  # type: ignore[arg-type]  # check() says if it is none
    return replace(
        plain,
        name="stdlib-pipeline",
        method="pipeline",
        model=replace(plain.model, layers=max(plain.model.layers, nodes)),
        train=late_gradients(plain.train),
        pipeline=replace(plain.pipeline, stages=nodes),
    )


def _seedflow_demo(plain: RunSpec, nodes: int) -> RunSpec:
    """Fine-tunes the upper half of a smaller model; where it lies, and the text, is for the demo to fill in."""
    return replace(
        plain,
        name="stdlib-seedflow",
        method="seedflow",
        model=replace(plain.model, hidden_size=64, intermediate_size=176),
        data=replace(plain.data, sequence_length=64),
        train=replace(plain.train, batch_size=4, eval_batches=16),
        seedflow=replace(
            plain.seedflow,
            rank=16,
            learning_rate=0.02,
            clients=nodes,
            trainable=r"layers\.1\.|norm",
            max_steps=300,
            eval_every_steps=50,
        ),
    )


def sign_spec(spec: RunSpec, identity: Identity) -> SignedSpec:
    """The spec as it travels, owned and signed by `identity`; raises SpecError."""
    text = spec.canonical()
    return SignedSpec(text=text, owner=identity.peer_id, signature=identity.sign(SIGNATURE_CONTEXT + text.encode()))


def verify_spec(signed: SignedSpec) -> RunSpec:
    """The spec a peer handed over.

    Raises LimitExceeded, AuthenticationError when the owner did not sign this text, or MalformedMessage when the text
    is no spec or not its canonical form.
    """
    data = _signed_bytes(signed.text)
    if not verify(signed.owner, SIGNATURE_CONTEXT + data, signed.signature):
        raise AuthenticationError(f"the run spec is not signed by its owner {signed.owner!r:.80}")
    try:
        spec = RunSpec.from_toml(signed.text)
    except SpecError as error:
        shown = "; ".join(error.problems[:3])
        raise MalformedMessage(f"the run spec signed by {signed.owner} does not check: {shown}") from error
    if spec.canonical() != signed.text:
        raise MalformedMessage(f"the run spec signed by {signed.owner} is not in canonical form")
    return spec


def _signed_bytes(text: str) -> bytes:
    try:
        data = text[: MAX_SIGNED_BYTES + 1].encode()
    except UnicodeEncodeError as error:
        raise MalformedMessage("the run spec is not valid text") from error
    if len(data) > MAX_SIGNED_BYTES:
        raise LimitExceeded(f"the run spec is longer than {MAX_SIGNED_BYTES} bytes")
    return data


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the run spec {path}: {error.strerror}; name a TOML file") from error
    if len(data) > MAX_SPEC_BYTES:
        raise ConfigError(f"the run spec {path} is larger than {MAX_SPEC_BYTES} bytes; is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the run spec {path} is not UTF-8 text (byte {error.start}); is it the right file?"
        ) from error


def _parse(source: str, name: str) -> RunSpec:
    try:
        return RunSpec.from_toml(source)
    except SpecError as error:
        raise SpecError([f"{name}: {problem}" for problem in error.problems]) from error
