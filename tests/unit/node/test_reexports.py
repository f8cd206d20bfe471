"""A daemon's imports: hivemind's DHT without the rest of it, every name the real one, torch left to the worker."""

from __future__ import annotations

import subprocess
import sys

import pytest

from peerloom.node.reexports import reexports


def run(code: str) -> str:
    """Runs `code` in a fresh interpreter; what it printed."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_daemon_runs_without_torch() -> None:
    code = (
        "import sys, peerloom.node.daemon, peerloom.node.cli_status; from peerloom.node.p2pd import load_hivemind\n"
        "load_hivemind(); from hivemind.dht.node import DHTNode; from hivemind.p2p import P2P, PeerID\n"
        "print(DHTNode.__module__, [name for name in ('torch', 'scipy', 'aiohttp') if name in sys.modules])"
    )
    assert run(code) == "hivemind.dht.node []"


def test_each_name_is_the_one_that_an_ordinary_import_gives() -> None:
    code = (
        "import sys, importlib\n"
        "if sys.argv[1:]: from peerloom.node.reexports import defer; defer(('hivemind', 'hivemind.utils'))\n"
        "import hivemind, hivemind.utils\n"
        "found = [hivemind.DHT, hivemind.Optimizer, hivemind.utils.MPFuture, hivemind.utils.get_logger]\n"
        "print([each.__module__ for each in found], hivemind.__version__, hivemind.__file__, hivemind.utils.__path__)\n"
    )
    deferred = run(f"import sys; sys.argv.append('defer')\n{code}")
    assert deferred == run(code) and "hivemind.dht.dht" in deferred


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    code = (
        "from peerloom.node.reexports import defer; defer(('hivemind',)); import hivemind\n"
        "print(hasattr(hivemind, 'no_such_name'))"
    )
    assert run(code) == "False"


@pytest.mark.parametrize(
    "source",
    ["import os", "from .near import name", "from far import *", "a = b", "if True:\n    from far import name", "f()"],
)
def test_an_init_that_does_more_is_left_alone(source: str) -> None:
    assert reexports(source) is None


def test_what_an_init_reexports() -> None:
    source = '"""Doc."""\nfrom far.off import one, two as second\n__version__ = "1.0"\n'
    assert reexports(source) == ({"one": ("far.off", "one"), "second": ("far.off", "two")}, {"__version__": "1.0"})
