"""`peer doctor`: the checks, line by line as they end, and what this machine would contribute."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from peerloom.node.cli_status import last_invites
from peerloom.node.config import NodeConfig
from peerloom.node.doctor import Benchmark, Finding, Report, contribution
from peerloom.node.doctor_local import local_findings
from peerloom.node.doctor_network import Network, network_findings
from peerloom.node.failures import DOCTOR_FAILS, OK
from peerloom.node.specs import embedded_spec
from peerloom.node.status_table import short
from peerloom.node.worker.child import SPIN_BRIEFLY
from peerloom.protocol.errors import ConfigError, PeerloomError
from peerloom.protocol.runspec import RunSpec

MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}
BENCHMARK_S = 5.0


def doctor(config: NodeConfig, invites: list[str], *, as_json: bool, benchmark: bool) -> int:
    """Runs all checks; 0 unless one of them fails."""
    for name, value in SPIN_BRIEFLY.items():
        os.environ.setdefault(name, value)  # as a worker has it; read when torch is loaded
    console, report = Console(highlight=False), Report()

    def take(finding: Finding) -> None:
        report.findings.append(finding)
        if not as_json:
            console.print(line(finding), soft_wrap=True)

    for finding in local_findings(config):
        take(finding)
    network = asyncio.run(_ask(config, invites or _known_invites(config), benchmark, take))
    if benchmark:
        try:
            report.benchmark = _benchmark(config, network)
        except (PeerloomError, RuntimeError) as error:  # RuntimeError: torch's, out of memory among them
            take(Finding("benchmark", "fail", str(error).splitlines()[0], "another --device, or a smaller model"))
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        if report.benchmark is not None:
            console.print(summary(report.benchmark), soft_wrap=True)
        failed = sum(finding.level == "fail" for finding in report.findings)
        warned = sum(finding.level == "warn" for finding in report.findings)
        console.print(f"{failed} fail, {warned} warn, of {len(report.findings)} checks")
    return DOCTOR_FAILS if report.verdict == "fail" else OK


def line(finding: Finding) -> Text:
    """A finding as a person reads it, the remedy on a line of its own."""
    mark, style = MARKS[finding.level]
    text = Text.assemble((mark, style), " ", (finding.name, "bold"), f": {finding.text}")
    return text.append(f"\n     -> {finding.remedy}") if finding.remedy else text


def summary(found: Benchmark) -> str:
    """The benchmark in a sentence."""
    parts = [
        f"{found.model} on {found.device}: {short(found.tokens_per_s)} tokens/s, a step takes {found.step_s:.3g} s",
        f"an exchange moves {short(found.payload_bytes)}B each way",
    ]
    if found.exchange_s is not None and found.training_share is not None:
        share = f"{100 * found.training_share:.0f} % of the time for training"
        parts.append(f"in {found.exchange_s:.2g} s at this bandwidth, which leaves {share}")
    return f"{', '.join(parts)}: about {short(found.contribution_tokens_per_s)} tokens/s contributed"


def _known_invites(config: NodeConfig) -> list[str]:
    if config.seeds:
        return list(config.seeds)
    try:
        return last_invites(config)
    except ConfigError:
        return []


async def _ask(config: NodeConfig, invites: list[str], measure: bool, take: Callable[[Finding], None]) -> Network:
    found = Network()
    try:
        async for finding in network_findings(config, invites, found, measure=measure):
            take(finding)
    except PeerloomError as error:
        take(Finding("network", "fail", str(error), "see the message"))
    return found


def _benchmark(config: NodeConfig, network: Network) -> Benchmark:
    from peerloom.node.doctor_bench import measure_speed

    spec = _measurable(network.spec)
    speed = measure_speed(spec, device=config.device, threads=config.threads, seconds=BENCHMARK_S)
    return contribution(
        model=spec.name,
        device=speed.device,
        tokens_per_step=speed.tokens_per_step,
        step_s=speed.step_s,
        local_steps=spec.gasloc.local_steps,
        payload_bytes=speed.payload_bytes,
        up_bytes_per_s=_capped(network.up_bytes_per_s, config.max_upload),
        down_bytes_per_s=_capped(network.down_bytes_per_s, config.max_download),
    )


def _measurable(spec: RunSpec | None) -> RunSpec:
    """The swarm's run; the embedded one where there is none, or where its model would have to be fetched from a hub."""
    return embedded_spec() if spec is None or spec.model.path else spec


def _capped(rate: float | None, cap: int) -> float | None:
    return min(rate, cap) if rate is not None and cap else rate
