"""Generates the committed stubs from proto/*.proto: `python proto/generate.py [--check]`.

The oldest supported tool is used, so that its output imports on every protobuf from 5.29 on; the virtual path
peerloom/proto/ keeps our names apart from other packages' in protobuf's process-wide pool.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

TOOL_VERSION = "1.71.2"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
FOLDER = Path(__file__).resolve().parent


def check_tool() -> None:
    """Exits with a sentence unless grpcio-tools has exactly the version that the committed stubs were made with."""
    try:
        found = importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        found = "missing"
    if found != TOOL_VERSION:
        sys.exit(
            f"grpcio-tools is {found}, the stubs need {TOOL_VERSION}: in a venv of its own, "
            f"pip install 'grpcio-tools=={TOOL_VERSION}' 'setuptools<81'"
        )


def generate(out: Path) -> dict[str, bytes]:
    """Runs protoc into `out`; returns the stubs by file name."""
    protos = sorted(str(path) for path in FOLDER.glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-Ipeerloom/proto={FOLDER}"]
    command += [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    done = subprocess.run(command + protos, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"protoc failed:\n{done.stderr.strip()}")
    return {path.name: path.read_bytes() for path in sorted((out / "peerloom" / "proto").iterdir())}


def committed() -> dict[str, bytes]:
    """The stubs that lie in this folder, by file name."""
    return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.name.endswith(SUFFIXES)}


def differences(fresh: dict[str, bytes], old: dict[str, bytes]) -> list[str]:
    """Names of the stubs that are missing, stale or left over."""
    return sorted(name for name in fresh.keys() | old.keys() if fresh.get(name) != old.get(name))


def main(arguments: list[str] | None = None) -> None:
    """Writes the stubs, or with --check compares them and exits 1 with the names of those that differ."""
    parser = argparse.ArgumentParser(description="Generate the protobuf stubs of peerloom.proto.")
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs, write nothing")
    check = parser.parse_args(arguments).check
    check_tool()
    with tempfile.TemporaryDirectory() as folder:
        fresh = generate(Path(folder))
    stale = differences(fresh, committed())
    if check and stale:
        sys.exit(f"stubs differ from their .proto files: {', '.join(stale)}; run python proto/generate.py, commit them")
    for name in () if check else stale:
        if name in fresh:
            (FOLDER / name).write_bytes(fresh[name])
        else:
            (FOLDER / name).unlink()


if __name__ == "__main__":
    main()
