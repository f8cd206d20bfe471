"""Five SeedFlow nodes as real processes over gRPC, two killed, one without the base: one state, a central replay's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from peerloom.node.demo_seedflow import figures_of
from peerloom.node.failures import OK
from peerloom.node.flood_log import FloodLog
from peerloom.node.specs import load_spec
from peerloom.node.worker.memory import anonymous_file
from peerloom.node.worker.tasks.seedflow import SeedflowTask
from peerloom.node.worker.tokenizer import save_byte_tokenizer
from peerloom.node.worker_seams import WorkerSetup
from peerloom.protocol.flood_messages import Batch, FloodMessage, Segment
from peerloom.protocol.types import PeerId
from tests.helpers import Node, Swarm, run_peer, swarm_folder, write_run

pytestmark = pytest.mark.slow

NAMES = ["a", "b", "c", "d", "e"]
STEPS = 1000
START_S = 300.0  # six nodes import torch on a machine that may be busy
Report = Callable[[str, object], None]


SIZES = """
hidden_size = 32
intermediate_size = 48
layers = 1
heads = 2
kv_heads = 2
"""


def write_base(folder: Path) -> None:
    """A model of a few thousand parameters, and a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    save_byte_tokenizer(folder)


def write_seedflow_run(
    folder: Path, clients: int = len(NAMES), max_steps: int = STEPS, base: Path | None = None
) -> Path:
    """A run.toml of a tiny fine-tuning, over several subspaces; model and tokenizer lie in `base`, if that is given."""
    run = write_run(folder)
    named = "" if base is None else json.dumps(str(base))
    run.write_text(f"""
name = "tiny-seedflow"
method = "seedflow"
[model]{f"{chr(10)}path = {named}" if named else SIZES}
[data]
source = {json.dumps(str(folder / "text"))}
tokenizer = {named or '"bytes"'}
sequence_length = 32
held_out = 0.2
[train]
batch_size = 4
eval_batches = 4
[seedflow]
rank = 8
period = 260
clients = {clients}
learning_rate = 0.01
max_steps = {max_steps}
eval_every_steps = 100
""")
    return run


def messages_of(node: Node, peer: str) -> set[FloodMessage]:
    """All that a node's log holds."""
    log = FloodLog(node.run_dir, load_spec(node.run_dir / "run.toml").run_id, PeerId(peer))
    try:
        return {message for item in log.items if isinstance(item, Segment) for message in item.batch.messages()}
    finally:
        log.close()


def origins_at(node: Node, swarm: Swarm, names: list[str], copy: Path) -> bool:
    """Whether the log of a node that is running holds messages of all of these."""
    peers = {row["name"]: row["peer_id"] for row in (swarm.watcher().newest() or {"nodes": []})["nodes"]}
    if not {*names, node.name} <= peers.keys():
        return False
    copy.mkdir(exist_ok=True)
    shutil.copyfile(node.run_dir / "flood.log", copy / "flood.log")
    log = FloodLog(copy, load_spec(node.run_dir / "run.toml").run_id, PeerId(peers[node.name]))
    log.close()
    return {peers[name] for name in names} <= {item.batch.origin for item in log.items if isinstance(item, Segment)}


def replayed(node: Node, messages: set[FloodMessage], home: Path) -> SeedflowTask:
    """A worker of its own that applies them all at once."""
    spec = load_spec(node.run_dir / "run.toml")
    setup = WorkerSetup(spec=spec, peer_id=PeerId("central"), run_dir=home / "run", cache_dir=home / "cache", threads=1)
    task = SeedflowTask(setup, anonymous_file(), lambda what, share: None)
    task.apply(tuple(Batch(one.origin, one.sequence, one.step, (one.scalar,)) for one in sorted(messages)))
    return task


def flushed_on(node: Node) -> bool:
    """Whether it has flushed often since it first counted others' messages: some of its own have reached them."""
    linked = [event for event in node.events("flush") if event["messages"] > event["sequence"] + event["steps"]]
    return len(linked) >= 10


def settled(swarm: Swarm, live: list[str]) -> list[dict[str, Any]] | None:
    """The rows of the live trainers once all have taken their steps and say that they hold one state."""
    rows = [row for row in (swarm.watcher().newest() or {"nodes": []})["nodes"] if row["name"] in live]
    done = len(rows) == len(live) and all(row["step"] >= STEPS and row["messages"] for row in rows)
    return rows if done and len({(row["state_hash"], row["messages"]) for row in rows}) == 1 else None


def test_five_nodes_two_of_them_killed_hold_the_state_of_a_central_replay(
    tmp_path: Path, record_property: Report
) -> None:
    """From before the kills on the base is nowhere on the disk: who starts then has it from a peer."""
    with swarm_folder() as folder:
        variables = {"TMPDIR": str(folder / "tmp"), "PEER_CHECKPOINT_EVERY_S": "5"}
        base, hidden = folder / "base", folder / "hidden"
        write_base(base)
        swarm = Swarm(folder, write_seedflow_run(folder / "run", base=base), variables)
        try:
            swarm.start()
            nodes = [swarm.join(name, "--trust-paths") for name in NAMES[:-1]]
            for node in nodes:
                node.wait_for("flushes since it has a link", partial(flushed_on, node), START_S)
            others = ["b", "c", "d"]
            nodes[0].wait_for(
                "messages of all others", partial(origins_at, nodes[0], swarm, others, tmp_path / "copy"), START_S
            )
            base.rename(hidden)
            late = swarm.join(NAMES[-1])
            for victim in (swarm.nodes["b"], swarm.nodes["c"]):
                victim.process.kill()
                victim.process.wait()
                victim.expect_nothing_left()
            taken = len(swarm.nodes["b"].events("flush"))
            again = swarm.join("b")
            live = ["a", "b", "d", "e"]
            rows = swarm.nodes["a"].wait_for("one state on all", lambda: settled(swarm, live), START_S)
            assert len(again.events("flush")) >= taken
            peers = {row["name"]: row["peer_id"] for row in rows}
            for name in live:
                assert swarm.nodes[name].end(seconds=30.0) == OK
            figures = [figures_of(swarm.nodes[name].home) for name in live]
            assert {one.state_hash for one in figures} == {rows[0]["state_hash"]}
            union = set[FloodMessage]().union(*(messages_of(swarm.nodes[name], peers[name]) for name in live))
            assert len(union) == len({(one.origin, one.sequence) for one in union}) == figures[0].messages
            assert len({one.origin for one in union}) == len(NAMES), "the killed nodes' messages count"
            hidden.rename(base)
            central = replayed(swarm.nodes["a"], union, tmp_path)
            assert central.state_hash().hex() == figures[0].state_hash
            record_property("messages", len(union))
            for node in (late, again):
                (fetched,) = node.events("base_fetched")
                assert node.printed().startswith(f"fetched the base model for {fetched['bytes']} bytes; ")
                assert 0 < fetched["bytes"] - 2 * parameters_of(base) < 50_000, "as bf16, and the files"
            check_export(late, central, folder / "model")
        finally:
            swarm.stop()


def parameters_of(base: Path) -> int:
    """Of a folder that transformers wrote."""
    with safe_open(base / "model.safetensors", framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # it is no mapping


def check_export(node: Node, central: SeedflowTask, out: Path) -> None:
    """The exported model is the base with the sums."""
    from transformers import AutoModelForCausalLM

    done = run_peer("export", "--home", str(node.home), "--out", str(out))
    assert done.returncode == OK, done.stderr
    ids = torch.arange(20).view(1, 20) % 200
    with torch.no_grad():
        mine, theirs = (one(input_ids=ids).logits for one in (central.model, AutoModelForCausalLM.from_pretrained(out)))
    assert torch.allclose(mine, theirs, atol=1e-6)
