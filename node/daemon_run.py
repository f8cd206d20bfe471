"""The run that a node takes part in: agreed on with the swarm, checked for this machine, and remembered."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from peerloom.node.agree import agree_on_run
from peerloom.node.consent import consented_source
from peerloom.node.daemon_home import Home
from peerloom.node.devices import check_devices
from peerloom.node.durable import storage_errors
from peerloom.node.folders import Folders, ensure_writable
from peerloom.node.specs import verify_spec
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import SignedSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedRun:
    """The run, where this node keeps it, what text it trains on, and the node's own invites to it."""

    signed: SignedSpec
    spec: RunSpec
    directory: Path
    data_source: str
    invites: list[str]


async def agree(home: Home, spec: RunSpec | None) -> AgreedRun:
    """`spec` starts a run, or must be the run of the invites; None takes the run that the invites lead to."""
    config, discovery = home.config, home.discovery
    signed = await agree_on_run(discovery, home.identity, home.seeds, spec, config.startup_timeout_s)
    run_spec = verify_spec(signed)
    if home.role == "trainer":
        check_devices(run_spec, config.devices)
    home.workers.method = run_spec.method
    discovery.join_run(run_spec.run_id)
    home.log_context.run = run_spec.run_id
    home.phases.mark("run spec")
    foreign = spec is None and signed.owner != home.identity.peer_id
    data_source = consented_source(config, run_spec) if foreign and home.role == "trainer" else config.data
    directory = ensure_writable(config.folders.run_dir(run_spec.run_id))
    ensure_writable(config.folders.cache)
    invites = await discovery.invites()
    _remember(config.folders, directory, signed, [*invites[:1], *(str(seed) for seed in home.seeds)])
    return AgreedRun(signed=signed, spec=run_spec, directory=directory, data_source=data_source, invites=invites)


def _remember(folders: Folders, run_dir: Path, signed: SignedSpec, invites: list[str]) -> None:
    """Leaves the spec for `peer export`, and the invites for a `peer status` without one."""
    with storage_errors(f"the run spec {run_dir / 'run.toml'}"):
        (run_dir / "run.toml").write_text(signed.text, encoding="utf-8")
    file = folders.data / "last_invite"
    try:
        file.write_text("\n".join(invites) + "\n", encoding="utf-8")
    except OSError as error:  # a convenience: no reason not to train
        log.warning("cannot write %s (%s): `peer status` needs an invite passed to it", file, error.strerror)
