from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmgw.errors import OperatorError
from llmgw.store.files import read_text, write_private
from llmgw.store.folder import held


def test_held_once(tmp_path: Path) -> None:
    with held(tmp_path / "a" / "b", "agent"):
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
        with (
            pytest.raises(OperatorError, match=rf"another llmgw agent holds it \(pid {os.getpid()}\)"),
            held(tmp_path / "a" / "b", "agent"),
        ):
            pass
    with held(tmp_path / "a" / "b", "agent"):
        pass


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "file").touch()
    for name, said in (
        ("link", "is a symbolic link"),
        ("open", r"is open to others \(mode 0755\). run: chmod 700"),
        ("file", "cannot be made"),
        ("file/x", "cannot be made"),
    ):
        with pytest.raises(OperatorError, match=said), held(tmp_path / name, "server"):
            pass


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_private(path, b"one")
    write_private(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert read_text(path) == "two"
    with pytest.raises(OperatorError, match="larger than 2 bytes"):
        read_text(path, 2)
    path.write_bytes(b"\xff")
    with pytest.raises(OperatorError, match="not UTF-8"):
        read_text(path)
    with pytest.raises(OperatorError, match="No such file"):
        read_text(tmp_path / "missing")
