"""Who hosts which stage of a pipeline: each node decides for itself from the records, and they come to one answer.

Nodes claim the least served stage. A claim is not work yet: it is looked at for a while, and of two who claim one stage
at once the one with the lower peer id stays. Once every stage has a host, `standbys` nodes a stage stand by with a copy
of its state; further ones host a stage too. When a stage has lost its hosts, its standby of lowest id takes it over,
and if it has none, the standby of lowest id of all. Without any, one host of a stage that has several moves: they have
turns, for one whose owner has chosen its stage stays, and does not say so. See `turn_to_move`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from peerloom.protocol.types import PeerId, StageRole


@dataclass(frozen=True, slots=True)
class Claim:
    """What one node says of itself: `stage` is what it hosts, claims or stands by for."""

    peer: PeerId
    stage: int
    role: StageRole


@dataclass(frozen=True, slots=True)
class Place:
    """What a node is to do; `reason` is one sentence."""

    stage: int
    role: StageRole
    reason: str


def missing_stages(claims: Iterable[Claim], stages: int) -> list[int]:
    """The stages that nobody hosts."""
    hosted = {claim.stage for claim in claims if claim.role == "hosts"}
    return [stage for stage in range(stages) if stage not in hosted]


def choose_place(
    own: Claim,
    others: Iterable[Claim],
    stages: int,
    *,
    standbys: int = 1,
    wanted: int | None = None,
    held: Mapping[int, int] | None = None,
) -> Place:
    """The place of a node that hosts nothing yet; `own` is its present claim or standby, stage -1 for neither.

    `wanted` is the stage that its owner chose, `held` the update of each stage that it has a checkpoint of.
    """
    claims = [claim for claim in others if 0 <= claim.stage < stages and claim.peer != own.peer]
    hosts = Counter(claim.stage for claim in claims if claim.role == "hosts")
    if wanted is not None:
        return Place(wanted, "hosts", f"stage {wanted} was asked for")
    before_us = Counter(claim.stage for claim in claims if claim.role == "claims" and claim.peer < own.peer)
    served = hosts + before_us
    missing = [stage for stage in range(stages) if not served[stage]]
    waiting = Counter(claim.stage for claim in claims if claim.role == "stands_by")
    if own.role == "stands_by":
        missing = [stage for stage in missing if _takes_over(own, stage, claims)]
    if missing:
        return _missing(own, missing, held or {}, stages)
    stage = min(range(stages), key=lambda stage: (waiting[stage], -_update(held, stage), stage))
    if own.role == "stands_by" and waiting[own.stage] <= waiting[stage]:
        stage = own.stage
    if own.role == "stands_by" or waiting[stage] < standbys:
        return Place(stage, "stands_by", f"every stage has a host; standing by for stage {stage}")
    stage = min(range(stages), key=lambda stage: (served[stage], stage))
    if own.role == "claims" and own.stage >= 0 and served[own.stage] <= served[stage]:
        stage = own.stage
    return Place(stage, "hosts", f"stage {stage} has the fewest hosts")


def _missing(own: Claim, missing: list[int], held: Mapping[int, int], stages: int) -> Place:
    known = [stage for stage in missing if held.get(stage, 0) > 0]
    if known:
        stage = max(known, key=lambda stage: (held[stage], -stage))
    elif own.stage in missing:
        stage = own.stage
    else:
        stage = missing[0]
    return Place(stage, "hosts", f"stage {stage} of {stages} has no host")


def _update(held: Mapping[int, int] | None, stage: int) -> int:
    return (held or {}).get(stage, 0)


def _takes_over(own: Claim, stage: int, claims: list[Claim]) -> bool:
    """Whether a node that stands by is the one to take over a stage without hosts."""
    standing = [claim for claim in claims if claim.role == "stands_by"]
    own_kind = [claim.peer for claim in standing if claim.stage == stage]
    if own.stage == stage:
        return all(own.peer < peer for peer in own_kind)
    return not own_kind and all(own.peer < claim.peer for claim in standing)


def turn_to_move(own: Claim, others: Iterable[Claim], stages: int) -> int | None:
    """How many others a host must let go before it leaves its stage for one without a host; None: it stays.

    First whoever stands by or claims, then the hosts of stages that have several: of the most served stage first, the
    highest peer id first. A turn is a time, so one that does not go, for whatever reason, keeps nobody back for ever.
    """
    claims = [own, *(claim for claim in others if 0 <= claim.stage < stages and claim.peer != own.peer)]
    hosts = Counter(claim.stage for claim in claims if claim.role == "hosts")
    if own.role != "hosts" or hosts[own.stage] < 2 or len(hosts) == stages:
        return None
    able = [claim for claim in claims if claim.role == "hosts" and hosts[claim.stage] > 1]
    able.sort(key=lambda claim: claim.peer, reverse=True)
    able.sort(key=lambda claim: (-hosts[claim.stage], claim.stage))
    coming = sum(claim.role == "stands_by" or (claim.role == "claims" and not hosts[claim.stage]) for claim in claims)
    return coming + able.index(own)


def keeper_of(stage: int, claims: Iterable[Claim], stages: int, host: PeerId) -> PeerId | None:
    """Who keeps a copy of a stage for its `host`: a standby of it, else a host of another stage, the next first."""
    able = [claim for claim in claims if claim.peer != host]
    standby = min((c.peer for c in able if c.role == "stands_by" and c.stage == stage), default=None)
    if standby is not None:
        return standby
    for ahead in range(1, stages):
        found = min((c.peer for c in able if c.role == "hosts" and c.stage == (stage + ahead) % stages), default=None)
        if found is not None:
            return found
    return min((c.peer for c in able if c.role == "hosts"), default=None)
