"""What the benchmark of SeedFlow stands on: the upper layers are the model's own, flooding reaches all, hops matter."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peerloom.node.worker.classification import Example, Prompt, PromptClassifier
from peerloom.optim.subcge import FRACTION_BITS, MeZO, SubCGE
from tests.benchmarks import seedflow_swarm
from tests.benchmarks.seedflow import payload_rows
from tests.benchmarks.seedflow_flooded import OPT_1_3B, complete, encode, first_order_bytes, flood, ring
from tests.benchmarks.seedflow_hops import Delayed, perform
from tests.benchmarks.seedflow_last import LastLayer
from tests.benchmarks.seedflow_quality import UPPER, Data, Run, Store, final, measure
from tests.benchmarks.seedflow_report import SWARMS, mean_curve, rows
from tests.benchmarks.seedflow_search import ceiling, climb, climb_finely
from tests.benchmarks.seedflow_swarm import MeZOSwarm, TableMeZO
from tests.benchmarks.seedflow_upper import Cached, UpperLayers, lower_activations


class Bytes:
    """A tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def test_upper_layers_give_the_whole_models_logits() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: Any = LlamaForCausalLM(config).eval()
    classifier = PromptClassifier(Bytes(), Prompt("{text} It was", (" bad", "good")), 40)
    examples = [Example("x" * length, length % 2) for length in (1, 7, 20, 3)]
    cached = lower_activations(model, 2, classifier, examples)
    upper = UpperLayers(model, 2, classifier.label_tokens)
    with torch.no_grad():
        expected = classifier.scores(model, classifier.batch(examples))
        torch.testing.assert_close(upper(cached.pick(torch.arange(4))), expected, rtol=1e-2, atol=2e-3)
        torch.testing.assert_close(upper(cached.pick(torch.tensor([3, 0]))), expected[[3, 0]], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("clients", [4, 7, 16])
def test_every_message_crosses_every_edge_of_a_ring_about_once(clients: int) -> None:
    found = flood(ring(clients), 10, 5, lambda chance: -1)
    assert set(found.known) == {10 * clients}
    batch = len(encode(0, 0, [-1] * 5))
    assert batch == 8
    crossings = sum(found.edges.values()) / batch / 2 / clients / clients
    assert crossings == (1 if clients % 2 == 0 else 1 + 1 / clients)
    assert set(flood(complete(clients), 10, 5, lambda chance: 0).known) == {10 * clients}


def test_payload_at_the_papers_setting_is_below_the_papers() -> None:
    rows = {row.name: row for row in payload_rows()}
    assert rows["payload_plain_per_edge"].ratio < 1
    assert rows["payload_chocosgd_lora_opt"].ratio < 1 / 47


def test_other_methods_bytes_are_the_papers() -> None:
    found = first_order_bytes(OPT_1_3B, 100)
    assert found["DSGD"] == pytest.approx(526e9, rel=0.01)
    assert found["ChocoSGD"] == pytest.approx(15.79e9, rel=0.01)
    assert found["DSGD-LoRA"] == pytest.approx(629.1e6, rel=0.01)
    assert found["ChocoSGD-LoRA"] == pytest.approx(18.8e6, rel=0.01)


def test_with_hops_of_the_diameter_a_ring_is_the_complete_graph() -> None:
    runs = (("complete", 1), ("ring", 8), ("ring", 1))
    whole, around, short = (perform(Delayed(graph=graph, hops=hops, steps=15)) for graph, hops in runs)
    assert whole["hashes"] == around["hashes"] == 1 and short["hashes"] > 1
    assert whole["loss"] == around["loss"] != short["loss"]


@pytest.mark.parametrize("trainable", [r"_proj\.weight$", r"(q|o|down)_proj\.weight$"])
def test_all_clients_estimates_in_one_pass_are_each_ones_own_whatever_was_applied(trainable: str) -> None:
    upper, data = small_upper()
    lr = 1e-2
    flow = SubCGE(upper, rank=4, period=2, eps=1e-2, lr=lr, run_seed=1, trainable=trainable)
    last = LastLayer(upper, data, lr / 2**FRACTION_BITS)
    rows = torch.tensor([4, 0, 1, 1, 3, 5])
    for step in range(5):
        flow.advance(step)
        if step % 2 == 0:
            last.begin(flow)
        seeds = [flow.seed_of(client, step) for client in range(3)]
        together = last.estimate(flow, rows, seeds)
        for client, seed in enumerate(seeds):
            part = data.pick(rows[2 * client : 2 * client + 2])

            def loss(part: Cached = part) -> torch.Tensor:
                return torch.nn.functional.cross_entropy(upper(part), part.labels)

            assert abs(flow.estimate(loss, seed) - together[client]) < 20
        assert len(set(together)) == 3
        halved = last.estimate(flow, rows, seeds, 0.5)
        assert all(abs(2 * half - whole) <= 1 for half, whole in zip(halved, together, strict=True))
        flow.apply([(client, step, step, (client + 1) << 16) for client in range(3)])
        last.follow(flow, step // 2)
        with torch.no_grad():
            torch.testing.assert_close(last.logits(torch.arange(6)), upper(data.pick(torch.arange(6))))


def test_methods_lower_the_loss_and_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    upper, data = small_upper()
    parts = Data(train=data, validation=data, test=data, upper=upper)
    before = measure(upper, data)[0]
    store, said = Store(tmp_path / "runs.jsonl"), list[str]()
    runs = [
        Run(method=method, clients=clients, steps=200, lr=lr, decay="linear", rank=4, period=50, batch=4)
        for method, clients, lr in (("seedflow", 3, 1.0), ("mezo", 1, 1.0), ("adamw", 2, 1e-2))
    ]
    for run in runs:
        assert final(store.perform(run, parts, said.append))[1] < before - 0.05, run
    lines = len(said)
    again = Store(tmp_path / "runs.jsonl")
    assert [again.perform(run, parts, said.append) for run in runs] == store.results
    assert len(said) == lines
    assert again.get(replace(runs[0], decay="none")) is None


@pytest.mark.parametrize(("start", "best"), [(3e-3, 3e-3), (3e-3, 1e-5), (1e-2, 3e-1)])
def test_a_climb_ends_between_two_worse_rates(start: float, best: float) -> None:
    tried = []

    def loss(run: Run) -> float:
        tried.append(run.lr)
        return abs(math.log(run.lr / best))

    assert climb(Run(method="seedflow", clients=1, steps=5, lr=start), loss).lr == best
    assert min(tried) < best < max(tried)


@pytest.mark.parametrize("best", [5.5e-3, 1.7e-3, 3e-3])
def test_a_fine_climb_ends_between_two_quarters_that_are_worse_on_most_seeds(best: float) -> None:
    tried = []

    def loss(run: Run) -> float:
        tried.append(run.lr)
        wish = best * 1.7 if run.seed == 0 else best  # seed 0 alone would have it a rung higher
        return abs(math.log(run.lr / wish))

    assert climb_finely(Run(method="seedflow", clients=1, steps=5, lr=3e-2), loss, 3).lr == best
    around = sorted({abs(math.log10(lr / best)) for lr in tried if lr != best})
    assert around[0] < 0.3 and min(tried) < best < max(tried)


def test_the_ceiling_trains_the_same_tensors_with_the_batch_and_schedule_that_are_best() -> None:
    def loss(run: Run) -> float:
        return abs(math.log(run.lr / 5.5e-5)) + (run.clients != 1) + (run.decay != "linear")

    chosen = ceiling("x", loss, 2)
    assert (chosen.trainable, chosen.clients, chosen.decay, chosen.lr) == ("x", 1, "linear", 5.5e-5)


def test_runs_kept_before_the_batch_was_one_of_the_settings_had_eight(tmp_path: Path) -> None:
    run = Run(method="seedflow", clients=1, steps=5, lr=1e-2)
    kept = {**asdict(run), "upper": UPPER, "curve": []}
    del kept["batch"]
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(kept) + "\n")
    assert Store(path).get(run) is not None and Store(path).get(replace(run, batch=32)) is None


def test_a_stretch_of_the_table_is_added_and_taken_off() -> None:
    upper, data = small_upper()
    mezo = TableMeZO(upper, eps=1e-2, lr=1.0, run_seed=1, bound=1 << 24, trainable="down_proj")
    weight = upper.get_parameter("layers.0.mlp.down_proj.weight")
    before = weight.detach().clone()
    mezo.perturb(mezo.seed_of(0, 0), 1)
    moved = (weight.detach() - before) / 1e-2
    assert abs(float(moved.std()) - 1) < 0.2
    mezo.restore()
    torch.testing.assert_close(weight.detach(), before)
    mezo.apply([(0, 0, 0, 1 << 16)])
    torch.testing.assert_close(weight.detach(), before - moved, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("trainable", [r"_proj\.weight$", r"(k|o|up)_proj\.weight$"])
def test_all_clients_of_mezo_in_one_pass_estimate_as_each_does_with_its_weights_moved(trainable: str) -> None:
    upper, data = small_upper()
    mezo = TableMeZO(upper, eps=1e-2, lr=1e-2, run_seed=1, bound=1 << 24, trainable=trainable)
    swarm = MeZOSwarm(mezo, upper, data)
    picked = [torch.tensor(one) for one in ([4, 0, 1], [1, 3, 5], [2, 2, 0])]
    for step in range(3):
        together = swarm.estimate(step, picked, 0.5)
        for client, chosen in enumerate(picked):
            part = data.pick(chosen)

            def loss(part: Cached = part) -> torch.Tensor:
                return torch.nn.functional.cross_entropy(upper(part), part.labels)

            assert abs(mezo.estimate(loss, mezo.seed_of(client, step), 0.5) - together[client]) < 20
        assert len(set(together)) == 3
        swarm.apply([(client, step, step, (client + 1) << 16) for client in range(3)])


def test_messages_are_applied_to_blocks_as_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seedflow_swarm, "BLOCK", 100)
    made = []
    for kind in (TableMeZO.apply, MeZO.apply):
        upper, _ = small_upper()
        mezo = TableMeZO(upper, eps=1e-2, lr=1e-2, run_seed=1, bound=1 << 24, trainable="_proj")
        kind(mezo, [(client, 0, 0, client << 14) for client in range(1, 6)])
        made.append(upper.state_dict())
    for name, tensor in made[0].items():
        assert torch.equal(tensor, made[1][name]), name


def test_the_plots_curve_is_the_mean_where_all_have_a_point() -> None:
    results = [{"curve": [[5, 0, 0, 0.5], [10, 0, 0, 0.7]]}, {"curve": [[5, 0, 0, 0.6]]}]
    ((step, accuracy),) = mean_curve(results)
    assert step == 5 and accuracy == pytest.approx(0.55)


def small_upper() -> tuple[UpperLayers, Cached]:
    """One layer, untrained, and six examples."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        upper = UpperLayers(LlamaForCausalLM(config).eval(), 1, torch.tensor([3, 4])).eval()
    draw = torch.Generator().manual_seed(2)
    data = Cached(torch.randn(6, 5, 16, generator=draw), torch.tensor([5, 2, 3, 5, 4, 1]), torch.tensor([0, 1] * 3))
    return upper, data


def test_the_rows_name_every_swarm_and_what_was_left_out() -> None:
    found = {name: (0.8 + run.clients / 100, 0.0) for name, run in SWARMS.items()} | {"AdamW": (0.9, 0.0)}
    made = {row.name: row for row in rows(found, 0.5, 3)}
    compared = made["accuracy_n16_mezo"]
    assert (compared.value, compared.baseline_value) == (found["SeedFlow 16"][0], found["MeZO 16"][0])
    for told in ("over 80 characters left out", "batch 32 a client", "5000 steps", "without weight decay", "TableMeZO"):
        assert all(told in row.setting for row in made.values())
