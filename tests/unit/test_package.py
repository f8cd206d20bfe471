"""The package is this checkout's, whole, and says of itself what is so."""

from __future__ import annotations

import re
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import peerloom.node
import peerloom.optim
import peerloom.proto
import peerloom.protocol
from peerloom.node import demo, doctor, status
from peerloom.node.failures import exit_codes
from peerloom.protocol import errors
from peerloom.protocol.errors import PeerError, PeerloomError

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "deploy/reference.md").read_text()
LAYERS = (peerloom.node, peerloom.optim, peerloom.proto, peerloom.protocol)


def test_the_code_under_test_is_this_checkouts() -> None:
    for layer in LAYERS:
        assert layer.__file__ is not None
        assert Path(layer.__file__).resolve().parent == ROOT / layer.__name__.removeprefix("peerloom.")


def test_every_package_is_listed_for_the_wheel() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    roots = {name: folder for name, folder in setuptools["package-dir"].items()}
    found = {
        ".".join([name, *init.parent.relative_to(ROOT / folder).parts])
        for name, folder in roots.items()
        for init in (ROOT / folder).glob("**/__init__.py")
    }
    assert found == set(setuptools["packages"])


def error_classes() -> list[type[PeerloomError]]:
    found: list[type[PeerloomError]] = []
    todo: list[type[PeerloomError]] = [PeerloomError]
    while todo:
        error = todo.pop()
        found.append(error)
        todo += error.__subclasses__()
    return found


def test_every_error_stands_in_the_one_tree() -> None:
    outside = {error.__name__ for error in error_classes() if error.__module__ != errors.__name__}
    assert outside <= {"GatewayRefused", "Unreachable", "UnknownSession", "TunnelRefused"}, "these never leave the node"


def test_every_error_has_an_exit_code_of_its_own() -> None:
    own = [error for error in error_classes() if not (issubclass(error, PeerError) and error is not PeerError)]
    codes = [error.exit_code for error in own]
    assert len(set(codes)) == len(codes)
    assert {error.exit_code for error in error_classes() if issubclass(error, PeerError)} == {PeerError.exit_code}
    assert set(codes).isdisjoint({0, 2, 130}), "success, usage and Ctrl-C have theirs"


def test_the_tree_drawn_in_errors_says_the_same() -> None:
    drawn = dict(re.findall(r"^[├└─│ ]*(\w+) +(\d+) ", errors.__doc__ or "", re.MULTILINE))
    assert drawn == {error.__name__: str(error.exit_code) for error in error_classes() if "exit_code" in vars(error)}


def test_the_reference_lists_every_exit_code_with_its_meaning() -> None:
    listed = {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.+) \|$", REFERENCE, re.MULTILINE)}
    assert listed == exit_codes()


def test_ci_runs_readmes_own_test_command() -> None:
    command = re.search(r"^python3 -m venv .*pytest.*$", README, re.MULTILINE)
    assert command is not None, "README has no test command on one line"
    assert "^python3 -m venv .*pytest" in (ROOT / ".ci" / "run").read_text(), "CI takes the command from README"


@pytest.mark.parametrize("module", [status, demo, doctor])
def test_the_docs_show_the_json_as_its_module_documents_it(module: ModuleType) -> None:
    documented = re.search(r"^    \{.*?\n\n", module.__doc__ or "", re.DOTALL | re.MULTILINE)
    assert documented is not None
    text = (ROOT / "deploy/README.md").read_text() if module is doctor else REFERENCE
    assert textwrap.dedent(documented[0]).strip() in text


def test_readme_opens_with_its_two_commands() -> None:
    block = README.split("```")[1].splitlines()[1:]
    commands = [line for line in block if line and not line.startswith("#")]
    assert len(commands) == 2
    assert "peer demo" in commands[0] and "pytest" in commands[1]
