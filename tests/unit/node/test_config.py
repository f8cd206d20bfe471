from __future__ import annotations

import errno
import os
import stat
import tomllib
from pathlib import Path

import pytest

from peerloom.node.config import NodeConfig, config_template, default_name, load_config
from peerloom.node.folders import Folders, ensure_writable
from peerloom.protocol.errors import ConfigError, RunMismatch, StorageError
from peerloom.protocol.types import PeerId, RunId

ROOT = Path(__file__).parents[3]
PEER = "12D3KooW" + "A" * 44


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PEER_")]:
        monkeypatch.delenv(name)
    for kind in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))


def test_flags_outrank_variables_outrank_the_file_outranks_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peer.toml").write_text('port = 1\ngrpc_port = 1\nthreads = 1\nlisten = ["::1"]\n')
    monkeypatch.setenv("PEER_PORT", "2")
    monkeypatch.setenv("PEER_GRPC_PORT", "2")
    monkeypatch.setenv("PEER_NAME", "")
    monkeypatch.setenv("PEER_ALLOW", f"{PEER}, {PEER}")
    config = load_config(home=tmp_path, port=3, threads=None, seeds=[], announce="a.example,[::1]:7")
    assert (config.port, config.grpc_port, config.threads, config.keep_checkpoints) == (3, 2, 1, 3)
    assert config.announce == ("a.example", "[::1]:7")
    assert config.listen == ("::1",) and config.allow == (PEER, PEER) and not config.name


def test_the_file_is_found_where_the_variable_or_xdg_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config/peerloom").mkdir(parents=True)
    (tmp_path / "config/peerloom/peer.toml").write_text("threads = 5\n")
    assert load_config().threads == 5
    monkeypatch.setenv("PEER_HOME", str(tmp_path / "elsewhere"))
    assert load_config().threads == 0


BAD = [
    ("home", ""),
    ("name", "a\nb"),
    ("name", "x" * 65),
    ("listen", ["localhost"]),
    ("port", 65536),
    ("port", True),
    ("grpc_port", -1),
    ("relay_port", 65536),
    ("announce", ["a b"]),
    ("announce", ["host:99999"]),
    ("relay", "perhaps"),
    ("relay_rate", 1),
    ("relay_pair_rate", -1),
    ("relay_tunnels", 0),
    ("port_mapping", 2),
    ("device", "gpu"),
    ("device", "cuda:"),
    ("devices", "0,0"),
    ("threads", -1),
    ("nice", -1),
    ("stage", 256),
    ("max_upload", 1),
    ("max_upload", -5),
    ("max_download", 65_535),
    ("allow", ["12D3"]),
    ("data", "x" * 513),
    ("trust_paths", "perhaps"),
    ("checkpoint_every_s", 0),
    ("checkpoint_every_s", float("inf")),
    ("checkpoint_every_s", float("nan")),
    ("stall_after_s", 1),
    ("keep_checkpoints", 0),
    ("http", "localhost:80"),
    ("http", "127.0.0.1"),
    ("http", "127.0.0.1:65536"),
    ("tensorboard", ""),
    ("log_format", "xml"),
    ("seeds", ["12D3"]),
    ("startup_timeout_s", 0),
]


def test_every_setting_has_a_bad_case() -> None:
    assert {name for name, _ in BAD} == set(NodeConfig.model_fields)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_flag_is_named_with_what_is_allowed(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"home": tmp_path, name: value})
    extra = NodeConfig.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    sentence = str(caught.value)
    assert sentence.startswith(f"--{name.replace('_', '-')} = ") and sentence.endswith(f": must be {extra['allowed']}")


@pytest.mark.parametrize("address", ["a.example", "a.example:4001", "[::1]:4001", "[::1]", "10.0.0.1:1"])
def test_announced_addresses(tmp_path: Path, address: str) -> None:
    assert load_config(home=tmp_path, announce=[address]).announce == (address,)


def test_all_bad_values_come_at_once_and_say_where_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('threads = "many"\nkeep_checkpoint = 3\nport = "x"\n')
    monkeypatch.setenv("PEER_GRPC_PORT", "x")
    monkeypatch.setenv("PEER_NAMES", "x")
    with pytest.raises(ConfigError) as caught:
        load_config(home=tmp_path, port=99999)
    assert sorted(str(caught.value).split("; ")) == sorted(
        [
            "PEER_NAMES: no such variable",
            "the closest known one is PEER_NAME",
            "--port = 99999: must be an integer from 0 to 65535 (0: any free one)",
            "PEER_GRPC_PORT = 'x': must be an integer from 0 to 65535 (0: any free one)",
            f"{file}: threads = 'many': must be an integer from 0 to 1024",
            f"{file}: keep_checkpoint: no such setting",
            "the closest known one is keep_checkpoints",
        ]
    )


@pytest.mark.parametrize("data", [b"port = ", b"\xff\xfe", b"#" * 70_000, b"n = " + b"9" * 5000])
def test_an_unusable_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "peer.toml").write_bytes(data)
    with pytest.raises(ConfigError, match="peer.toml"):
        load_config(home=tmp_path)


def test_the_example_lists_every_setting_and_holds_as_it_stands(tmp_path: Path) -> None:
    example = (ROOT / "deploy/peer.example.toml").read_text()
    assert example == config_template(), "write peerloom.node.config.config_template() to it"
    lines = [line[1:] for line in example.splitlines() if line.startswith("#") and line[1:2].isalpha()]
    assert set(tomllib.loads("\n".join(lines))) == set(NodeConfig.model_fields)
    (tmp_path / "peer.toml").write_text("\n".join(lines))
    load_config(home=tmp_path)


def test_folders_lie_below_home_or_in_xdg(tmp_path: Path) -> None:
    at_home = load_config(home=tmp_path / "h").folders
    assert at_home.identity_file == tmp_path / "h/identity.key"
    assert at_home.run_dir(RunId("0123456789abcdef")) == tmp_path / "h/runs/0123456789abcdef"
    xdg = Folders.of(None)
    assert (xdg.config, xdg.data, xdg.cache) == tuple(tmp_path / k / "peerloom" for k in ("config", "data", "cache"))
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize("run_id", ["", "..", "../../etc", "0123456789ABCDEF", "0123456789abcdef\n"])
def test_a_run_dir_never_leaves_the_folder(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(RunMismatch):
        Folders.of(tmp_path).run_dir(RunId(run_id))


def test_a_writable_folder_is_made_private_and_left_empty(tmp_path: Path) -> None:
    folder = ensure_writable(tmp_path / "a/b")
    assert list(folder.iterdir()) == [] and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(StorageError, match=f"{path}: a file stands where a folder is needed"):
            ensure_writable(path)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "permissions"), (errno.EIO, "--home")],
)
def test_a_disk_that_refuses_is_explained_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(StorageError, match=remedy):
        ensure_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_nodes_of_one_host_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "lab\n" + "x" * 80)
    assert default_name(PeerId("12D3KooWabcd")) == f"lab{'x' * 56}-abcd"
