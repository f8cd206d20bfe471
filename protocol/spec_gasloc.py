"""The table [gasloc] of the RunSpec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from peerloom.protocol.spec_rules import Fault, choice, faults, number
from peerloom.protocol.spec_table import Table
from peerloom.protocol.stability import Weights, alpha_bound, default_tuning, pair_bound
from peerloom.protocol.types import Encoding

PAIR_EIGENVALUE = 1.0  # largest of the one-edge Laplacian 1/2 (e_i - e_j)(e_i - e_j)^T
ONE_PARTNER = ("rendezvous", "scheduled", "exponential")  # the pairings with one exchange of weight 1 a round
GROUPED = ("scheduled", "hypercube")  # the pairings that may form groups

Pairing = Literal[
    "rendezvous",
    "scheduled",
    "two_peer",
    "ring",
    "torus",
    "complete",
    "regular",
    "hypercube",
    "exponential",
    "base",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GaslocSpec(Table):
    """GASLoC: one partner a round, unless the pairing, groups or fragments say otherwise."""

    local_steps: int = number(30, 1, 10**6, "H: optimizer steps between exchanges")
    round_s: float = number(
        0.0, 0, 86400, "seconds of local steps, as many as fit, at least one, instead of local_steps; 0: off"
    )
    eta: float = number(1.0, 0, 10, "outer rate: y = theta_0 + eta (theta_H - theta_0)", open_low=True)
    alpha: float = number(1.0, 0, 4, "mixing: 1 is the exact mean of the pair", open_low=True, open_high=True)
    gamma: float = number(0.2, 0, 1, "outer momentum; 0: none", open_high=True)
    momentum: Literal["pre", "post"] = choice("pre", "of the iterate before mixing, or after it")
    pairing: Pairing = choice(
        "rendezvous",
        "with whoever is ready; or as (seed, round) and the swarm say: random matchings (one or two), "
        "a fixed graph, or a sequence that averages exactly in few rounds",
    )
    weights: Weights = choice("metropolis", "of a fixed graph's edges: 2 / (1 + degree), or 1")
    degree: int = number(4, 2, 64, 'neighbours of a node with pairing = "regular"')
    group_size: int = number(2, 2, 64, 'nodes that take their exact mean, with pairing "scheduled" or "hypercube"')
    fragments: int = number(1, 1, 64, "parts of the model, exchanged one after the other over a round")
    overlap: bool = choice(
        False, "exchange beneath the next local steps, a quarter of them at most; what changed is added when it is over"
    )
    encoding: Encoding = choice("fp32", "of parameters on the wire; int8: in blocks of 128, rounded at random")
    match_timeout_s: float = number(10.0, 0, 3600, "seconds to wait for a partner", open_low=True)
    max_round_skew: int = number(
        8, 0, 10**6, "rounds a partner may be behind the middle of the swarm; 0: the same round only"
    )
    clip_radius: float = number(
        2.0, 0, 10**6, "usual distances (the median; two drifts like its own, if more) beyond which a partner counts "
        "less; 0: no limit; else at least 1"
    )

    def cross(self) -> Iterator[Fault]:
        if 0 < self.clip_radius < 1:
            yield Fault(("clip_radius",), f"{self.clip_radius}: must be 0 or at least 1")
        if self.overlap and (self.fragments > 1 or self.group_size > 2 or self.pairing not in ONE_PARTNER):
            yield Fault(
                ("overlap", "pairing", "group_size", "fragments"),
                "true: must be false but with one partner and one fragment a round: "
                f"pairing {', '.join(map(repr, ONE_PARTNER))}, group_size = 2, fragments = 1",
            )
        if self.fragments > self.local_steps and not self.round_s:
            yield Fault(
                ("fragments", "local_steps"),
                f"{self.fragments}: must be at most local_steps, which is {self.local_steps}",
            )
        if self.group_size & (self.group_size - 1):
            yield Fault(("group_size",), f"{self.group_size}: must be a power of 2")
        elif self.group_size > 2 and self.pairing not in GROUPED:
            yield Fault(
                ("group_size", "pairing"),
                f"{self.group_size}: must be 2 with pairing = {self.pairing!r}; "
                f"groups form with {' or '.join(map(repr, GROUPED))}",
            )
        else:
            yield from self._unstable()

    def _unstable(self) -> Iterator[Fault]:
        gamma, momentum = self.gamma, self.momentum
        about: tuple[str, ...] = ("alpha", "gamma", "momentum")
        if self.pairing == "complete" and self.weights == "unit":
            yield Fault(
                ("weights", "pairing"),
                "'unit': must be 'metropolis' with pairing = 'complete', whose stable alpha would fall with every node",
            )
            return
        limit = alpha_bound(
            self.pairing,
            self.alpha,
            gamma,
            momentum,
            weights=self.weights,
            degree=self.degree,
            group_size=self.group_size,
            pull=self.eta if self.overlap else 0.0,
        )
        if limit is None:
            return
        pair = limit >= pair_bound(gamma, PAIR_EIGENVALUE, momentum, self.eta if self.overlap else 0.0)
        what = "a pair diverges" if pair else f"pairing = {self.pairing!r} loses consensus"
        bound = f"must be below {limit:.6g}" if limit else f"no alpha is stable; lower {'eta' if pair else 'gamma'}"
        given = f"gamma = {gamma} and momentum = {momentum!r}"
        if self.overlap:
            about, given = (*about, "eta", "overlap"), f"overlap, eta = {self.eta}, {given}"
        yield Fault(about, f"{self.alpha}: {what}; {bound} with {given}")

    @staticmethod
    def implied(values: dict[str, Any]) -> dict[str, Any]:
        """Defaults that hang on other keys: alpha and gamma of the topology, where a spec's text has neither."""
        spec = GaslocSpec(**{key: values[key] for key in _TOPOLOGY if key in values})
        if {"alpha", "gamma"} & values.keys() or any(fault.keys[0] in _TOPOLOGY for fault in faults(spec)):
            return {}
        alpha, gamma = default_tuning(
            spec.pairing, spec.momentum, weights=spec.weights, degree=spec.degree, group_size=spec.group_size
        )
        return {"alpha": alpha, "gamma": gamma}


_TOPOLOGY = ("momentum", "pairing", "weights", "degree", "group_size")


def stable_alpha(gamma: float, momentum: Literal["pre", "post"]) -> float:
    """The mixing rate from which one pair diverges: modes z^2 - (1 - alpha l + gamma) z + gamma = 0 (GASLoC)."""
    return pair_bound(gamma, PAIR_EIGENVALUE, momentum)


GROUP_COPIES = 1.5  # that a member of a group of 4 sends for its mean
GROUPS_FROM = 8  # nodes: fewer make one or two groups, and a group waits for its slowest


def for_swarm(nodes: int, plain: GaslocSpec) -> GaslocSpec:
    """The form with the lowest loss for its bytes in a swarm of about so many nodes, at the bytes of `plain`.

    Up to GROUPS_FROM - 1 that is `plain` itself, one peer a round. From there on groups of 4 in 4 fragments: in
    `python -m tests.benchmarks.gasloc` (16 workers, 110,912 parameters, 672 steps of batch 4, each tuned, 3 seeds) they
    ended 2.3 % lower than one random peer at the same bytes, with 8 workers 2.5 %; with 4, where the group is the
    swarm, 1.1 %, for which waiting for the slowest is too much. (Groups of 8 ended 3.3 % lower; a third leg each turn
    is one more to wait in.) A member of 4 sends 1.5 copies for a group's mean, so its rounds are half as long again. On
    a hypercube, where the groups go through all nodes in turn, and at random for a number that is no power of 2; who is
    left over makes a smaller group, and a swarm of 2 or 3 makes pairs.

    It follows from what the run's author expects, not from who is there: a spec is one text with one id, the same for
    all nodes, while nobody knows how many will come. And it is no node's default unasked. In a group each waits for the
    three others, leg by leg: where one machine of 8 was four times slower the others stood still for 10 to 18 % of the
    time (in virtual time, rounds of 3 s), where at the rendezvous of the plain form it was 4 to 5 %.
    """
    if nodes < GROUPS_FROM:
        return plain
    return replace(
        plain,
        local_steps=round(plain.local_steps * GROUP_COPIES),
        round_s=plain.round_s * GROUP_COPIES,
        alpha=1.0,
        gamma=0.3,
        momentum="post",
        pairing="hypercube",
        group_size=4,
        fragments=4,
    )
