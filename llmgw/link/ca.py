"""The cluster's own certificate authority as a folder: a root, an issuing CA, and what was rotated in after them.

Keys are in files of mode 0600 in folders of mode 0700. Issuing needs only ``issuing.key``, so that ``root.key`` can
be kept elsewhere. A CA that follows the first one is a folder ``g2``, ``g3`` and so on; the file ``active`` names the
one that issues, and is replaced as a whole. All times are seconds since the epoch.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from llmgw import durable
from llmgw.errors import OperatorError
from llmgw.link import identity, keyfile
from llmgw.link.authority import (
    DAY_S,
    Authority,
    Issuer,
    certificates,
    fingerprint,
    key_pem,
    new_authority,
    new_key,
    pem,
)
from llmgw.settings.daemon import TlsFiles

_ACTIVE = "active"
_KEYS = ("root.key", "issuing.key")
_DNS_NAME = re.compile(
    r"(?=.{1,253}$)(\*\.)?([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)


@frozen
class Generation:
    """One CA of a folder: its number, counted from 1, where it is, and its root."""

    number: int
    folder: Path
    root: x509.Certificate

    @property
    def sha256(self) -> str:
        """The root's fingerprint."""
        return fingerprint(self.root)


def init(folder: Path, trust_domain: str, now: float) -> None:
    """Make a CA in ``folder``, which must not exist or be empty. It appears whole or not at all.

    Raises :class:`OperatorError`.
    """
    if not identity.is_trust_domain(trust_domain):
        reason = "is no trust domain: lower-case letters, digits, dots, dashes and underscores"
        raise OperatorError(trust_domain, reason)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise OperatorError(str(folder), f"cannot be made: {cause.strerror}") from cause
    _make(folder, trust_domain, 1, now)


def add_generation(folder: Path, now: float) -> Generation:
    """Make the CA that is to follow the active one, unless it is there already. It issues nothing yet.

    Raises :class:`OperatorError`.
    """
    there = generations(folder)
    if there[-1].number > active(folder).number:
        return there[-1]
    number = there[-1].number + 1
    _make(folder / f"g{number}", load(folder).trust_domain, number, now)
    return generations(folder)[-1]


def activate(folder: Path, number: int) -> None:
    """Let this CA of the folder issue from now on. Raises :class:`OperatorError`."""
    _issuer(next(g.folder for g in generations(folder) if g.number == number))  # it must be able to
    keyfile.replace(folder / _ACTIVE, f"{number}\n".encode(), 0o600)


def generations(folder: Path) -> tuple[Generation, ...]:
    """Every CA of a folder, the oldest first. Raises :class:`OperatorError` when there is none."""
    if not (folder / "root.pem").exists():
        raise OperatorError(str(folder), "holds no CA", f"run: llmgw ca init --dir {folder}")
    numbers = sorted(int(p.name[1:]) for p in folder.glob("g*") if p.name[1:].isdigit())
    made = []
    for number, home in ((1, folder), *((n, folder / f"g{n}") for n in numbers)):
        (root, *_) = certificates(keyfile.read(home / "root.pem"), str(home / "root.pem"))
        made.append(Generation(number, home, root))
    return tuple(made)


def active(folder: Path) -> Generation:
    """The CA of a folder that issues. Raises :class:`OperatorError`."""
    there = generations(folder)
    if not (folder / _ACTIVE).exists():
        return there[0]
    text = keyfile.read(folder / _ACTIVE).decode(errors="replace").strip()
    found = next((g for g in there if str(g.number) == text), None)
    if found is None:
        raise OperatorError(str(folder / _ACTIVE), f"names CA {text[:20]!r}, which is not there", "restore its folder")
    return found


def check_folder(folder: Path) -> None:
    """Raise :class:`OperatorError`, naming file, mode and fix, if others could reach a key of this CA."""
    for generation in generations(folder):
        keyfile.check_private(generation.folder)
        for name in _KEYS:
            if (generation.folder / name).exists():
                keyfile.check_private(generation.folder / name)


def load(folder: Path) -> Issuer:
    """What issues in this folder. Raises :class:`OperatorError`, also when others could reach a key."""
    if not (folder / "issuing.key").exists() and not (folder / _ACTIVE).exists():
        raise OperatorError(str(folder), "holds no CA that can issue", f"run: llmgw ca init --dir {folder}")
    check_folder(folder)
    return _issuer(active(folder).folder)


def issue_node(folder: Path, node: str, out_dir: Path, days: float, now: float) -> TlsFiles:
    """Issue a certificate for a node's agent; writes ``cert.pem``, ``key.pem`` and ``ca.pem`` to ``out_dir``.

    Raises :class:`OperatorError`.
    """
    if not identity.is_id(node):
        raise OperatorError(f"node id {node!r}", "may have letters, digits, dots, dashes and underscores, at most 64")
    issuer, key = load(folder), new_key()
    return _write(out_dir, issuer, issuer.node(node, key.public_key(), days * DAY_S, now), key)


def issue_person(folder: Path, person: str, role: str, out_dir: Path, days: float, now: float) -> TlsFiles:
    """Issue a certificate for a person of this role at the admin API; writes ``cert.pem``, ``key.pem``, ``ca.pem``.

    Raises :class:`OperatorError`.
    """
    if not identity.is_id(person):
        raise OperatorError(f"name {person!r}", "may have letters, digits, dots, dashes and underscores, at most 64")
    issuer, key = load(folder), new_key()
    names = [x509.UniformResourceIdentifier(identity.person_uri(issuer.trust_domain, role, person))]
    usage = ExtendedKeyUsageOID.CLIENT_AUTH
    return _write(out_dir, issuer, issuer.leaf(person, key.public_key(), names, usage, days * DAY_S, now), key)


def issue_server(folder: Path, names: Sequence[str], out_dir: Path, days: float, now: float) -> TlsFiles:
    """Issue a certificate for a control plane that agents reach under these host names or addresses.

    The first name becomes its id. Writes ``cert.pem``, ``key.pem`` and ``ca.pem`` to ``out_dir``.
    Raises :class:`OperatorError`.
    """
    if not names:
        raise OperatorError("control plane", "needs a host name or address under which agents reach it")
    issuer, key = load(folder), new_key()
    server = re.sub(r"[^A-Za-z0-9._-]", "-", names[0])[:64]
    alternatives: list[x509.GeneralName] = [_host(name) for name in names]
    alternatives.append(x509.UniformResourceIdentifier(identity.server_uri(issuer.trust_domain, server)))
    leaf = issuer.leaf(server, key.public_key(), alternatives, ExtendedKeyUsageOID.SERVER_AUTH, days * DAY_S, now)
    return _write(out_dir, issuer, leaf, key)


def reissue_server(folder: Path, certificate: Path, now: float) -> None:
    """Issue a control plane's certificate anew from the active CA: same key, names and length, in the same file.

    Raises :class:`OperatorError`.
    """
    issuer = load(folder)
    (old, *_) = certificates(keyfile.read(certificate), str(certificate))
    key = old.public_key()
    try:
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as cause:
        raise OperatorError(str(certificate), f"has no names that could be kept: {cause}") from cause
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise OperatorError(str(certificate), "is not for a P-256 key", "issue one with: llmgw ca issue --server NAME")
    subject = re.sub(r"[^A-Za-z0-9._-]", "-", old.subject.rfc4514_string().removeprefix("CN="))[:64]
    lifetime_s = (old.not_valid_after_utc - old.not_valid_before_utc).total_seconds()
    leaf = issuer.leaf(subject, key, tuple(names), ExtendedKeyUsageOID.SERVER_AUTH, lifetime_s, now)
    keyfile.replace(certificate, issuer.chain(leaf), 0o644)


def _write(out_dir: Path, issuer: Issuer, leaf: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> TlsFiles:
    try:
        out_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as cause:
        raise OperatorError(str(out_dir), f"cannot be made: {cause.strerror}") from cause
    files = (
        ("key.pem", key_pem(key), 0o600),
        ("cert.pem", issuer.chain(leaf), 0o644),
        ("ca.pem", pem(issuer.root), 0o644),
    )
    written: list[Path] = []
    try:
        for name, data, mode in files:
            keyfile.write_new(out_dir / name, data, mode)
            written.append(out_dir / name)
    except OperatorError:
        for path in written:
            path.unlink()
        raise
    return TlsFiles(certificate=str(out_dir / "cert.pem"), key=str(out_dir / "key.pem"), ca=str(out_dir / "ca.pem"))


def _issuer(home: Path) -> Issuer:
    key_data, certificate_data = keyfile.read_private(home / "issuing.key"), keyfile.read(home / "issuing.pem")
    (root, *_) = certificates(keyfile.read(home / "root.pem"), str(home / "root.pem"))
    try:
        key = serialization.load_pem_private_key(key_data, password=None)
        certificate = x509.load_pem_x509_certificate(certificate_data)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, x509.ExtensionNotFound) as cause:
        raise OperatorError(str(home), f"holds no CA that llmgw made: {cause}") from cause
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if (
        not isinstance(key, ec.EllipticCurvePrivateKey)
        or key.public_key() != certificate.public_key()
        or len(uris) != 1
    ):
        raise OperatorError(str(home), "holds an issuing.key that does not belong to its issuing.pem")
    return Issuer(Authority(certificate, key), root, uris[0].removeprefix("spiffe://"))


def _make(folder: Path, trust_domain: str, number: int, now: float) -> None:
    suffix = "" if number == 1 else f" {number}"
    root = new_authority(f"llmgw root CA {trust_domain}{suffix}", trust_domain, None, now)
    issuing = new_authority(f"llmgw issuing CA {trust_domain}{suffix}", trust_domain, root, now)
    try:
        staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as cause:
        raise OperatorError(str(folder), f"cannot be made: {cause.strerror}") from cause
    try:
        for name, authority in (("root", root), ("issuing", issuing)):
            keyfile.write_new(staged / f"{name}.key", key_pem(authority.key), 0o600)
            keyfile.write_new(staged / f"{name}.pem", pem(authority.certificate), 0o644)
        os.rename(staged, folder)  # replaces nothing but an empty folder
        durable.sync_folder(folder.parent)
    except OSError as cause:
        shutil.rmtree(staged, ignore_errors=True)
        raise OperatorError(str(folder), f"cannot hold a new CA: {cause.strerror}", "name a new folder") from cause


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        if _DNS_NAME.fullmatch(name) is None:
            raise OperatorError(repr(name), "is neither a host name nor an IP address") from None
        return x509.DNSName(name)


def add_to_bundle(bundle: Path, root: x509.Certificate) -> None:
    """Let whoever reads this bundle trust a root too. Raises :class:`OperatorError`."""
    there = certificates(keyfile.read(bundle), str(bundle))
    if root not in there:
        keyfile.replace(bundle, b"".join(pem(c) for c in (*there, root)), 0o644)


def remove_from_bundle(bundle: Path, sha256: str) -> None:
    """Let nobody who reads this bundle trust a root any more. Raises :class:`OperatorError`; one has to stay."""
    there = certificates(keyfile.read(bundle), str(bundle))
    kept = [c for c in there if fingerprint(c) != sha256]
    if not kept:
        raise OperatorError(str(bundle), "would be left without any CA")
    keyfile.replace(bundle, b"".join(pem(c) for c in kept), 0o644)
