"""Certificates as they are made: a root, its issuing CA, and leaves. All times are seconds since the epoch.

Keys are P-256. What a node asks for is its public key and nothing else: every name is put in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.errors import OperatorError, PeerError
from llmgw.link import identity

ROOT_DAYS = 3650
ISSUING_DAYS = 1825
DAY_S = 86400.0
_BACKDATED = timedelta(minutes=5)
"""Certificates are valid from a little earlier, so that a node whose clock is behind can use them at once."""

_REQUEST_CHARS = 8192


class RequestError(PeerError):
    """A certificate request that cannot be granted."""


@frozen
class Authority:
    """A CA's certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@frozen
class Issuer:
    """What issues certificates: the issuing CA, the root above it, and the trust domain that it issues for."""

    issuing: Authority
    root: x509.Certificate
    trust_domain: str

    def node(self, node: str, key: ec.EllipticCurvePublicKey, lifetime_s: float, now: float) -> x509.Certificate:
        """A certificate for this node's agent: one name, for clients only. Raises :class:`OperatorError`."""
        names = [x509.UniformResourceIdentifier(identity.node_uri(self.trust_domain, node))]
        return self.leaf(node, key, names, ExtendedKeyUsageOID.CLIENT_AUTH, lifetime_s, now)

    def leaf(
        self,
        subject: str,
        key: ec.EllipticCurvePublicKey,
        names: Sequence[x509.GeneralName],
        usage: x509.ObjectIdentifier,
        lifetime_s: float,
        now: float,
    ) -> x509.Certificate:
        """A certificate that is no CA's. Raises :class:`OperatorError` when it would outlive its issuer."""
        ends = datetime.fromtimestamp(now, UTC) + timedelta(seconds=lifetime_s)
        if ends > (last := self.issuing.certificate.not_valid_after_utc):
            reason = f"is valid until {last:%Y-%m-%d}, shorter than the {lifetime_s / DAY_S:g} days asked for"
            raise OperatorError("the issuing CA", reason, "ask for fewer days, or rotate the CA: llmgw ca rotate")
        return (
            _builder(subject, key, self.issuing, now, lifetime_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self.issuing.key, hashes.SHA256())
        )

    def chain(self, leaf: x509.Certificate) -> bytes:
        """The leaf and its issuer as PEM, as the other end of a handshake wants them."""
        return pem(leaf) + pem(self.issuing.certificate)


def new_authority(name: str, trust_domain: str, issuer: Authority | None, now: float) -> Authority:
    """A new root, or with ``issuer`` an issuing CA below it, with a key of its own."""
    key = new_key()
    depth, days = (1, ROOT_DAYS) if issuer is None else (0, ISSUING_DAYS)
    certificate = (
        _builder(name, key.public_key(), issuer, now, days * DAY_S)
        .add_extension(x509.BasicConstraints(ca=True, path_length=depth), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{trust_domain}")]), critical=False
        )
        .sign(issuer.key if issuer else key, hashes.SHA256())
    )
    return Authority(certificate, key)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A new P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def request_for(key: ec.EllipticCurvePrivateKey) -> str:
    """A certificate request for this key, as PEM: nothing in it but the key, and the proof that it is held."""
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def requested_key(request: str) -> ec.EllipticCurvePublicKey:
    """The key that a request is for; its names are not looked at. Raises :class:`RequestError`."""
    thing = "the certificate request"
    if len(request) > _REQUEST_CHARS:
        raise RequestError(thing, f"has more than {_REQUEST_CHARS} characters")
    try:
        parsed = x509.load_pem_x509_csr(request.encode())
        valid, key = parsed.is_signature_valid, parsed.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as cause:
        raise RequestError(thing, f"cannot be read: {cause}") from cause
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RequestError(thing, "is not for a P-256 key")
    if not valid:
        raise RequestError(thing, "is not signed by the key that it is for")
    return key


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate in hexadecimal, as ``openssl x509 -fingerprint -sha256`` has it without colons."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def certificates(data: bytes, thing: str) -> tuple[x509.Certificate, ...]:
    """Every certificate in a PEM file. Raises :class:`OperatorError` about ``thing`` when there is none."""
    try:
        return tuple(x509.load_pem_x509_certificates(data))
    except (ValueError, x509.InvalidVersion) as cause:
        raise OperatorError(thing, "holds no certificates in PEM form") from cause


def _builder(
    subject: str, key: ec.EllipticCurvePublicKey, issuer: Authority | None, now: float, lifetime_s: float
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
        .not_valid_after(start + timedelta(seconds=int(lifetime_s)))
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
