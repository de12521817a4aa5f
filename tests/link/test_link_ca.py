from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from llmgw.errors import OperatorError
from llmgw.link import ca, identity

NOW = time.time()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ca.init(tmp_path / "ca", "t.example", NOW)
    return tmp_path / "ca"


def load(path: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(Path(path).read_bytes())


def test_keys_are_private_and_nothing_is_overwritten(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("root.key", "issuing.key"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    with pytest.raises(OperatorError, match=str(folder)):
        ca.init(folder, "t.example", NOW)


def test_a_node_gets_one_name_and_one_use(folder: Path, tmp_path: Path) -> None:
    made = ca.issue_node(folder, "gpu-1", tmp_path / "out", 30, NOW)
    leaf = load(made.certificate)
    facts = identity.read(leaf)
    assert facts.names == ("URI:spiffe://t.example/llmgw/node/gpu-1",)
    assert list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    assert 29 * 86400 < facts.not_after - NOW <= 30 * 86400 + 3600
    assert Path(made.key).stat().st_mode & 0o777 == 0o600
    assert isinstance(leaf.public_key().curve.name, str)


def test_a_server_gets_its_names(folder: Path, tmp_path: Path) -> None:
    made = ca.issue_server(folder, ("gw.example.org", "10.0.0.1"), tmp_path / "out", 30, NOW)
    names = identity.read(load(made.certificate)).names
    assert set(names) == {"DNS:gw.example.org", "IP:10.0.0.1", "URI:spiffe://t.example/llmgw/server/gw.example.org"}


def test_a_key_that_others_can_read_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "issuing.key").chmod(0o640)
    with pytest.raises(OperatorError, match=r"issuing\.key"):
        ca.issue_node(folder, "n", tmp_path / "out", 1, NOW)


def test_odd_names(folder: Path, tmp_path: Path) -> None:
    for name in ("", "..", "a/b", "x" * 65, "ü"):
        with pytest.raises(OperatorError, match="may have letters"):
            ca.issue_node(folder, name, tmp_path / "out", 1, NOW)
    with pytest.raises(OperatorError, match="needs a host name"):
        ca.issue_server(folder, (), tmp_path / "out", 1, NOW)
    with pytest.raises(OperatorError, match="is no trust domain"):
        ca.init(tmp_path / "other", "Not A Domain", NOW)
    with pytest.raises(OperatorError):
        ca.issue_node(tmp_path / "nothing", "n", tmp_path / "out", 1, NOW)
