"""`peer run init`, `peer run check` and `peer export`: commands that touch files and no network."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from peerloom.node.folders import Folders
from peerloom.node.specs import load_spec, template
from peerloom.protocol.errors import CheckpointError, ConfigError, SpecError, StorageError
from peerloom.protocol.types import RunId

if TYPE_CHECKING:
    from peerloom.node.config import NodeConfig
    from peerloom.node.export import Exported
    from peerloom.protocol.runspec import RunSpec


def write_template(path: Path, method: str, *, force: bool) -> None:
    """Writes a run.toml with every key; raises StorageError for one that is there, without `force`, and SpecError."""
    text = template(method)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise StorageError(f"{path} is there already; name another file, or replace it with --force") from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; name another file") from error
    print(f"wrote {path}; change it, then: peer run check {path}")


def check(path: Path, *, base: bool = False) -> int:
    """Prints a run.toml's name and id, or each of its faults on a line of its own.

    With `base` it also opens the model that the run starts from, and says whether it is the one that `model.digest`
    names, or prints the line to add. Raises ConfigError where there is none to name, RunMismatch for another one.
    """
    try:
        spec = load_spec(path)
    except SpecError as error:
        print("\n".join(f"peer: {problem}" for problem in error.problems), file=sys.stderr)
        return error.exit_code
    print(f"{path} is well: run {spec.run_id}, {spec.name}, method {spec.method}")
    if base:
        _check_base(path, spec)
    return 0


def _check_base(path: Path, spec: RunSpec) -> None:
    if not spec.model.path or spec.method == "pipeline":
        raise ConfigError(
            f"{path} has no base to name: model.digest is for a model.path with method gasloc or seedflow; leave --base"
        )
    from peerloom.node.worker.model import build_model, check_digest
    from peerloom.node.worker.seedflow_state import base_digest

    digest = base_digest(build_model(spec))
    check_digest(spec, digest)
    if spec.model.digest:
        print(f"the model at {spec.model.path} is the one that model.digest names")
    else:
        print(f'nodes take no other model than this one with the line below in the table [model]:\ndigest = "{digest}"')


def export(config: NodeConfig, *, out: Path, run_id: str | None, force: bool, homes: list[Path]) -> None:
    """Writes this home's newest checkpoint of a run to `out`, of a pipeline with the stages that `homes` have.

    Raises CheckpointError when there is none, or a stage is missing.
    """
    folders = config.folders
    run_dir = folders.run_dir(RunId(run_id)) if run_id else _only_run(folders)
    if not (run_dir / "run.toml").exists():
        raise CheckpointError(f"{run_dir} holds no run; pass the --home that trained it")
    spec = load_spec(run_dir / "run.toml")
    if spec.method == "pipeline":
        from peerloom.node.export import export_stages

        run_dirs = [run_dir, *(Folders.of(home).run_dir(spec.run_id) for home in homes)]
        _tell(export_stages(run_dirs, spec, out, force=force), out)
        return
    from peerloom.node.export import export as write

    _tell(write(run_dir, spec, out, force=force), out)


def export_swarm(config: NodeConfig, invites: list[str], *, out: Path, force: bool) -> None:
    """Writes the newest checkpoints that a live pipeline's nodes hand over to `out`."""
    from peerloom.node.export import export_stages
    from peerloom.node.gather import gather

    with tempfile.TemporaryDirectory(prefix="peerloom-gather-") as folder:
        spec = asyncio.run(gather(config, invites, Path(folder)))
        _tell(export_stages([Path(folder)], spec, out, force=force), out)


def _tell(written: Exported, out: Path) -> None:
    for note in written.notes:
        print(f"peer: {note}", file=sys.stderr)
    opener = f"transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})"
    print(f"wrote round {written.round} to {out}; open it with {opener}")


def _only_run(folders: Folders) -> Path:
    runs = sorted(file.parent for file in folders.runs_dir.glob("*/run.toml"))
    if not runs:
        raise CheckpointError(f"no run has been trained in {folders.data}; train with `peer join`, or pass --home")
    if len(runs) > 1:
        names = ", ".join(f"{run.name} ({load_spec(run / 'run.toml').name})" for run in runs)
        raise ConfigError(f"this home knows several runs, {names}; choose one with --run-id")
    return runs[0]
