"""From where a topology loses consensus: against the optimizer side's rates, and as the spec says it."""

from __future__ import annotations

import math

import pytest
import torch

from peerloom.optim.topology import Graph
from peerloom.optim.tuning import near_square_torus, random_rate, rate
from peerloom.protocol import graphs
from peerloom.protocol.errors import SpecError
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.stability import FIXED, alpha_bound, default_tuning, largest_eigenvalue, pair_bound

MOMENTA = ("pre", "post")


def bound_of(
    pairing: str, alpha: float, gamma: float, momentum: str, group: int = 2, pull: float = 0.0
) -> float | None:
    """With unit weights, and four partners where a graph is regular."""
    return alpha_bound(
        pairing, alpha, gamma, momentum, weights="unit", degree=4, group_size=group, pull=pull,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("weights", ["unit", "metropolis"])
@pytest.mark.parametrize("pairing", FIXED)
def test_no_graph_of_any_size_has_a_larger_eigenvalue(pairing: str, weights: str) -> None:
    bound = largest_eigenvalue(pairing, weights, 4)  # type: ignore[arg-type]
    seen = []
    for n in range(5, 20):
        graph = {"ring": Graph.ring, "complete": Graph.complete, "torus": near_square_torus}.get(
            pairing, lambda n: Graph.from_pairs(n, graphs.random_regular(n, 4, 1))
        )(n)
        seen.append((graph.metropolis() if weights == "metropolis" else graph).lambda_max)
    assert max(seen) <= bound + 1e-9
    if bound < float("inf") and pairing != "regular":
        assert max(seen) >= 0.95 * bound


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("gamma", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("pairing", ["hypercube", "exponential", "base"])
def test_sequences_are_refused_where_their_rate_is_over_one(pairing: str, gamma: float, momentum: str) -> None:
    for alpha in (0.5, 1.0, 1.3, 1.5):
        worst = max(
            rate(pairing, n, alpha, gamma, momentum)  # type: ignore[arg-type]
            for n in (2, 3, 4, 6, 8, 9, 16)
            if pairing != "hypercube" or n & (n - 1) == 0
        )
        bound = bound_of(pairing, alpha, gamma, momentum)
        if abs(worst - 1) > 0.01:
            assert (bound is None) == (worst < 1), (alpha, worst, bound)
        assert bound is None or bound <= alpha + 0.01


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize(
    ("pairing", "peers", "group"),
    [("rendezvous", 1, 2), ("scheduled", 1, 2), ("two_peer", 2, 2), ("scheduled", 1, 4), ("scheduled", 1, 8)],
)
def test_random_partners_are_refused_where_the_mean_square_grows(
    pairing: str, peers: int, group: int, momentum: str
) -> None:
    for gamma in (0.0, 0.3, 0.6, 0.9):
        for alpha in (0.5, 1.0, 1.35):
            large = random_rate(4096, alpha, gamma, momentum, peers=peers, group=group)  # type: ignore[arg-type]
            bound = bound_of(pairing, alpha, gamma, momentum, group)
            if abs(large - 1) > 0.005:
                assert (bound is None) == (large < 1), (gamma, alpha, large, bound)


def test_the_message_names_the_bound() -> None:
    with pytest.raises(SpecError) as caught:
        GaslocSpec(pairing="ring", alpha=1.6, gamma=0.2, momentum="post").check()
    (problem,) = caught.value.problems
    assert "pairing = 'ring' loses consensus; must be below 1.28571 with gamma = 0.2 and momentum = 'post'" in problem
    with pytest.raises(SpecError, match="must be below 1.8 with"):
        GaslocSpec(pairing="ring", alpha=1.9, gamma=0.2).check()
    with pytest.raises(SpecError, match="'base' loses consensus; must be below"):
        GaslocSpec(pairing="base", alpha=1.2, gamma=0.4, momentum="post").check()
    with pytest.raises(SpecError, match="must be 'metropolis'"):
        GaslocSpec(pairing="complete", weights="unit", alpha=0.1).check()


DIGEST = {  # rounds to 1e-3 at gamma 0, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9 on 16 nodes; 0: diverged
    ("pre", 1.0): (18, 22, 27, 51, 328, 0, 0),
    ("pre", 0.5): (27, 21, 21, 30, 65, 150, 0),
    ("pre", 0.25): (54, 41, 35, 28, 48, 85, 284),
    ("post", 1.0): (18, 20, 23, 34, 83, 317, 0),
    ("post", 0.5): (27, 22, 20, 21, 32, 43, 66),
    ("post", 0.25): (54, 43, 37, 25, 34, 47, 79),
}


@pytest.mark.parametrize("pairing", ["rendezvous", "scheduled"])
@pytest.mark.parametrize(("momentum", "alpha"), DIGEST)
def test_one_random_partner_is_refused_where_the_digest_saw_it_diverge(
    momentum: str, alpha: float, pairing: str
) -> None:
    for gamma, rounds in zip((0, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9), DIGEST[momentum, alpha], strict=True):
        spec = GaslocSpec(pairing=pairing, momentum=momentum, alpha=alpha, gamma=gamma)  # type: ignore[arg-type]
        if rounds == 0 or rounds == 317:  # which more nodes would not come back from
            with pytest.raises(SpecError, match=f"{alpha}: pairing = '{pairing}' loses consensus; must be below 0"):
                spec.check()
        else:
            spec.check()


def rate_of_three(alpha: float, gamma: float, momentum: str, pull: float) -> float:
    """Of the mean square of three nodes, of which two meet: their E[P] is 1/2, as that of ever so many."""
    one, basis = torch.eye(2, dtype=torch.float64), torch.linalg.qr(torch.tensor([[1.0, 1, 1], [0, 1, 0], [0, 0, 1]]).T)
    basis = basis[0][:, 1:].double()
    total = torch.zeros(16, 16, dtype=torch.float64)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        edge = torch.zeros(3, dtype=torch.float64)
        edge[i], edge[j] = 1.0, -1.0
        w = one - alpha * (basis.T @ (torch.outer(edge, edge) / 2) @ basis)
        carried = one if momentum == "pre" else w
        upper = torch.cat([w + gamma * carried - pull * one, -gamma * one], 1)
        step = torch.cat([upper, torch.cat([carried, 0 * one], 1)])
        total += torch.kron(step, step) / 3
    return math.sqrt(float(torch.linalg.eigvals(total).abs().max()))


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("pairing", ["rendezvous", "scheduled"])
def test_random_partners_under_overlap_are_refused_where_the_mean_square_grows(pairing: str, momentum: str) -> None:
    told = set()
    for gamma in (0.0, 0.2, 0.5, 0.7):
        for alpha in (0.3, 0.8, 1.15, 1.3):
            for pull in (0.0, 0.7, 1.0, 1.5):
                worst = max(rate_of_three(alpha, gamma, momentum, each) for each in (0.0, pull / 2, pull))
                pair = pair_bound(gamma, 1.0, momentum, pull)  # type: ignore[arg-type]
                bound = bound_of(pairing, alpha, gamma, momentum, pull=pull)
                if abs(worst - 1) > 0.005:
                    assert (bound is None) == (worst < 1 and alpha < pair), (gamma, alpha, pull, worst, bound)
                told.add((bound is None, worst < 1, alpha < pair))
    assert {(True, True, True), (False, True, False), (False, False, False)} <= told


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("pairing", ["rendezvous", "scheduled", "exponential"])
def test_overlap_leaves_less_room(pairing: str, momentum: str) -> None:
    free, pulled = (
        bound_of(pairing, 3.0, 0.3, momentum, pull=pull)
        for pull in (0.0, 1.3)
    )
    pair = (2 * 1.3 - 1.3) / (1.0 if momentum == "pre" else 1.6)
    assert free is not None and pulled is not None and pulled < free and pulled <= pair + 0.01
    most = {"pairing": pairing, "momentum": momentum, "gamma": 0.3, "eta": 1.3, "alpha": (pulled + free) / 2}
    GaslocSpec(**most).check()  # type: ignore[arg-type]
    GaslocSpec(**{**most, "alpha": pulled * 0.99, "overlap": True}).check()  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=f"; must be below {pulled:.6g} with overlap, eta = 1.3, gamma"):
        GaslocSpec(**most, overlap=True).check()  # type: ignore[arg-type]


def test_overlap_of_the_defaults_is_stable_and_too_large_an_eta_is_not() -> None:
    GaslocSpec(overlap=True).check()
    with pytest.raises(SpecError, match="no alpha is stable; lower eta"):
        GaslocSpec(overlap=True, eta=3.0).check()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"overlap": True, "fragments": 2}, "must be false but with one partner and one fragment a round"),
        ({"overlap": True, "pairing": "ring", "alpha": 0.5}, "pairing 'rendezvous', 'scheduled', 'exponential', group"),
        ({"group_size": 3, "pairing": "scheduled"}, "must be a power of 2"),
        ({"group_size": 4}, "must be 2 with pairing = 'rendezvous'"),
        ({"group_size": 4, "pairing": "ring"}, "groups form with 'scheduled' or 'hypercube'"),
        ({"fragments": 31}, "must be at most local_steps, which is 30"),
        ({"degree": 1}, "must be an integer from 2 to 64"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, object], what: str) -> None:
    with pytest.raises(SpecError, match=what):
        GaslocSpec(**changes).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("weights", ["unit", "metropolis"])
@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize("pairing", ["rendezvous", "two_peer", "scheduled", "hypercube", "exponential", "base", *FIXED])
def test_defaults_are_stable_and_given_where_the_text_has_none(
    pairing: str, group: int, weights: str, momentum: str
) -> None:
    if (group > 2 and pairing not in ("scheduled", "hypercube")) or (pairing == "complete" and weights == "unit"):
        return
    table = f'pairing = "{pairing}"\ngroup_size = {group}\nweights = "{weights}"\nmomentum = "{momentum}"\n'
    spec = RunSpec.from_toml(f"[gasloc]\n{table}").gasloc
    expected = default_tuning(pairing, momentum, weights=weights, degree=4, group_size=group)  # type: ignore[arg-type]
    assert (spec.alpha, spec.gamma) == expected
    spec.check()
    assert RunSpec.from_toml(f"[gasloc]\n{table}alpha = 0.25\ngamma = 0.1\n").gasloc.alpha == 0.25
    assert RunSpec.from_toml(RunSpec(gasloc=spec).canonical()).gasloc == spec


def test_the_default_of_one_random_partner_is_the_spec_s_own_and_costs_a_quarter_of_the_rounds() -> None:
    tuning = {"weights": "metropolis", "degree": 4, "group_size": 2}
    plain = GaslocSpec()
    pre, post = (default_tuning("rendezvous", m, **tuning) for m in MOMENTA)  # type: ignore[arg-type]
    assert (plain.momentum, plain.alpha, plain.gamma) == ("pre", *pre)
    assert RunSpec.from_toml("[gasloc]\n").run_id == RunSpec().run_id
    without = math.log(random_rate(4096, 1.0, 0.0, "pre"))
    for (alpha, gamma), momentum in ((pre, "pre"), (post, "post")):
        more = without / math.log(random_rate(4096, alpha, gamma, momentum))  # type: ignore[arg-type]
        assert 1.15 < more < 1.27


def test_the_default_of_a_fixed_graph_is_near_the_best_rate() -> None:
    for pairing, n in (("ring", 8), ("torus", 16)):
        alpha, gamma = default_tuning(pairing, "post", weights="metropolis", degree=4, group_size=2)
        graph = (Graph.ring(n) if pairing == "ring" else near_square_torus(n)).metropolis()
        found = rate(pairing, n, alpha, gamma, "post", graph=graph)  # type: ignore[arg-type]
        best = min(
            rate(pairing, n, a / 50, g / 20, "post", graph=graph)  # type: ignore[arg-type]
            for a in range(20, 60)
            for g in range(6, 16)
        )
        assert found <= best + 0.15
