"""The flags that several commands share: declared once, handed to a command as one `Flags`."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peerloom.node.failures import guarded

if TYPE_CHECKING:
    from peerloom.node.config import NodeConfig

_NODE = "This node"


@dataclass(frozen=True, slots=True)
class Flags:
    """The shared flags that were given, by NodeConfig field, and the two that are the command's own."""

    given: dict[str, Any]
    verbose: bool
    debug: bool

    def config(self, *, quiet: bool = False) -> NodeConfig:
        """The node's settings: these flags over PEER_* over peer.toml over defaults; raises ConfigError.

        Logging is set up by them; `quiet` leaves out what is not at least a warning, unless -v or --debug is given.
        """
        from peerloom.node.config import load_config
        from peerloom.node.logs import setup

        config = load_config(**self.given)
        setup(config.log_format, 2 if self.debug else int(self.verbose))
        if quiet and not self.verbose and not self.debug:
            logging.getLogger("peerloom").setLevel(logging.WARNING)
        return config


def _home(
    home: Annotated[Path | None, typer.Option(help="Folder for all this node keeps.", rich_help_panel=_NODE)] = None,
) -> None: ...


def _node(
    name: Annotated[str | None, typer.Option(help="What others see it called.", rich_help_panel=_NODE)] = None,
    listen: Annotated[
        list[str] | None, typer.Option(help="IP address to listen on; may be repeated.", rich_help_panel=_NODE)
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="DHT port; 0: a free one, kept over restarts.", rich_help_panel=_NODE)
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="gRPC port; 0: a free one, kept over restarts.", rich_help_panel=_NODE)
    ] = None,
    announce: Annotated[
        list[str] | None, typer.Option(help="Public HOST or HOST:PORT of this node.", rich_help_panel=_NODE)
    ] = None,
    relay: Annotated[
        bool | None,
        typer.Option("--relay/--no-relay", help="Carry calls to peers behind routers.", rich_help_panel=_NODE),
    ] = None,
    relay_port: Annotated[
        int | None,
        typer.Option(help="Port for what it carries; 0: a free one, kept over restarts.", rich_help_panel=_NODE),
    ] = None,
    relay_rate: Annotated[
        int | None, typer.Option(help="Bytes a second carried for others at most.", rich_help_panel=_NODE)
    ] = None,
    relay_pair_rate: Annotated[
        int | None, typer.Option(help="Bytes a second carried for any two at most.", rich_help_panel=_NODE)
    ] = None,
    port_mapping: Annotated[
        bool | None,
        typer.Option("--port-mapping/--no-port-mapping", help="Ask the router for ports.", rich_help_panel=_NODE),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_NODE)] = None,
    devices: Annotated[
        str | None, typer.Option(help="Several, to share one model: 0,1,2,3 or cpu:4.", rich_help_panel=_NODE)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for training.", rich_help_panel=_NODE)] = None,
    nice: Annotated[
        int | None, typer.Option(help="Step back for other programs, 0 to 19.", rich_help_panel=_NODE)
    ] = None,
    stage: Annotated[
        int | None, typer.Option(help="The pipeline's stage to host, from 0.", rich_help_panel=_NODE)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Text to train on here, not the run's data.source.", rich_help_panel=_NODE)
    ] = None,
    max_upload: Annotated[
        int | None,
        typer.Option(help="Bytes/s sent to peers at most, beside the DHT's; 0: no cap.", rich_help_panel=_NODE),
    ] = None,
    max_download: Annotated[
        int | None,
        typer.Option(help="Bytes/s received from peers at most, beside the DHT's; 0: no cap.", rich_help_panel=_NODE),
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="IP:PORT of page, /metrics, /healthz; auto; none: off.", rich_help_panel=_NODE)
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write TensorBoard event files there.", rich_help_panel=_NODE)
    ] = None,
    trust_paths: Annotated[
        bool | None,
        typer.Option("--trust-paths", help="Let a run of others read local paths it names.", rich_help_panel=_NODE),
    ] = None,
) -> None: ...


def _logging(
    log_format: Annotated[str | None, typer.Option(help="auto, human or json.", rich_help_panel=_NODE)] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.", rich_help_panel=_NODE)] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, and all that is logged.", rich_help_panel=_NODE)
    ] = False,
) -> None: ...


def command(
    app: typer.Typer, name: str, *, node: bool = False, home: bool = True
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Adds a command to `app`: its function takes Flags first and returns an exit code or None for 0.

    The command line gets the function's own parameters, then --home with `home`, the node's settings with `node`, and
    the logging flags.
    """

    def register(function: Callable[..., int | None]) -> Callable[..., None]:
        own = _parameters(function)[1:]
        groups: list[Callable[..., None]] = [*([_home] if home else []), *([_node] if node else []), _logging]
        shared = [parameter for group in groups for parameter in _parameters(group)]

        @functools.wraps(function)
        def run(**values: Any) -> None:
            given = {parameter.name: values.pop(parameter.name) for parameter in shared}
            verbose, debug = given.pop("verbose"), given.pop("debug")
            flags = Flags({key: value for key, value in given.items() if value is not None}, verbose, debug)
            raise typer.Exit(guarded(lambda: function(flags, **values) or 0, debug=debug))

        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*own, *shared]]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__
        app.command(name)(run)
        return run

    return register


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())
