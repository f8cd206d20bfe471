"""protocol/ takes time and randomness as arguments: no call of the random module's own functions, no clock, no I/O."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import peerloom.protocol

FILES = sorted(Path(peerloom.protocol.__file__).parent.glob("*.py"))
FORBIDDEN = {"time", "datetime", "asyncio", "socket", "os", "pathlib", "threading", "secrets", "uuid", "grpc", "torch"}
RANDOM_ALLOWED = {"Random"}  # the type of an argument, and seeded instances


def impurities(source: str) -> list[str]:
    """Every use of a clock, of I/O or of global randomness in a module's source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.partition(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            root = node.module.partition(".")[0]
            if root in FORBIDDEN:
                found.append(node.module)
            if root == "random":
                found += [f"random.{a.name}" for a in node.names if a.name not in RANDOM_ALLOWED]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            if node.attr not in RANDOM_ALLOWED:
                found.append(f"random.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Random") and not node.args:
            found.append("an unseeded Random")
    return found


def test_there_is_something_to_look_at() -> None:
    assert {"gossip.py", "membership.py", "transfer.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_protocol_is_pure(path: Path) -> None:
    assert impurities(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from time import monotonic",
        "import random\nrandom.random()",
        "from random import choice",
        "import random\nrandom.Random()",
    ],
)
def test_the_check_finds_what_it_is_for(source: str) -> None:
    assert impurities(source)
