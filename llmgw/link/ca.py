"""The cluster's own certificate authority: a root, an issuing CA, and the certificates of nodes and control planes.

Keys are P-256, in files of mode 0600 in a folder of mode 0700. Issuing needs only ``issuing.key``, so that
``root.key`` can be kept elsewhere. All times are seconds since the epoch.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.errors import OperatorError
from llmgw.link import identity, keyfile
from llmgw.settings.daemon import TlsFiles

_ROOT_DAYS = 3650
_ISSUING_DAYS = 1825
_BACKDATED = timedelta(minutes=5)
"""Certificates are valid from a little earlier, so that a node whose clock is behind can use them at once."""

_DNS_NAME = re.compile(
    r"(?=.{1,253}$)(\*\.)?([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)


@frozen
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def init(folder: Path, trust_domain: str, now: float) -> None:
    """Make a CA in ``folder``, which must not exist or be empty. It appears whole or not at all.

    Raises :class:`OperatorError`.
    """
    if not identity.is_trust_domain(trust_domain):
        reason = "is no trust domain: lower-case letters, digits, dots, dashes and underscores"
        raise OperatorError(trust_domain, reason)
    root = _authority(f"llmgw root CA {trust_domain}", trust_domain, None, 1, _ROOT_DAYS, now)
    issuing = _authority(f"llmgw issuing CA {trust_domain}", trust_domain, root, 0, _ISSUING_DAYS, now)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as cause:
        raise OperatorError(str(folder), f"cannot be made: {cause.strerror}") from cause
    try:
        for name, authority in (("root", root), ("issuing", issuing)):
            keyfile.write_new(staged / f"{name}.key", _key_pem(authority.key), 0o600)
            keyfile.write_new(staged / f"{name}.pem", _pem(authority.certificate), 0o644)
        os.rename(staged, folder)  # replaces nothing but an empty folder
        keyfile.sync_folder(folder.parent)
    except OSError as cause:
        shutil.rmtree(staged, ignore_errors=True)
        raise OperatorError(str(folder), f"cannot hold a new CA: {cause.strerror}", "name a new folder") from cause


def issue_node(folder: Path, node: str, out_dir: Path, days: int, now: float) -> TlsFiles:
    """Issue a certificate for a node's agent; writes ``cert.pem``, ``key.pem`` and ``ca.pem`` to ``out_dir``.

    Raises :class:`OperatorError`.
    """
    if not identity.is_id(node):
        raise OperatorError(f"node id {node!r}", "may have letters, digits, dots, dashes and underscores, at most 64")
    issuing, trust_domain = _load(folder)
    names = [x509.UniformResourceIdentifier(identity.node_uri(trust_domain, node))]
    return _issue(folder, issuing, node, names, ExtendedKeyUsageOID.CLIENT_AUTH, out_dir, days, now)


def issue_server(folder: Path, names: Sequence[str], out_dir: Path, days: int, now: float) -> TlsFiles:
    """Issue a certificate for a control plane that agents reach under these host names or addresses.

    The first name becomes its id. Writes ``cert.pem``, ``key.pem`` and ``ca.pem`` to ``out_dir``.
    Raises :class:`OperatorError`.
    """
    if not names:
        raise OperatorError("control plane", "needs a host name or address under which agents reach it")
    issuing, trust_domain = _load(folder)
    server = re.sub(r"[^A-Za-z0-9._-]", "-", names[0])[:64]
    alternatives: list[x509.GeneralName] = [_host(name) for name in names]
    alternatives.append(x509.UniformResourceIdentifier(identity.server_uri(trust_domain, server)))
    return _issue(folder, issuing, server, alternatives, ExtendedKeyUsageOID.SERVER_AUTH, out_dir, days, now)


def _issue(
    folder: Path,
    issuing: _Authority,
    subject: str,
    names: Sequence[x509.GeneralName],
    usage: x509.ObjectIdentifier,
    out_dir: Path,
    days: int,
    now: float,
) -> TlsFiles:
    ends = datetime.fromtimestamp(now, UTC) + timedelta(days=days)
    if ends > (last := issuing.certificate.not_valid_after_utc):
        reason = f"is valid until {last:%Y-%m-%d}, shorter than the {days} days asked for"
        raise OperatorError(str(folder / "issuing.pem"), reason, "ask for fewer days, or make a new CA")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(subject, key.public_key(), issuing, now, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuing.key, hashes.SHA256())
    )
    try:
        out_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as cause:
        raise OperatorError(str(out_dir), f"cannot be made: {cause.strerror}") from cause
    files = (
        ("key.pem", _key_pem(key), 0o600),
        ("cert.pem", _pem(certificate) + _pem(issuing.certificate), 0o644),
        ("ca.pem", keyfile.read(folder / "root.pem"), 0o644),
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


def _load(folder: Path) -> tuple[_Authority, str]:
    """The issuing CA in ``folder``, and the trust domain that it issues for."""
    if not (folder / "issuing.key").exists():
        raise OperatorError(str(folder), "holds no CA", f"run: llmgw ca init --dir {folder}")
    keyfile.check_private(folder)
    key_pem = keyfile.read_private(folder / "issuing.key")
    certificate_pem = keyfile.read(folder / "issuing.pem")
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, x509.ExtensionNotFound) as cause:
        raise OperatorError(str(folder), f"holds no CA that llmgw made: {cause}") from cause
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if (
        not isinstance(key, ec.EllipticCurvePrivateKey)
        or key.public_key() != certificate.public_key()
        or len(uris) != 1
    ):
        raise OperatorError(str(folder), "holds an issuing.key that does not belong to its issuing.pem")
    return _Authority(certificate, key), uris[0].removeprefix("spiffe://")


def _authority(
    name: str, trust_domain: str, issuer: _Authority | None, depth: int, days: int, now: float
) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(name, key.public_key(), issuer, now, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=depth), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{trust_domain}")]), critical=False
        )
        .sign(issuer.key if issuer else key, hashes.SHA256())
    )
    return _Authority(certificate, key)


def _builder(
    subject: str, key: ec.EllipticCurvePublicKey, issuer: _Authority | None, now: float, days: int
) -> x509.CertificateBuilder:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])])
    start = datetime.fromtimestamp(int(now), UTC)
    issuer_key = issuer.key.public_key() if issuer else key
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.certificate.subject if issuer else name)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _BACKDATED)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        if _DNS_NAME.fullmatch(name) is None:
            raise OperatorError(repr(name), "is neither a host name nor an IP address") from None
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
