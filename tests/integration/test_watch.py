"""Watching real nodes: the page and metrics of each, a real Prometheus, their logs, and the doctor."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from peerloom.node.failures import OK
from tests.helpers import Node, Swarm, run_peer, wait_for

pytestmark = pytest.mark.slow
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_every_node_serves_the_swarm_as_it_sees_it(swarm: Swarm) -> None:
    a, b = swarm.trainers("a", "b")
    urls = {node.page() for node in (swarm.nodes["seed"], a, b)}
    assert len(urls) == 3, "three nodes of one machine, three ports"
    for node in (swarm.nodes["seed"], a):
        url = node.page()

        def sees_all(url: str = url) -> dict[str, Any] | None:
            told: dict[str, Any] = json.loads(get(url + "status.json"))
            trains = [row["name"] for row in told["nodes"] if row["state"] in ("training", "seeking", "exchanging")]
            met = any(row["last_partner"] for row in told["nodes"])
            return told if met and {"a", "b"} <= set(trains) else None

        wait_for("both trainers on the page, and that they met", sees_all)
        assert get(url + "healthz") and get(url + "readyz")
        assert "peerloom_swarm_nodes" in get(url + "metrics")


def test_every_line_of_a_log_says_whose_it_is(swarm: Swarm) -> None:
    (a,) = swarm.trainers("a")
    lines = [json.loads(line) for line in a.said().split("\n")[:-1]]  # all that it writes, its worker's words too
    for line in lines:
        assert {"time", "level", "logger", "message", "run", "peer", "round"} <= set(line)
        assert len(line["peer"]) == 8, line
    runs = [line["run"] for line in lines]
    known = runs.index(a.run_dir.name)
    assert set(runs[:known]) <= {""} and set(runs[known:]) == {a.run_dir.name}, "from when the run is known on"
    first = next(index for index, line in enumerate(lines) if line["message"].startswith("round "))
    assert all(isinstance(line["round"], int) for line in lines[first:])
    assert [line for line in lines if line["message"].startswith("worker started")][0]["run"] == a.run_dir.name


def test_why_nobody_is_met_is_logged_once_and_not_every_round(swarm: Swarm) -> None:
    (a,) = swarm.trainers("a")
    swarm.rest("seed", "a", "watcher")
    # the reason may change as the others' records end; told every round, there would never be thirty rounds of quiet
    a.wait_for("thirty rounds alone without another word on it", lambda: _rounds_since_the_last_reason(a) >= 30)


def _rounds_since_the_last_reason(node: Node) -> int:
    """Rounds it ended alone since it last said why it meets nobody; 0 before it said so, or once it met somebody."""
    alone, said = 0, False
    for message in (line["message"] for line in node.messages()):
        if message.startswith(("no partner: ", "this node meets nobody")):
            alone, said = 0, True
        elif message.startswith("round "):
            alone = alone + 1 if " done alone" in message else 0
    return alone if said else 0


def test_nothing_that_is_secret_is_logged_or_served(swarm: Swarm) -> None:
    swarm.trainers("a")
    talker = swarm.join("talker", "--debug")
    try:
        talker.wait_for_rounds(3)
        assert run_peer("status", swarm.invite, "--home", str(talker.home.parent / "asking"), "--debug").stdout
        served = "".join(get(talker.page() + path) for path in ("metrics", "status.json", "healthz"))
        written = "".join(file.read_text() for file in talker.home.glob("runs/*/*.jsonl"))
        assert talker.end() == OK
        told = talker.said() + talker.printed() + served + written
    finally:
        talker.destroy()
    assert any(line["level"] == "debug" for line in talker.messages()), "it said all it has to say"
    for secret in secrets_of(talker.home):
        assert secret not in told


def secrets_of(home: Path) -> list[str]:
    """The private keys below a home, in the forms in which text could hold them."""
    pem = (home / "tls.pem").read_text()
    found = [line for line in pem[pem.index("PRIVATE KEY") :].splitlines()[1:] if len(line) == 64]
    assert found, "the key of the certificate"
    data = (home / "identity.key").read_bytes()
    seed = data[4:36]  # libp2p's private key file: four bytes, the private key, the public one
    assert len(data) == 68
    encoded = (base64.b64encode(seed), base64.urlsafe_b64encode(seed), base64.b64encode(data)[:44], seed.hex().encode())
    return [*found, *(text.decode()[:42] for text in encoded), repr(seed)[2:-1]]


def test_the_secrets_would_be_found(swarm: Swarm) -> None:
    home = swarm.nodes["seed"].home
    for secret in secrets_of(home):
        assert len(secret) > 40
    assert base64.b64encode((home / "identity.key").read_bytes()).decode().startswith(secrets_of(home)[-3][:40])


def test_the_doctor_finds_the_way_to_the_swarm(swarm: Swarm) -> None:
    swarm.trainers("a")
    home = str(swarm.folder / "patient")
    done = run_peer("doctor", swarm.invite, "--home", home, "--json", "--threads", "1", **swarm.variables)
    assert done.returncode == OK, done.stdout
    told = json.loads(done.stdout)
    levels = {check["name"]: check["level"] for check in told["checks"]}
    assert levels[f"seed {swarm.invite.split('#')[0][-8:]}"] == levels["clock"] == levels["swarm"] == "ok"
    assert levels["upload"] == levels["download"] == "ok"
    assert levels["reachability"] == levels["relay reachability"] == "ok"
    found = told["benchmark"]
    assert found["model"] == "tiny" and 0 < found["training_share"] < 1
    assert found["contribution_tokens_per_s"] < found["tokens_per_s"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here: apt-get install prometheus")
def test_a_real_prometheus_scrapes_a_node_and_its_rules_load(swarm: Swarm, tmp_path: Path) -> None:
    (a,) = swarm.trainers("a")
    shutil.copy(DEPLOY / "prometheus/alerts.yml", tmp_path)
    target = a.page().removeprefix("http://").strip("/")
    config = (DEPLOY / "prometheus/prometheus.yml").read_text().replace("15s", "1s")
    config = config[: config.index("      - targets:")] + f"      - targets: ['{target}']\n"
    (tmp_path / "prometheus.yml").write_text(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             f"--web.listen-address={address}"], stdout=log, stderr=log,
        )  # fmt: skip
    try:
        def up() -> bool:
            try:
                return bool(query(address, 'up{job="peerloom"} == 1'))
            except OSError:
                assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
                return False

        wait_for("a scrape that succeeds", up)
        (sample,) = query(address, 'peerloom_node_info{job="peerloom"}')
        assert sample["metric"]["name"] == "a"
        assert query(address, 'peerloom_tokens_total{job="peerloom"} > 0')
        rules = json.loads(get(f"http://{address}/api/v1/rules"))["data"]["groups"]
        assert {group["name"] for group in rules} == {"peerloom-node", "peerloom-swarm"}
        assert not [rule["lastError"] for group in rules for rule in group["rules"] if rule.get("lastError")]
    finally:
        process.terminate()
        process.wait(30)


def query(address: str, expression: str) -> list[dict[str, Any]]:
    from urllib.parse import quote

    told = json.loads(get(f"http://{address}/api/v1/query?query={quote(expression)}"))
    found: list[dict[str, Any]] = told["data"]["result"]
    return found
