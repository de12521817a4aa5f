from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from llmgw.errors import OperatorError
from llmgw.link import ca, identity
from llmgw.link.authority import certificates
from llmgw.link.trust import TrustFiles, anchor
from llmgw.settings.daemon import Issuing, LinkListener

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


def test_issuing_needs_no_root_key(folder: Path, tmp_path: Path) -> None:
    (folder / "root.key").unlink()
    assert (
        Path(ca.issue_node(folder, "n", tmp_path / "out", 1, NOW).ca).read_bytes() == (folder / "root.pem").read_bytes()
    )


def test_a_certificate_never_outlives_its_issuer(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="shorter than the 3650 days asked for"):
        ca.issue_node(folder, "n", tmp_path / "out", 3650, NOW)
    assert not (tmp_path / "out").exists()


def test_issuing_twice_to_one_folder_changes_nothing(folder: Path, tmp_path: Path) -> None:
    first = Path(ca.issue_node(folder, "n", tmp_path / "out", 1, NOW).key).read_bytes()
    with pytest.raises(OperatorError, match="never overwritten"):
        ca.issue_node(folder, "n", tmp_path / "out", 1, NOW)
    assert (tmp_path / "out" / "key.pem").read_bytes() == first
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "cert.pem").touch()
    with pytest.raises(OperatorError, match=r"cert\.pem"):
        ca.issue_node(folder, "n", tmp_path / "half", 1, NOW)
    assert [p.name for p in (tmp_path / "half").iterdir()] == ["cert.pem"], "no key is left without its certificate"


@pytest.mark.parametrize("name", ["a b", "-x", "x..y", "spiffe://x", "10.0.0.1/8", "ü.example", ""])
def test_what_is_no_host_name_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(OperatorError, match="is neither a host name nor an IP address"):
        ca.issue_server(folder, (name,), tmp_path / "out", 1, NOW)


def test_a_folder_that_others_reach_issues_nothing(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(OperatorError, match="chmod 700"):
        ca.issue_node(folder, "n", tmp_path / "out", 1, NOW)


def test_a_ca_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "ca"
    target.mkdir()
    (target / "notes.txt").touch()
    with pytest.raises(OperatorError, match="name a new folder"):
        ca.init(target, "t.example", NOW)
    assert [p.name for p in tmp_path.iterdir()] == ["ca"]
    assert [p.name for p in target.iterdir()] == ["notes.txt"]


def test_another_ca_follows_and_issues_once_it_is_told_to(folder: Path, tmp_path: Path) -> None:
    first = ca.active(folder)
    second = ca.add_generation(folder, NOW)
    assert (second.number, second.folder) == (2, folder / "g2")
    assert ca.active(folder) == first
    assert ca.load(folder).trust_domain == "t.example"
    assert load(ca.issue_node(folder, "n", tmp_path / "old", 1, NOW).certificate).issuer != second.root.subject
    ca.activate(folder, 2)
    made = ca.issue_node(folder, "n", tmp_path / "new", 1, NOW)
    assert load(made.ca) == second.root
    assert load(made.certificate).issuer.rfc4514_string() == "CN=llmgw issuing CA t.example 2"
    assert ca.add_generation(folder, NOW).number == 3
    (folder / "active").write_text("7\n")
    with pytest.raises(OperatorError, match=r"active: names CA '7', which is not there"):
        ca.load(folder)


@pytest.mark.parametrize(
    ("what", "mode", "fix"),
    [
        ("", 0o750, "chmod 700"),
        ("root.key", 0o644, "chmod 600"),
        ("issuing.key", 0o660, "chmod 600"),
        ("g2", 0o755, "chmod 700"),
        ("g2/root.key", 0o604, "chmod 600"),
        ("g2/issuing.key", 0o640, "chmod 600"),
    ],
)
def test_a_control_plane_does_not_start_with_a_ca_that_others_can_reach(
    folder: Path, tmp_path: Path, what: str, mode: int, fix: str
) -> None:
    ca.add_generation(folder, NOW)
    files = ca.issue_server(folder, ("localhost",), tmp_path / "server", 1, NOW)
    listener = LinkListener(files, trust_domain="t.example", issuing=Issuing(str(folder)))
    assert TrustFiles(listener).now.issuer is not None
    (folder / what).chmod(mode)
    with pytest.raises(OperatorError) as told:
        TrustFiles(listener)
    assert str(folder / what) in str(told.value)
    assert f"mode {mode:04o}" in str(told.value)
    assert f"{fix} {folder / what}" in told.value.remedy


def test_what_does_not_belong_together_is_not_started_with(folder: Path, tmp_path: Path) -> None:
    files = ca.issue_server(folder, ("localhost",), tmp_path / "server", 1, NOW)
    with pytest.raises(OperatorError, match=r"issues for t\.example, and link\.trust_domain is other"):
        TrustFiles(LinkListener(files, trust_domain="other", issuing=Issuing(str(folder))))
    ca.init(tmp_path / "second", "t.example", NOW)
    with pytest.raises(OperatorError, match="does not hold the root of the CA"):
        TrustFiles(LinkListener(files, trust_domain="t.example", issuing=Issuing(str(tmp_path / "second"))))
    (folder / "issuing.key").unlink()
    with pytest.raises(OperatorError, match="holds no CA that can issue"):
        TrustFiles(LinkListener(files, trust_domain="t.example", issuing=Issuing(str(folder))))
    assert TrustFiles(LinkListener(files, trust_domain="t.example")).now.issuer is None


def test_a_control_planes_certificate_is_issued_anew_for_the_same_key(folder: Path, tmp_path: Path) -> None:
    files = ca.issue_server(folder, ("gw.example.org", "10.0.0.1"), tmp_path / "server", 30, NOW)
    old = load(files.certificate)
    ca.activate(folder, ca.add_generation(folder, NOW).number)
    ca.reissue_server(folder, Path(files.certificate), NOW + 60)
    new = load(files.certificate)
    assert new.public_key() == old.public_key()
    assert new.serial_number != old.serial_number
    before, after = identity.read(old), identity.read(new)
    assert (after.names, after.usages, after.subject) == (before.names, before.usages, before.subject)
    assert after.not_after - after.not_before == pytest.approx(before.not_after - before.not_before, abs=601)
    chain = certificates(Path(files.certificate).read_bytes(), "")
    assert anchor(chain, [g.root for g in ca.generations(folder)]) == ca.active(folder).root


def test_roots_come_into_a_bundle_and_leave_it(folder: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_bytes((folder / "root.pem").read_bytes())
    second = ca.add_generation(folder, NOW)
    for _ in range(2):
        ca.add_to_bundle(bundle, second.root)
        assert len(certificates(bundle.read_bytes(), "")) == 2
    ca.remove_from_bundle(bundle, ca.active(folder).sha256)
    assert certificates(bundle.read_bytes(), "") == (second.root,)
    with pytest.raises(OperatorError, match="would be left without any CA"):
        ca.remove_from_bundle(bundle, second.sha256)
    assert bundle.stat().st_mode & 0o777 == 0o644
