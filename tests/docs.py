"""The commands of README.md and of deploy: what they are, which test runs each, and which cannot run here.

`test_docs` (unit) holds that every one of them is in one of the two tables; `test_docs` (integration) runs the steps of
README word for word in a network of their own, and the operators' with their own folders and ports.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_CONTAINERS: Final = ("Dockerfile", "compose.yaml", "kubernetes.yaml", "peerloom.service")
HEADS: Final = tuple(ROOT / "deploy" / name for name in _CONTAINERS)  # each begins with the commands that use it
FILES: Final = (ROOT / "README.md", *(ROOT / "deploy" / name for name in ("README.md", "methods.md", "reference.md")))
STEPS: Final = "## A swarm, watched, in five terminals"  # the section of README that a new user types

_NO_ENGINE: Final = "needs a Docker engine"
_NO_CLUSTER: Final = "needs a cluster"
_DOCS = "integration/test_docs.py::"
_FIRST = _DOCS + "test_readme_alone_brings_up_a_swarm_its_page_and_prometheus"
_RUN = _DOCS + "test_a_run_of_ones_own"
_OPERATOR = _DOCS + "test_what_operators_type"
_HELP = "unit/test_docs.py::test_every_command_has_help"
_DEMO = _DOCS + "test_the_demo_of_each_method_starts_shows_its_page_and_stops"
RUN: Final = {  # a command, without its comment: the test that runs it
    "python3 -m venv .venv && .venv/bin/pip install -q -e . && .venv/bin/peer demo --nodes 4 --minutes 3":
        "integration/test_demo.py::test_the_readme_demo_reaches_its_marks",  # .ci/run makes the environment
    "peer bootstrap": _FIRST,
    "peer join INVITE --home /tmp/a": _FIRST,
    "peer join INVITE --home /tmp/b": _FIRST,
    "peer status INVITE --watch": _FIRST,
    "prometheus --config.file=deploy/prometheus/local.yml --storage.tsdb.path=/tmp/prometheus": _FIRST,
    "peer export --home /tmp/a --out model": _FIRST,
    "peer run init run.toml": _RUN,
    "peer run check run.toml": _RUN,
    "peer run check run.toml --base": "unit/node/test_base.py::"
        "test_a_base_that_the_run_does_not_name_is_refused_and_the_command_says_which_it_is",
    "peer run init --method pipeline": "unit/node/test_cli.py::test_run_init_then_check",
    "peer run init --method seedflow --nodes 4": "unit/node/test_cli.py::test_run_init_then_check",
    "peer run init --nodes 16": "unit/node/test_cli.py::test_run_init_then_check",
    "peer bootstrap --run run.toml": _RUN,
    "peer join --run run.toml --home HOME": _RUN,
    "peer join": "integration/test_alone.py::test_a_lone_node_prints_its_invite_and_where_its_seconds_went",
    "peer COMMAND --help": _HELP,
    "peer demo --method seedflow": _DEMO,
    "peer demo --method pipeline": _DEMO,
    "peer demo --json FILE": _DEMO,
    "peer export --from INVITE": "integration/test_pipeline_live.py::test_a_stage_killed_under_load_is_taken_over",
    "peer export --stages-from HOME":
        "integration/test_pipeline_live.py::test_four_processes_are_the_delayed_gradient_reference",
    "peer doctor": _OPERATOR,
    "peer doctor INVITE": _OPERATOR,
    "peer doctor --json": "integration/test_watch.py::test_the_doctor_finds_the_way_to_the_swarm",
    "peer status": _OPERATOR,
    "peer status INVITE": _OPERATOR,
    "peer status --json": _OPERATOR,
    "peer status INVITE --json": _OPERATOR,
    "peer join INVITE --port 4001 --grpc-port 4002": _OPERATOR,
    "peer bootstrap --run run.toml --home /var/lib/peerloom --port 4001 --grpc-port 4002": _OPERATOR,
    "echo 'PEER_SEEDS=INVITE' > /etc/peerloom.env": _OPERATOR,
    "install -m 600 /var/lib/peerloom/identity.key /mnt/backup/identity.key": _OPERATOR,
    "kubectl -n peerloom create secret generic invite --from-literal=PEER_SEEDS=INVITE":
        "unit/test_deploy.py::test_kubectl_makes_the_secret",
    "cp deploy/peerloom.service /etc/systemd/system/": "unit/test_deploy.py::test_systemd_agrees_and_finds_it_hardened",
}  # fmt: skip
NOT_RUN: Final = {  # a command: why no test does
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/pytest -n 2 --dist loadfile":
        "it runs the tests: .ci/run types it word for word",
    "peer join --devices 0,1,2,3": "needs four GPUs; integration/test_devices.py runs it with cpu:2",
    "useradd --system --home-dir /var/lib/peerloom --shell /usr/sbin/nologin peerloom": "would change this machine",
    "python3 -m venv /opt/peerloom": "would change this machine; .ci/run makes such an environment elsewhere",
    "/opt/peerloom/bin/pip install .": "needs the network; .ci/run installs into a fresh environment",
    "/opt/peerloom/bin/pip install --upgrade .": "needs the network; .ci/run installs into a fresh environment",
    "systemctl daemon-reload": "needs systemd as the first process, which a container has not",
    "systemctl enable --now peerloom": "needs systemd as the first process",
    "systemctl restart peerloom": "needs systemd as the first process",
    "systemctl stop peerloom": "needs systemd as the first process",
    "journalctl -u peerloom -f -o cat": "needs systemd as the first process",
    "docker build -f deploy/Dockerfile -t peerloom .": _NO_ENGINE,
    "docker build -f deploy/Dockerfile -t peerloom:cuda --build-arg TORCH=cu128 .": _NO_ENGINE,
    "docker compose up -d": _NO_ENGINE,
    "docker compose logs bootstrap": _NO_ENGINE,
    "docker compose stop": _NO_ENGINE,
    "INVITE=/ip4/…#… docker compose --profile trainers up -d": _NO_ENGINE,
    "kubectl apply -f deploy/kubernetes.yaml": _NO_CLUSTER,
    "kubectl -n peerloom logs bootstrap-0 | head -1": _NO_CLUSTER,
    "kubectl -n peerloom scale statefulset trainer --replicas=2": _NO_CLUSTER,
    "scp -p OLD:/var/lib/peerloom/identity.key /var/lib/peerloom/identity.key":
        "needs a second machine; the test of operators copies the key by itself",
}  # fmt: skip


def blocks(text: str) -> list[list[str]]:
    """The lines of each block of shell commands, without comments."""
    found = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [[re.sub(r"\s+#.*", "", line) for line in block.splitlines() if line.strip()] for block in found]


def section(heading: str) -> str:
    """A section of README, from its heading to the next."""
    text = FILES[0].read_text(encoding="utf-8")
    begin = text.index(heading + "\n")
    end = text.find("\n## ", begin + len(heading))
    return text[begin:end]


def commands() -> list[str]:
    """Every command that the docs name, in blocks and in running text, each once."""
    found: dict[str, None] = {}
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        found.update(dict.fromkeys(line for block in blocks(text) for line in block))
        outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        inline = re.findall(r"`(?:\S*/)?(peer(?: [^`]+)?|docker [^`]+|kubectl [^`]+|systemctl [^`]+)`", outside)
        found.update(dict.fromkeys(line for line in inline if line != "peer"))
    for file in HEADS:
        head = re.match(r"(?:#.*\n)*", file.read_text(encoding="utf-8"))
        lines = re.findall(r"^# {2,}(\S.*?)(?:\s{3,}.*)?$", head[0] if head else "", re.MULTILINE)
        found.update(dict.fromkeys(lines))
    return list(found)
