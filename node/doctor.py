"""`peer doctor`: whether this machine can take part, line by line, each with what to do; and what it would contribute.

The JSON of `peer doctor --json`, schema 1; keys are only ever added. null where it was not measured.

    {"schema": 1, "verdict": "ok" | "warn" | "fail",
     "checks": [{"name": str, "level": "ok" | "warn" | "fail", "text": str, "remedy": str}],
     "benchmark": null | {"model": str, "device": str, "tokens_per_s": float, "step_s": float, "payload_bytes": int,
                          "up_bytes_per_s": float | null, "down_bytes_per_s": float | null,
                          "exchange_s": float | null, "training_share": float | null,
                          "contribution_tokens_per_s": float}}

`payload_bytes` is what one exchange moves each way, `exchange_s` how long that takes at the bandwidth measured, and
`training_share` the share of a round that is left for local steps. The exit code is 0 unless a check fails.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warn", "fail"]
SCHEMA = 1
_WORSE: tuple[Level, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line; `remedy` says what to do, "" where nothing is to be done."""

    name: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What this machine would contribute, field for field the JSON's `benchmark`."""

    model: str
    device: str
    tokens_per_s: float
    step_s: float
    payload_bytes: int
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    exchange_s: float | None = None
    training_share: float | None = None
    contribution_tokens_per_s: float


@dataclass(slots=True)
class Report:
    """All findings in order."""

    findings: list[Finding] = field(default_factory=list)
    benchmark: Benchmark | None = None

    @property
    def verdict(self) -> Level:
        """The worst level."""
        return max((finding.level for finding in self.findings), key=_WORSE.index, default="ok")

    def to_json(self) -> dict[str, Any]:
        """The object that the module's docstring describes."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "checks": [asdict(finding) for finding in self.findings],
            "benchmark": None if self.benchmark is None else asdict(self.benchmark),
        }


def contribution(
    *,
    model: str,
    device: str,
    tokens_per_step: int,
    step_s: float,
    local_steps: int,
    payload_bytes: int,
    up_bytes_per_s: float | None,
    down_bytes_per_s: float | None,
) -> Benchmark:
    """What speed and bandwidth amount to: an exchange sends and receives a payload at once, after `local_steps`."""
    exchange_s = share = None
    if up_bytes_per_s and down_bytes_per_s:
        exchange_s = payload_bytes / min(up_bytes_per_s, down_bytes_per_s)
        share = local_steps * step_s / (local_steps * step_s + exchange_s)
    speed = tokens_per_step / step_s
    return Benchmark(
        model=model,
        device=device,
        tokens_per_s=speed,
        step_s=step_s,
        payload_bytes=payload_bytes,
        up_bytes_per_s=up_bytes_per_s,
        down_bytes_per_s=down_bytes_per_s,
        exchange_s=exchange_s,
        training_share=share,
        contribution_tokens_per_s=speed * (1.0 if share is None else share),
    )
