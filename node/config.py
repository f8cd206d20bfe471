"""What belongs to one node: flags, then PEER_* variables, then peer.toml, then defaults."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, SettingsConfigDict
from pydantic_settings.sources import PydanticBaseSettingsSource

from peerloom.node.devices import ALLOWED, parse_devices
from peerloom.node.folders import Folders
from peerloom.node.http_endpoint import DEFAULT as DEFAULT_HTTP
from peerloom.node.http_endpoint import parse_endpoint
from peerloom.protocol.bucket import LEAST_CAP
from peerloom.protocol.errors import ConfigError
from peerloom.protocol.progress import LEAST_STALL_S
from peerloom.protocol.spec_rules import shown
from peerloom.protocol.spec_toml import closest
from peerloom.protocol.types import PeerId

PREFIX = "PEER_"
MAX_TOML_BYTES = 65_536
_PORT = "an integer from 0 to 65535 (0: any free one)"
_RATE = f"0, or an integer from {LEAST_CAP} to 1000000000000"
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
EXAMPLES = {  # of settings without a fixed default
    "home": '"/srv/peerloom"',
    "name": '"lab-7"',
    "stage": "2",
    "tensorboard": '"/srv/curves"',
    "data": '"/srv/text"',
}
FLAGS = {"trust_paths", "relay", "port_mapping"}
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def default_name(peer_id: PeerId) -> str:
    """The host's name, and the end of the peer id: a host may run several nodes."""
    plain = "".join(c for c in socket.gethostname() if c.isprintable())
    return f"{plain[:59] or 'peer'}-{peer_id[-4:]}"


def _setting(default: Any, doc: str, allowed: str, **constraints: Any) -> Any:
    """A field with its one line for peer.example.toml and the end of "must be ..."."""
    return Field(default, description=doc, json_schema_extra={"allowed": allowed}, **constraints)


class NodeConfig(BaseSettings):
    """The settings of one node. Use `load_config`, whose errors say where a bad value came from."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, validate_default=False
    )

    home: Path | None = _setting(None, "one folder for all files of the node, instead of the XDG ones", "a folder")
    name: str = Field(
        "",
        min_length=1,
        max_length=64,
        description="of this node, for people; the host's, and the end of its peer id, if left out",
        json_schema_extra={"allowed": "1 to 64 printable characters"},
    )
    listen: tuple[str, ...] = _setting(
        ("0.0.0.0",), "IP addresses to listen on", "a list of IP addresses", min_length=1
    )
    port: int = _setting(0, "TCP port of the DHT; 0: a free one, the same at every start", _PORT, ge=0, le=65535)
    grpc_port: int = _setting(
        0, "TCP port for calls between peers; 0: a free one, the same at every start", _PORT, ge=0, le=65535
    )
    announce: tuple[str, ...] = _setting(
        (),
        "public addresses of this node, if others than it listens on; HOST stands for every port, HOST:PORT for the "
        "one for calls",
        "a list of HOST or HOST:PORT, IPv6 in []",
    )
    relay: bool = _setting(True, "carry calls to peers that cannot be dialled, if this node can be", "true or false")
    relay_port: int = _setting(
        0, "TCP port for what is carried for others; 0: a free one, the same at every start", _PORT, ge=0, le=65535
    )
    relay_rate: int = _setting(
        0,
        "bytes a second carried for others at most; 0: the smaller of max_upload and max_download",
        _RATE,
        ge=0,
        le=10**12,
    )
    relay_pair_rate: int = _setting(
        0, "bytes a second carried at most for any two of them; 0: no cap", _RATE, ge=0, le=10**12
    )
    relay_tunnels: int = _setting(256, "calls' connections carried at once", "an integer from 1 to 4096", ge=1, le=4096)
    port_mapping: bool = _setting(
        True,
        "ask the home router for the ports when listening on 0.0.0.0 (UPnP or NAT-PMP)",
        "true or false",
    )
    device: str = _setting("auto", "what trains", "auto, cpu, cuda or cuda:N")
    devices: tuple[str, ...] = _setting(
        (), "several devices that share the model between them, instead of device; empty: one", ALLOWED
    )
    threads: int = _setting(
        0, "CPU threads for training; 0: chosen by torch", "an integer from 0 to 1024", ge=0, le=1024
    )
    nice: int = _setting(
        10,
        "how far the training steps back for other programs of this machine; 0: not at all",
        "an integer from 0 to 19",
        ge=0,
        le=19,
    )
    stage: int | None = _setting(
        None,
        "the pipeline's stage to host; left out: the one with the fewest hosts",
        "an integer from 0 to 255",
        ge=0,
        le=255,
    )
    max_upload: int = _setting(
        0, "bytes a second sent to peers at most, the DHT's traffic among them; 0: no cap", _RATE, ge=0, le=10**12
    )
    max_download: int = _setting(
        0, "bytes a second received from peers at most, the DHT's traffic among them; 0: no cap", _RATE, ge=0, le=10**12
    )
    allow: tuple[PeerId, ...] = _setting(
        (), "peer ids to deal with; empty: everyone", "a list of peer ids, 12D3KooW..."
    )
    data: str = _setting(
        "",
        "text to train on here instead of the run's data.source",
        "a local file or folder, stdlib, or datasets:NAME",
        max_length=512,
    )
    trust_paths: bool = _setting(
        False, "let a run that others started read the local paths it names", "true or false"
    )
    checkpoint_every_s: float = _setting(
        60.0, "seconds between checkpoints", "a number above 0 and at most 86400", gt=0, le=86400
    )
    stall_after_s: float = _setting(
        LEAST_STALL_S,
        "seconds without a step after which training counts as stalled; more where 20 usual steps take longer",
        "a number from 2 to 86400",
        ge=2,
        le=86400,
    )
    keep_checkpoints: int = _setting(3, "newest checkpoints kept", "an integer from 1 to 1000", ge=1, le=1000)
    http: str = _setting(
        DEFAULT_HTTP,
        "where the page, /metrics, /healthz and /readyz are served; auto: 127.0.0.1:9464, or the next free port",
        "auto, none, or an IP address of this machine with a port, 127.0.0.1:9464 (port 0: any free one)",
    )
    tensorboard: Path | None = _setting(
        None, "folder for TensorBoard's event files; left out: none are written", "a folder"
    )
    log_format: Literal["auto", "human", "json"] = _setting(
        "auto", "of log lines; auto: human on a terminal, else json", "auto, human or json"
    )
    seeds: tuple[str, ...] = _setting((), "invites to join by", "a list of invites, /ip4/.../tcp/.../p2p/12D3KooW...")
    startup_timeout_s: float = _setting(
        60.0,
        "seconds to wait for a peer that can hand over the model",
        "a number above 0 and at most 3600",
        gt=0,
        le=3600,
    )

    @property
    def folders(self) -> Folders:
        """Where this node keeps its things."""
        return Folders.of(self.home)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        flags = init_settings()
        toml = InitSettingsSource(settings_cls, init_kwargs=_read_toml(_toml_path(flags)))
        return init_settings, _Variables(settings_cls), toml

    @field_validator("*", mode="before")
    @classmethod
    def _plain_values(cls, value: object, info: ValidationInfo) -> object:
        """No other setting is a bool or empty text; infinity and NaN fail the ranges by themselves."""
        if info.field_name not in FLAGS and (isinstance(value, bool) or value == ""):
            raise ValueError(value)
        return value

    @field_validator("listen", "announce", "allow", "seeds", "devices", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """One text stands for a list with commas, wherever it comes from."""
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return _each((value,), str.isprintable)[0]

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(ipaddress.ip_address(address)) for address in value)

    @field_validator("announce")
    @classmethod
    def _check_announce(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _each(value, _is_endpoint)

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        return _each((value,), lambda device: bool(_DEVICE.fullmatch(device)))[0]

    @field_validator("http")
    @classmethod
    def _check_http(cls, value: str) -> str:
        parse_endpoint(value)
        return value

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return parse_devices(value)

    @field_validator("max_upload", "max_download", "relay_rate", "relay_pair_rate")
    @classmethod
    def _check_rate(cls, value: int) -> int:
        if 0 < value < LEAST_CAP:  # a chunk would outlast the patience of the peer that waits for it
            raise ValueError(value)
        return value

    @field_validator("allow")
    @classmethod
    def _check_allow(cls, value: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        _each(value, lambda peer: bool(_PEER_ID.fullmatch(peer)))
        return value

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _each(value, lambda invite: invite.startswith("/") and invite.isprintable() and len(invite) <= 512)


class _Variables(EnvSettingsSource):
    """PEER_* variables as plain text: pydantic-settings would read lists as JSON."""

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        return value


def load_config(**flags: Any) -> NodeConfig:
    """The node's settings; flags that are None or an empty list were not given.

    Raises ConfigError that names every bad or unknown setting, where it came from, its value and what is allowed.
    """
    given = {name: value for name, value in flags.items() if value is not None and value != [] and value != ()}
    problems = _unknown_variables()
    try:
        config = NodeConfig(**given)
    except ValidationError as error:
        problems += dict.fromkeys(_sentence(detail, given) for detail in error.errors(include_url=False))
    else:
        if not problems:
            return config
    raise ConfigError("; ".join(problems))


def config_template() -> str:
    """All keys of peer.toml with what they mean and may be, as comments at their defaults."""
    lines = ["# Settings of one node. Flags outrank PEER_* variables (PEER_PORT=4001), which outrank this file.", ""]
    for name, info in NodeConfig.model_fields.items():
        value = EXAMPLES.get(name) or _toml_value(info.default)
        lines += [f"# {info.description}", f"#   {_allowed(name)}", f"#{name} = {value}", ""]
    return "\n".join(lines)


def _toml_value(default: object) -> str:
    if isinstance(default, tuple):
        return "[" + ", ".join(f'"{item}"' for item in default) + "]"
    if isinstance(default, bool):
        return str(default).lower()
    return f'"{default}"' if isinstance(default, str) else str(default)


def _is_endpoint(text: str) -> bool:
    match = _HOST.fullmatch(text)
    return match is not None and int(match.group(1) or 1) in range(1, 65536)


def _each(values: tuple[str, ...], holds: Callable[[str], bool]) -> tuple[str, ...]:
    for value in values:
        if not holds(value):
            raise ValueError(value)
    return values


def _allowed(name: str) -> str:
    extra = NodeConfig.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)  # ours, by _setting
    return str(extra["allowed"])


def _toml_path(flags: dict[str, Any]) -> Path:
    """peer.toml is looked for where flag or variable put `home`; a `home` inside it moves the other files only."""
    home = flags.get("home") or os.environ.get(PREFIX + "HOME")
    return Folders.of(Path(home) if home else None).peer_toml


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOML_BYTES + 1)
        if len(data) > MAX_TOML_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_TOML_BYTES} bytes; is it the right file?")
        return tomllib.loads(data.decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):  # a home that is a file is the folders' to refuse
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; move it away or change its permissions") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _unknown_variables() -> list[str]:
    known = {PREFIX + name.upper() for name in NodeConfig.model_fields}
    found = sorted(name for name in os.environ if name.startswith(PREFIX) and name.upper() not in known)
    return [f"{name}: no such variable; the closest known one is {closest(name, sorted(known))}" for name in found]


def _sentence(detail: ErrorDetails, flags: dict[str, Any]) -> str:
    name = str(detail["loc"][0])
    variable = PREFIX + name.upper()
    if name not in NodeConfig.model_fields:
        where = f"--{name.replace('_', '-')}" if name in flags else f"{_toml_path(flags)}: {name}"
        return f"{where}: no such setting; the closest known one is {closest(name, list(NodeConfig.model_fields))}"
    if name in flags:
        where = f"--{name.replace('_', '-')}"
    elif os.environ.get(variable):
        where = variable
    else:
        where = f"{_toml_path(flags)}: {name}"
    return f"{where} = {shown(detail['input'])}: must be {_allowed(name)}"
