from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmgw.errors import OperatorError
from llmgw.link.keyfile import check_private, read, read_private, write_new


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "k.pem"
    write_new(path, b"secret", mode)
    assert path.stat().st_mode & 0o777 == mode
    assert read_private(path) == b"secret"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o700, 0o1600])
def test_a_file_that_others_reach_is_refused_with_mode_and_fix(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "k.pem"
    write_new(path, b"secret", 0o600)
    path.chmod(mode)
    with pytest.raises(OperatorError) as caught:
        read_private(path)
    assert f"has mode {mode:04o}" in caught.value.reason
    assert caught.value.remedy == f"run: chmod 600 {path}"


def test_a_folder_that_others_reach_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    check_private(tmp_path)
    tmp_path.chmod(0o750)
    with pytest.raises(OperatorError, match="chmod 700"):
        check_private(tmp_path)


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "k.pem"
    write_new(path, b"first", 0o600)
    with pytest.raises(OperatorError, match="never overwritten"):
        write_new(path, b"second", 0o600)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["k.pem"]


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    for use in (read, read_private):
        with pytest.raises(OperatorError, match=r"none\.pem: cannot be read: No such file"):
            use(tmp_path / "none.pem")
    with pytest.raises(OperatorError, match="cannot be written"):
        write_new(tmp_path / "none" / "k.pem", b"", 0o600)
