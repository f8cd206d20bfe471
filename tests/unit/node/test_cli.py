"""The command line: what it parses, what it calls, and how it fails."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from peerloom.node import cli_demo, cli_run
from peerloom.node.cli import app
from peerloom.node.demo import DemoOutcome, DemoPlan
from peerloom.node.failures import exit_codes, explain, guarded
from peerloom.protocol.errors import PortInUse, SeedUnreachable, SpecError
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus
from tests.unit.node.test_status import NOW, status

INVITE = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWx"


class Result(SimpleNamespace):
    exit_code: int
    stdout: str
    stderr: str


Peer = Callable[..., Result]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Peer:
    """Runs `peer ARGUMENTS` in this process, from an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("peerloom.node.logs.setup", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(app, list(arguments), prog_name="peer")
        return Result(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)

    return run


class Daemon:
    """Stands in for `peerloom.node.daemon`: keeps what run_node was given, calls back, returns or raises."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None

    async def run_node(self, config: Any, **arguments: Any) -> int:
        self.calls.append({"config": config, **arguments})
        if self.error is not None:
            raise self.error
        listeners = arguments["listeners"]
        listeners.on_status(status("a", state="starting", reason="reading text"))
        listeners.on_joinable(SimpleNamespace(invites=[INVITE, INVITE + "2"]))
        if not arguments["spec"]:
            listeners.on_said("joined at 7 messages for 1000 bytes")
        listeners.on_started([("DHT", 1.0), ("model", 2.5)])
        listeners.on_status(status("a"))
        return 0


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    fake = Daemon()
    monkeypatch.setitem(sys.modules, "peerloom.node.daemon", fake)
    return fake


class Swarm:
    """Stands in for `peerloom.node.observer`."""

    def __init__(self) -> None:
        self.observations: list[list[NodeStatus]] = []
        self.invites: list[str] = []

    async def swarm_status(self, config: Any, invites: list[str]) -> tuple[RunSpec, list[NodeStatus]]:
        self.invites = invites
        return RunSpec(), self.observations[0]

    async def watch_swarm(
        self, config: Any, invites: list[str], interval_s: float
    ) -> AsyncIterator[tuple[RunSpec, list[NodeStatus]]]:
        for statuses in self.observations:
            yield RunSpec(), statuses
        raise KeyboardInterrupt


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> Swarm:
    fake = Swarm()
    monkeypatch.setitem(sys.modules, "peerloom.node.observer", fake)
    monkeypatch.setattr("time.time", lambda: NOW)
    return fake


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\nfrom peerloom.node.cli import app\nsys.argv[1:] = ['--help']\n"
        "try: app()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'hivemind', 'grpc', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_help_lists_every_exit_code(peer: Peer) -> None:
    shown = peer("--help").stdout
    for code, meaning in exit_codes().items():
        assert f"{code}  {meaning}" in shown


def test_flags_reach_the_config_only_when_given(peer: Peer, daemon: Daemon, tmp_path: Path) -> None:
    flags = ["--home", str(tmp_path), "--port", "0", "--listen", "127.0.0.1", "--listen", "::1", "--threads", "2"]
    assert peer("join", INVITE, *flags).exit_code == 0
    (call,) = daemon.calls
    assert call["config"].model_fields_set == {"home", "port", "listen", "threads"}
    assert call["config"].listen == ("127.0.0.1", "::1")
    assert (call["role"], call["invites"], call["spec"]) == ("trainer", [INVITE], None)


def test_a_joiner_prints_no_invite(peer: Peer, daemon: Daemon, tmp_path: Path) -> None:
    assert peer("join", INVITE, "--home", str(tmp_path)).stdout == "joined at 7 messages for 1000 bytes\n"


@pytest.mark.parametrize(("command", "role"), [("bootstrap", "bootstrap"), ("join", "trainer")])
def test_who_starts_a_swarm_prints_how_to_join(
    peer: Peer, daemon: Daemon, tmp_path: Path, command: str, role: str
) -> None:
    result = peer(command, "--home", str(tmp_path))
    assert result.stdout.splitlines() == [f"peer join {INVITE}", f"peer join {INVITE}2"]
    assert daemon.calls[0]["role"] == role
    assert daemon.calls[0]["spec"].name == "stdlib-llama"
    assert result.stderr == ""


def test_verbose_says_where_the_seconds_of_the_start_went(peer: Peer, daemon: Daemon, tmp_path: Path) -> None:
    assert "started in 3.5 s: DHT 1.0 s, model 2.5 s" in peer("join", "-v", "--home", str(tmp_path)).stderr


def test_a_run_file_is_the_run(peer: Peer, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "mine"\n')
    assert peer("bootstrap", "--run", "run.toml", "--home", str(tmp_path)).exit_code == 0
    assert daemon.calls[0]["spec"] == RunSpec(name="mine")


def test_an_error_is_one_sentence_and_its_exit_code(peer: Peer, daemon: Daemon, tmp_path: Path) -> None:
    daemon.error = PortInUse("port 4001 is taken; choose another with --port")
    result = peer("join", "--home", str(tmp_path))
    assert (result.exit_code, result.stdout) == (17, "")
    assert result.stderr == "peer: port 4001 is taken; choose another with --port\n"


def test_debug_shows_the_traceback_before_the_sentence(peer: Peer, daemon: Daemon, tmp_path: Path) -> None:
    daemon.error = PortInUse("port 4001 is taken")
    result = peer("join", "--debug", "--home", str(tmp_path))
    assert result.exit_code == 17
    assert result.stderr.startswith("Traceback") and result.stderr.endswith("\npeer: port 4001 is taken\n")


def test_a_bad_setting(peer: Peer, daemon: Daemon, tmp_path: Path) -> None:
    result = peer("join", "--port", "70000", "--home", str(tmp_path))
    assert result.exit_code == 11
    assert result.stderr.startswith("peer: --port = 70000")
    assert daemon.calls == []


@pytest.mark.parametrize(
    "arguments", [["join", "--port", "x"], ["frobnicate"], ["demo", "--nodes", "0"], ["run", "check"]]
)
def test_usage_errors_have_code_2(peer: Peer, arguments: list[str]) -> None:
    assert peer(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (SeedUnreachable("nobody answers"), 15, "nobody answers"),
        (SeedUnreachable(), 15, "No seed of the invite answered."),
        (SpecError(["one", "two"]), 10, "one; two"),
        (ExceptionGroup("", [PortInUse("port 1"), PortInUse("port 2")]), 17, "port 1; port 2"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 20, "cannot use /x: No space left on device; free"),
        (KeyError("x"), 1, "unexpected KeyError: 'x'; this is a fault of Peerloom's"),
    ],
)
def test_explain(error: Exception, code: int, sentence: str) -> None:
    found = explain(error)
    assert found[0] == code
    assert found[1].startswith(sentence)


def test_ctrl_c_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert guarded(interrupted, debug=True) == 0
    assert capsys.readouterr() == ("", "")


def test_status_json_and_its_exit_code(peer: Peer, swarm: Swarm, tmp_path: Path) -> None:
    swarm.observations = [[status("a", age_s=20), status("b")]]
    result = peer("status", INVITE, "--json", "--home", str(tmp_path))
    assert (result.exit_code, swarm.invites) == (40, [INVITE])
    shown = json.loads(result.stdout)
    assert (shown["health"], [node["silent_s"] for node in shown["nodes"]]) == ("degraded", [20.0, None])


def test_status_as_a_table(peer: Peer, swarm: Swarm, tmp_path: Path) -> None:
    swarm.observations = [[status("a", round=7)]]
    result = peer("status", INVITE, "--home", str(tmp_path))
    assert result.exit_code == 0
    assert RunSpec().run_id in result.stdout and "1 of 1 training" in result.stdout


def test_status_of_an_empty_swarm(peer: Peer, swarm: Swarm, tmp_path: Path) -> None:
    swarm.observations = [[]]
    assert peer("status", INVITE, "--home", str(tmp_path)).exit_code == 41


def test_status_without_an_invite_asks_where_this_home_was_last(peer: Peer, swarm: Swarm, tmp_path: Path) -> None:
    swarm.observations = [[status("a")]]
    (tmp_path / "last_invite").write_text(f"{INVITE}\n{INVITE}2\n")
    assert peer("status", "--home", str(tmp_path)).exit_code == 0
    assert swarm.invites == [INVITE, INVITE + "2"]


def test_status_of_a_home_that_was_nowhere(peer: Peer, swarm: Swarm, tmp_path: Path) -> None:
    result = peer("status", "--home", str(tmp_path))
    assert result.exit_code == 11
    assert "pass an invite" in result.stderr


def test_a_watch_keeps_the_node_that_is_gone_and_ends_well(peer: Peer, swarm: Swarm, tmp_path: Path) -> None:
    swarm.observations = [[status("a", age_s=20), status("b")], [status("b")]]
    result = peer("status", INVITE, "--watch", "--json", "--home", str(tmp_path))
    assert (result.exit_code, result.stderr) == (0, "")
    first, second = map(json.loads, result.stdout.splitlines())
    assert [node["name"] for node in second["nodes"]] == ["a", "b"] == [node["name"] for node in first["nodes"]]


def test_run_init_then_check(peer: Peer, tmp_path: Path) -> None:
    assert peer("run", "init", "mine.toml").exit_code == 0
    result = peer("run", "check", "mine.toml")
    assert result.exit_code == 0
    assert RunSpec().run_id in result.stdout
    assert peer("run", "init", "deep.toml", "--method", "pipeline").exit_code == 0
    assert "method pipeline" in peer("run", "check", "deep.toml").stdout
    assert peer("run", "init", "thin.toml", "--method", "seedflow", "--nodes", "4").exit_code == 0
    assert "method seedflow" in peer("run", "check", "thin.toml").stdout
    assert peer("run", "init", "many.toml", "--nodes", "16").exit_code == 0
    assert RunSpec().run_id not in peer("run", "check", "many.toml").stdout
    result = peer("run", "init", "odd.toml", "--method", "magic")
    assert result.exit_code == 10 and "method = 'magic'" in result.stderr and not (tmp_path / "odd.toml").exists()


def test_run_init_replaces_nothing_unless_told(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("precious")
    result = peer("run", "init")
    assert (result.exit_code, (tmp_path / "run.toml").read_text()) == (20, "precious")
    assert result.stderr == "peer: run.toml is there already; name another file, or replace it with --force\n"
    assert peer("run", "init", "--force").exit_code == 0
    assert (tmp_path / "run.toml").read_text() != "precious"


def test_run_check_has_a_line_for_each_fault(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('colour = "red"\nseed = -1\n')
    result = peer("run", "check", "bad.toml")
    assert (result.exit_code, len(result.stderr.splitlines())) == (10, 2)
    assert "colour" in result.stderr and "seed" in result.stderr


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def export(*arguments: Any, force: bool) -> SimpleNamespace:
        calls.append((*arguments, force))
        return SimpleNamespace(round=7, notes=("round-00000008 is damaged: passed over",))

    monkeypatch.setitem(sys.modules, "peerloom.node.export", SimpleNamespace(export=export, export_stages=export))
    return calls


def trained(home: Path, name: str) -> tuple[Path, RunSpec]:
    spec = RunSpec(name=name)
    folder = home / "runs" / spec.run_id
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(spec.canonical())
    return folder, spec


def test_export_takes_the_only_run(peer: Peer, exported: list[tuple[Any, ...]], tmp_path: Path) -> None:
    folder, spec = trained(tmp_path, "one")
    result = peer("export", "--home", str(tmp_path), "--out", "out")
    assert result.exit_code == 0
    assert result.stdout.startswith("wrote round 7 to out;")
    assert result.stderr == "peer: round-00000008 is damaged: passed over\n"
    assert exported == [(folder, spec, Path("out"), False)]


def test_export_of_several_runs_needs_one_named(peer: Peer, exported: list[tuple[Any, ...]], tmp_path: Path) -> None:
    trained(tmp_path, "one")
    folder, spec = trained(tmp_path, "two")
    result = peer("export", "--home", str(tmp_path))
    assert (result.exit_code, exported) == (11, [])
    assert "(one)" in result.stderr and "--run-id" in result.stderr
    assert peer("export", "--home", str(tmp_path), "--run-id", spec.run_id, "--force").exit_code == 0
    assert exported == [(folder, spec, Path("model"), True)]


def test_export_of_nothing(peer: Peer, exported: list[tuple[Any, ...]], tmp_path: Path) -> None:
    result = peer("export", "--home", str(tmp_path))
    assert (result.exit_code, exported) == (21, [])


class Demo:
    """Stands in for `run_demo`: notes the plan and returns an outcome of `fields`."""

    def __init__(self) -> None:
        self.plans: list[DemoPlan] = []
        self.fields: dict[str, Any] = {
            "method": "gasloc", "seconds": 60, "interrupted": False, "nodes": [], "spread": 0.01, "failures": [],
        }

    async def run(self, plan: DemoPlan, *given: Any) -> DemoOutcome:
        assert plan.folder.is_dir()
        given[-1]("http://127.0.0.1:9/")
        self.plans.append(plan)
        return DemoOutcome(**self.fields)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Demo:
    fake = Demo()
    monkeypatch.setattr(cli_demo, "run_demo", fake.run)
    return fake


def test_the_demo_leaves_its_figures_and_no_folder(peer: Peer, demo: Demo, tmp_path: Path) -> None:
    assert peer("demo", "--nodes", "2", "--minutes", "1", "--json", "figures.json").exit_code == 0
    assert json.loads((tmp_path / "figures.json").read_text()) == DemoOutcome(**demo.fields).to_json()
    (plan,) = demo.plans
    assert (plan.nodes, plan.seconds, plan.folder.exists()) == (2, 60.0, False)


def test_the_demo_says_where_its_page_is(peer: Peer, demo: Demo) -> None:
    assert "http://127.0.0.1:9/" in peer("demo").stdout


def test_debug_keeps_the_demos_folder(peer: Peer, demo: Demo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = peer("demo", "--debug")
    (plan,) = demo.plans
    assert plan.folder.is_dir() and str(plan.folder) in result.stdout


def test_a_demo_that_failed_says_why(peer: Peer, demo: Demo) -> None:
    demo.fields.update(failures=["node-2 ended early with exit code 3"], tail="[red]no such device[/]")
    result = peer("demo")
    assert (result.exit_code, result.stderr) == (1, "peer: the demo failed: node-2 ended early with exit code 3\n")
    assert "[red]no such device[/]" in result.stdout


def test_a_demo_ended_early_is_not_judged(peer: Peer, demo: Demo) -> None:
    demo.fields.update(failures=["node-2 finished no round"], interrupted=True)
    result = peer("demo")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "not judged" in result.stdout


def test_an_unknown_method(peer: Peer) -> None:
    result = peer("demo", "--method", "magic")
    assert result.exit_code == 11
    assert "gasloc" in result.stderr


def test_the_progress_bar_goes_when_training_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with cli_run.StartProgress() as progress:
        progress.update(status("a", state="fetching", reason="fetching the model"))
        assert progress._bar is not None
        assert progress._bar.tasks[0].description == "fetching the model"
        progress.update(status("a"))
        assert progress._bar is None
