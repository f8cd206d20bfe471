"""A run that others started must not make this machine train on, or hand out, files its user never offered."""

from __future__ import annotations

from pathlib import Path

from peerloom.node.config import NodeConfig
from peerloom.protocol.errors import ConfigError
from peerloom.protocol.runspec import RunSpec


def consented_source(config: NodeConfig, spec: RunSpec) -> str:
    """The data source to use instead of the spec's ("": the spec's own).

    What is learnt from private text, or loaded from a private model, leaves this machine in the parameters. So a spec
    of somebody else's may name local paths only with `--trust-paths`; `--data` puts the user's own text in their place.
    Raises ConfigError that names the path.
    """
    if config.trust_paths:
        return config.data
    if not config.data and not spec.data.source.startswith("datasets:") and spec.data.source != "stdlib":
        raise ConfigError(
            f"this run would train on {spec.data.source} of this machine, a path that its organizer chose; "
            "say which text to use with --data, or accept theirs with --trust-paths"
        )
    for key, path in (("model.path", spec.model.path), ("data.tokenizer", spec.data.tokenizer)):
        if path and path != "bytes" and _exists(path):
            raise ConfigError(
                f"this run would load {key} = {path} of this machine, a path that its organizer chose; "
                "accept it with --trust-paths"
            )
    return config.data


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError):  # too long, or no such user
        return False
