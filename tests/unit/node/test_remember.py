"""What a start leaves for later commands: the spec must be there, the invites are a convenience."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerloom.node.daemon_run import _remember
from peerloom.node.folders import Folders
from peerloom.protocol.errors import StorageError
from peerloom.protocol.types import PeerId, SignedSpec

SPEC = SignedSpec(text='name = "x"\n', owner=PeerId("owner"), signature=b"")


def test_a_folder_for_last_invite_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "last_invite").mkdir()
    _remember(Folders.of(tmp_path), tmp_path, SPEC, ["peer://a"])
    assert "last_invite" in caplog.text and "needs an invite" in caplog.text
    assert (tmp_path / "run.toml").read_text() == SPEC.text


def test_both_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _remember(Folders.of(tmp_path), tmp_path, SPEC, ["peer://a", "peer://b"])
    assert (tmp_path / "last_invite").read_text().split() == ["peer://a", "peer://b"]
    assert not caplog.records


def test_no_place_for_the_spec_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "run.toml").mkdir()
    with pytest.raises(StorageError, match=r"run\.toml: a folder is in its place; move it away"):
        _remember(Folders.of(tmp_path), tmp_path, SPEC, [])
