"""The docs: every command in them is run by a test that is named, or it is said why not."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import typer

from peerloom.node.cli import app
from tests.docs import FILES, NOT_RUN, ROOT, RUN, STEPS, blocks, commands, section
from tests.helpers import environment


def test_every_command_is_run_by_a_test_or_said_not_to_be() -> None:
    assert not set(RUN) & set(NOT_RUN)
    assert set(commands()) == set(RUN) | set(NOT_RUN)
    for command, test in RUN.items():
        file, name = test.split("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), command


def test_the_operators_are_told_which_were_not_run() -> None:
    told = FILES[1].read_text()
    for command in NOT_RUN:
        (first, *_) = [word.rpartition("/")[2] for word in command.split() if "=" not in word]
        if first not in ("python3", "peer", "pip"):
            assert f"`{first}`" in section_of(told, "## What was run, and what was not"), command


def section_of(text: str, heading: str) -> str:
    begin = text.index(heading)
    return text[begin : text.find("\n## ", begin + 1)]


def test_the_steps_of_a_new_user_are_few_and_short() -> None:
    told = section(STEPS)
    assert len(told.split()) < 330, "a page of reading"
    assert len(blocks(told)[0]) == 5


def leaves() -> list[tuple[str, ...]]:
    """Every command of `peer`, with its group."""

    def below(command: object, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        children = getattr(command, "commands", None)
        if not children:
            return [path]
        return [leaf for name, child in children.items() for leaf in below(child, (*path, name))]

    return below(typer.main.get_command(app), ())


@pytest.mark.parametrize("path", leaves(), ids=" ".join)
def test_every_command_has_help(path: tuple[str, ...]) -> None:
    from typer.testing import CliRunner

    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    flags = set(re.findall(r"--[a-z][a-z-]+", result.stdout))
    command: object = typer.main.get_command(app)
    for name in path:
        command = getattr(command, "commands")[name]  # noqa: B009  typer's own type has none
    parameters = getattr(command, "params")  # noqa: B009
    known = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts) if flag.startswith("--")}
    assert known <= flags | {"--help"}, "each flag is listed"
    assert all(each.help for each in parameters if each.param_type_name == "option"), "and says what it does"


def test_the_help_of_the_command_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "peerloom.node", "--help"],
        capture_output=True, text=True, env=environment(COLUMNS="100", TERM="dumb"), check=True,
    )  # fmt: skip
    assert all(f" {path[0]} " in done.stdout for path in leaves()) and "Exit codes" in done.stdout
