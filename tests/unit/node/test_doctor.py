"""`peer doctor`: each check's three levels, the sums of the benchmark, what is printed."""

from __future__ import annotations

import json
import re
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from peerloom.node import cli_doctor, doctor, doctor_local
from peerloom.node.cli import app
from peerloom.node.config import NodeConfig, load_config
from peerloom.node.doctor import Finding, Report, contribution
from peerloom.node.doctor_local import GIB, local_findings
from peerloom.node.doctor_network import Network, network_findings
from peerloom.node.failures import DOCTOR_FAILS, OK


def found(config: NodeConfig, name: str) -> Finding:
    return next(finding for finding in local_findings(config) if finding.name == name)


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return load_config(home=tmp_path)


def test_a_fit_machine_has_no_complaint_but_the_free_ports(config: NodeConfig) -> None:
    findings = list(local_findings(config))
    assert [f.name for f in findings if f.level == "fail"] == []
    names = {finding.name for finding in findings}
    assert names == {
        "versions", "disk", "memory", "shared memory", "open files", "GPU", "IPv4", "IPv6", "port", "gRPC port",
        "identity",
    }  # fmt: skip
    assert all(finding.remedy for finding in findings if finding.level != "ok")


@pytest.mark.parametrize(("free", "level"), [(100 * GIB, "ok"), (2 * GIB, "warn"), (GIB // 2, "fail")])
def test_disk(config: NodeConfig, monkeypatch: pytest.MonkeyPatch, free: int, level: str) -> None:
    monkeypatch.setattr(doctor_local.shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=free))
    assert found(config, "disk").level == level


@pytest.mark.parametrize(
    ("available", "limit", "level"),
    [(8 * GIB, None, "ok"), (GIB, None, "warn"), (8 * GIB, GIB // 4, "fail"), (GIB // 4, 8 * GIB, "fail")],
)
def test_memory(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch, available: int, limit: int | None, level: str
) -> None:
    monkeypatch.setattr(doctor_local.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    monkeypatch.setattr(doctor_local, "_cgroup_limit", lambda: limit)
    assert found(config, "memory").level == level


def test_few_open_files(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finding = found(config, "open files")
    assert (finding.level, finding.remedy) == ("warn", "ulimit -n 4096")


def test_ports_that_are_free_taken_and_unnamed(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = load_config(home=tmp_path, listen="127.0.0.1", port=port)
        assert found(config, "port").level == "warn" and str(port) in found(config, "port").text
    assert found(config, "port").level == "ok"
    assert "--grpc-port" in found(config, "gRPC port").remedy


@pytest.mark.parametrize(
    ("driver", "cuda_build", "device", "level"),
    [(False, False, "auto", "ok"), (True, False, "auto", "warn"), (True, True, "auto", "fail"),
     (False, False, "cuda", "fail")],
)  # fmt: skip
def test_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool, cuda_build: bool, device: str, level: str
) -> None:
    import torch

    version = tmp_path / "version"
    if driver:
        version.write_text("NVRM version: 550\nGCC\n")
    monkeypatch.setattr(doctor_local, "NVIDIA_DRIVER", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8" if cuda_build else None)
    assert found(load_config(home=tmp_path, device=device), "GPU").level == level


def test_an_identity_that_cannot_be_used_is_a_finding(config: NodeConfig) -> None:
    config.folders.identity_file.write_text("no key")
    finding = found(config, "identity")
    assert finding.level == "fail" and str(config.folders.identity_file) in finding.text


def test_a_page_for_everybody_is_warned_of(tmp_path: Path) -> None:
    assert found(load_config(home=tmp_path, http="0.0.0.0:9464"), "page").level == "warn"


async def test_without_an_invite_nobody_is_asked(config: NodeConfig) -> None:
    findings = [finding async for finding in network_findings(config, [], Network(), measure=True)]
    assert [(finding.name, finding.level) for finding in findings] == [("seeds", "warn")]


def test_the_contribution_is_what_exchanges_leave() -> None:
    how: dict[str, Any] = {
        "model": "m", "device": "cpu", "tokens_per_step": 1000, "step_s": 0.5, "local_steps": 20,
        "payload_bytes": 10_000_000,
    }  # fmt: skip
    made = contribution(**how, up_bytes_per_s=1e6, down_bytes_per_s=4e6)
    assert (made.tokens_per_s, made.exchange_s, made.training_share) == (2000.0, 10.0, 0.5)
    assert made.contribution_tokens_per_s == 1000.0
    assert contribution(**how, up_bytes_per_s=None, down_bytes_per_s=4e6).contribution_tokens_per_s == 2000.0


def test_the_verdict_is_the_worst_line() -> None:
    report = Report()
    assert report.verdict == "ok"
    report.findings += [Finding("a", "warn", "x", "y"), Finding("b", "ok", "x")]
    assert report.verdict == "warn"
    report.findings.append(Finding("c", "fail", "x", "y"))
    assert report.verdict == "fail"


def test_the_json_is_what_the_module_documents() -> None:
    made = contribution(model="m", device="cpu", tokens_per_step=1, step_s=1.0, local_steps=1, payload_bytes=1,
                        up_bytes_per_s=1.0, down_bytes_per_s=1.0)  # fmt: skip
    told = Report([Finding("a", "ok", "x")], made).to_json()
    documented = set(re.findall(r'"(\w+)":', doctor.__doc__ or ""))
    assert documented == {*told, *told["checks"][0], *told["benchmark"]}


Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setattr("peerloom.node.logs.setup", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, ["doctor", "--home", str(tmp_path), *arguments])


def test_the_command_says_it_in_lines_and_in_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("--no-benchmark")
    assert done.exit_code == OK
    assert re.search(r"^ok   disk: ", done.stdout, re.MULTILINE) and "0 fail" in done.stdout
    told = json.loads(run("--json", "--no-benchmark").stdout)
    assert (told["schema"], told["verdict"], told["benchmark"]) == (1, "warn", None)
    monkeypatch.setattr(cli_doctor, "local_findings", lambda _: iter([Finding("disk", "fail", "full", "free it")]))
    done = run("--no-benchmark")
    assert done.exit_code == DOCTOR_FAILS and "FAIL disk: full\n     -> free it" in done.stdout


def test_the_benchmark_takes_real_steps(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "BENCHMARK_S", 0.0)
    told = json.loads(run("--json", "--threads", "1").stdout)["benchmark"]
    assert told["tokens_per_s"] > 0 and told["payload_bytes"] > 1_000_000
    assert told["contribution_tokens_per_s"] == told["tokens_per_s"]


@pytest.mark.parametrize("invite", ["/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGCEfU5vFEsEWqoSDDZA5HNMDBEZuXaA4Q1F4nFcUdHvM"])
def test_a_seed_that_does_not_answer_is_named_with_what_to_do(run: Run, invite: str) -> None:
    done = run(invite, "/ip4/x", "--no-benchmark")
    assert done.exit_code == DOCTOR_FAILS
    assert re.search(r"^FAIL seed 4nFcUdHvM|^FAIL seed \w{8}: no seed answered", done.stdout, re.MULTILINE)
    assert "FAIL seed: " in done.stdout  # the second is no invite at all
