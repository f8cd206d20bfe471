"""Which run a node takes part in: the one its invites lead to, its own spec, or both when they agree."""

from __future__ import annotations

import asyncio

from peerloom.node.discovery import DhtDiscovery
from peerloom.node.identity import Identity
from peerloom.node.specs import sign_spec
from peerloom.protocol.errors import RunMismatch
from peerloom.protocol.invite import Invite
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import RunId, SignedSpec

RETRY_S = 1.0  # a look-up may come back empty while the DHT is still finding its feet


async def agree_on_run(
    discovery: DhtDiscovery, identity: Identity, seeds: list[Invite], spec: RunSpec | None, patience_s: float
) -> SignedSpec:
    """The swarm's spec, checked against `spec` and the invites; without invites `spec`, signed as our own.

    Looks again for `patience_s` before it raises RunMismatch, which names both sides.
    """
    wanted = wanted_run(seeds, spec)
    if not seeds:
        assert spec is not None  # ours: the caller gives a spec where there is no invite
        return sign_spec(spec, identity)
    return await find_run(discovery, wanted, patience_s)


async def find_run(discovery: DhtDiscovery, wanted: RunId | None, patience_s: float) -> SignedSpec:
    """The spec of the run `wanted`, else of the run that the seeds say they are in; raises RunMismatch."""
    told = set(discovery.seed_runs)
    if wanted is None and len(told) == 1:
        wanted = next(iter(told))
    elif wanted is not None and told and wanted not in told:
        patience_s = 0.0  # the seeds have said that it is another one
    give_up_at = asyncio.get_running_loop().time() + patience_s
    while True:
        found = await discovery.runs()
        if wanted is not None and wanted in found:
            return found[wanted]
        if wanted is None and len(found) == 1:
            return next(iter(found.values()))
        if asyncio.get_running_loop().time() >= give_up_at:
            raise RunMismatch(_why(wanted, told | set(found)))
        await asyncio.sleep(RETRY_S)


def wanted_run(seeds: list[Invite], spec: RunSpec | None) -> RunId | None:
    """The one run that invites and spec name, None when none is named; raises RunMismatch when they differ."""
    pinned = {seed.run_id for seed in seeds if seed.run_id is not None}
    if spec is not None:
        pinned.add(spec.run_id)
    if len(pinned) > 1:
        raise RunMismatch(f"the invites and the spec name different runs: {', '.join(sorted(pinned))}; use one run's")
    return next(iter(pinned), None)


def _why(wanted: RunId | None, known: set[RunId]) -> str:
    there = ", ".join(sorted(known)) or "none"
    if wanted is not None:
        return f"the swarm behind the invite runs {there}, not {wanted}; ask its organizer for a new invite"
    return f"the swarm behind the invite announces the runs {there}; ask for an invite that ends in #RUN_ID"
