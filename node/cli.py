"""The `peer` command: what can be asked of it; the work is in `cli_*.py`, loaded when a command runs."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from peerloom.node.cli_options import Flags, command
from peerloom.node.failures import exit_codes
from peerloom.node.parent import heed_parent
from peerloom.node.stopping import stop_signals

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train one model together with others, from machine to machine, with no server in the middle.",
    epilog="\n".join(["[bold]Exit codes[/bold]", *(f"{code}  {text}" for code, text in exit_codes().items())]),
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("peerloom"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None: ...


run_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Write or check a run.toml.")
app.add_typer(run_app, name="run")

Invites = Annotated[
    list[str] | None, typer.Argument(metavar="INVITE", help="Where to join: /ip4/.../tcp/.../p2p/...")
]
RunFile = Annotated[
    Path | None, typer.Option("--run", metavar="RUN.TOML", help="The run; by default the swarm's, or the embedded one.")
]


@command(app, "demo", home=False)
def demo(
    flags: Flags,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Trainers to start.")] = 4,
    minutes: Annotated[float, typer.Option(min=0.05, help="How long it runs, start included.")] = 3.0,
    method: Annotated[
        str, typer.Option(help="How the nodes learn from each other: gasloc, seedflow or pipeline.")
    ] = "gasloc",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
) -> int:
    """Run a real swarm of local processes and watch it learn."""
    from peerloom.node.cli_demo import demo

    Flags(flags.given, flags.verbose, debug=False).config(quiet=True)  # what the nodes log is in their folder
    return demo(nodes=nodes, seconds=minutes * 60, method=method, json_file=json, keep=flags.debug)


@command(app, "bootstrap", node=True)
def bootstrap(flags: Flags, run: RunFile = None) -> int:
    """Start a seed node: it gives out the run and does not train."""
    from peerloom.node.cli_run import serve

    return serve(flags.config(), role="bootstrap", invites=[], run_file=run, verbose=flags.verbose)


@command(app, "join", node=True)
def join(flags: Flags, invites: Invites = None, run: RunFile = None) -> int:
    """Join a swarm and train; with no INVITE, start a swarm of one."""
    from peerloom.node.cli_run import serve

    return serve(flags.config(), role="trainer", invites=invites or [], run_file=run, verbose=flags.verbose)


@command(app, "status")
def status(
    flags: Flags,
    invites: Invites = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it, until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch one object a line.")] = False,
) -> int:
    """Show the swarm; with no INVITE, the one this home joined last."""
    from peerloom.node.cli_status import status

    return status(flags.config(quiet=True), invites or [], watch=watch, as_json=json)


@command(app, "doctor", node=True)
def doctor(
    flags: Flags,
    invites: Invites = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    benchmark: Annotated[
        bool, typer.Option("--benchmark/--no-benchmark", help="Measure speed and bandwidth, for some ten seconds.")
    ] = True,
) -> int:
    """Check this machine and its way to the swarm; say what it would contribute."""
    from peerloom.node.cli_doctor import doctor

    return doctor(flags.config(quiet=True), invites or [], as_json=json, benchmark=benchmark)


@command(app, "export")
def export(
    flags: Flags,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write it.")] = Path("model"),
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Which run; needed when this home knows several.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    swarm: Annotated[
        list[str] | None, typer.Option("--from", metavar="INVITE", help="Gather a live pipeline's stages.")
    ] = None,
    stages_from: Annotated[
        list[Path] | None,
        typer.Option("--stages-from", metavar="HOME", help="A home with stages of the run; may be repeated."),
    ] = None,
) -> None:
    """Write the newest checkpoint as a Hugging Face folder."""
    from peerloom.node.cli_files import export, export_swarm

    config = flags.config(quiet=True)
    if swarm:
        export_swarm(config, swarm, out=out, force=force)
    else:
        export(config, out=out, run_id=run_id, force=force, homes=stages_from or [])


@command(run_app, "init", home=False)
def run_init(
    flags: Flags,
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="The file to write.")] = Path("run.toml"),
    method: Annotated[str, typer.Option(help="gasloc, seedflow or pipeline.")] = "gasloc",
    nodes: Annotated[
        int,
        typer.Option(
            min=1,
            help="How many you expect: from 8 on, gasloc's nodes meet in groups of 4; seedflow has as many `clients`.",
        ),
    ] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a run.toml to start from."""
    from peerloom.node.cli_files import write_template

    write_template(path, method, nodes, force=force)


@command(run_app, "check", home=False)
def run_check(
    flags: Flags,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to check.")],
    base: Annotated[
        bool, typer.Option("--base", help="Open the model at model.path too: is it the one that model.digest names?")
    ] = False,
) -> int:
    """Check a run.toml and print its run id."""
    from peerloom.node.cli_files import check

    return check(path, base=base)


def main() -> None:
    """Entry point of `peer`."""
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before grpc is loaded: its fork handlers stall a node that spawns
    heed_parent()
    for number in stop_signals():
        signal.signal(number, signal.default_int_handler)  # until a node takes it, it ends what Ctrl-C ends
    code: object = 0
    try:
        app(prog_name="peer")
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 0
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # what is left is the teardown of hivemind and grpc: seconds on a busy machine, and nothing to gain
    os._exit(code if isinstance(code, int) else int(code is not None))
