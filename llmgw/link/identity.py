"""Who is at the other end: read from its certificate, checked in one place.

A node's certificate carries exactly one name, the URI ``spiffe://<trust domain>/llmgw/node/<id>``; a control
plane's carries ``spiffe://<trust domain>/llmgw/server/<id>`` beside its host names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID

from llmgw.link.messages import Refused
from llmgw.settings.bounds import NAME

CLIENT_AUTH = "clientAuth"
SERVER_AUTH = "serverAuth"

_USAGES = {ExtendedKeyUsageOID.CLIENT_AUTH: CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH: SERVER_AUTH}
_ID = re.compile(NAME)
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]{1,255}", re.ASCII)
_SKEW_S = 30.0
_REISSUE = "issue one with 'llmgw ca issue --node {node} --out DIR' and name its files in agent.yaml under tls"


def is_id(text: str) -> bool:
    """Whether this can be the id of a node or a control plane: letters, digits, ``._-``, at most 64."""
    return _ID.fullmatch(text) is not None


def is_trust_domain(text: str) -> bool:
    """Whether this can be a trust domain (SPIFFE ID specification, section 2.1)."""
    return _TRUST_DOMAIN.fullmatch(text) is not None


def node_uri(trust_domain: str, node: str) -> str:
    """The one name in a node's certificate."""
    return f"spiffe://{trust_domain}/llmgw/node/{node}"


def server_uri(trust_domain: str, server: str) -> str:
    """The name in a control plane's certificate that says what it is."""
    return f"spiffe://{trust_domain}/llmgw/server/{server}"


def person_uri(trust_domain: str, role: str, person: str) -> str:
    """The one name in the certificate of a person who uses the admin API."""
    return f"spiffe://{trust_domain}/llmgw/{role}/{person}"


@frozen
class Certificate:
    """What a certificate says, as far as the link asks. Times are seconds since the epoch.

    ``names`` are the subject alternative names, as ``URI:…``, ``DNS:…``, ``IP:…``. ``fault`` is set when a part
    of it could not be read; then nothing else may be relied on. ``key`` is the SHA-256 of its public key
    (SubjectPublicKeyInfo in DER), ``sha256`` that of the whole certificate, both in hexadecimal.
    """

    subject: str
    issuer: str
    serial: int
    not_before: float
    not_after: float
    names: tuple[str, ...] = ()
    usages: tuple[str, ...] = ()
    fault: str = ""
    key: str = ""
    sha256: str = ""

    @property
    def uris(self) -> tuple[str, ...]:
        """The names that are URIs."""
        return tuple(n.removeprefix("URI:") for n in self.names if n.startswith("URI:"))

    def __str__(self) -> str:
        names = ", ".join(self.names) or "none"
        return (
            f"subject {self.subject}; SAN {names}; serial {self.serial:x}; issuer {self.issuer}; "
            f"valid {day(self.not_before)} to {day(self.not_after)}"
        )


class DenyKind(StrEnum):
    """What an entry of the deny list is about: a node's id, a certificate's serial number, or a key."""

    NODE = "node"
    SERIAL = "serial"
    KEY = "key"


@frozen
class Denied:
    """One entry of the deny list. Serials are hexadecimal without leading zeros, keys SHA-256 of the public key."""

    kind: DenyKind
    value: str
    reason: str


@frozen
class DenyList:
    """Who is kept out, whatever the certificate says."""

    entries: tuple[Denied, ...] = ()

    def find(self, node: str, chain: Sequence[Certificate]) -> Denied | None:
        """The entry that keeps this node out: for its id, or a serial or key anywhere in its chain."""
        serials, keys = {f"{c.serial:x}" for c in chain}, {c.key for c in chain}
        for entry in self.entries:
            match entry.kind:
                case DenyKind.NODE if entry.value == node:
                    return entry
                case DenyKind.SERIAL if entry.value in serials:
                    return entry
                case DenyKind.KEY if entry.value in keys:
                    return entry
                case _:
                    pass
        return None


@frozen
class Rules:
    """What a control plane asks of agents beyond a chain that TLS accepts.

    ``nodes`` is the allow-list, ``None`` lets every id in. ``trusted`` are the SHA-256 of the CA certificates that are
    trusted now, ``None`` where the handshake has just seen to that.
    """

    trust_domain: str
    deny: DenyList = DenyList()
    nodes: frozenset[str] | None = None
    trusted: frozenset[str] | None = None


def key_sha256(key: CertificatePublicKeyTypes) -> str:
    """SHA-256 of a public key, in hexadecimal, over its SubjectPublicKeyInfo in DER (as RFC 7469, section 2.4)."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def read(certificate: x509.Certificate) -> Certificate:
    """The facts of one certificate. What cannot be read is a fault in the result, not an exception."""
    names: tuple[str, ...] = ()
    usages: tuple[str, ...] = ()
    fault = ""
    try:
        for extension in certificate.extensions:
            match extension.value:
                case x509.SubjectAlternativeName() as found:
                    names = tuple(_name(n) for n in found)
                case x509.ExtendedKeyUsage() as found:
                    usages = tuple(_USAGES.get(u, u.dotted_string) for u in found)
                case _:
                    pass
    except (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as cause:
        fault = f"an extension cannot be read: {cause}"
    try:
        key = key_sha256(certificate.public_key())
    except (ValueError, UnsupportedAlgorithm) as cause:
        key, fault = "", f"its key cannot be read: {cause}"
    return Certificate(
        subject=certificate.subject.rfc4514_string() or "empty",
        issuer=certificate.issuer.rfc4514_string() or "empty",
        serial=certificate.serial_number,
        not_before=certificate.not_valid_before_utc.timestamp(),
        not_after=certificate.not_valid_after_utc.timestamp(),
        names=names,
        usages=usages,
        fault=fault,
        key=key,
        sha256=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def read_chain(chain: Iterable[bytes]) -> tuple[Certificate, ...]:
    """The facts of a verified chain in DER, leaf first.

    Raises ``ValueError`` for bytes that are no certificate, which a TLS library that verified them never gives.
    """
    return tuple(_read_der(der) for der in chain)


@lru_cache(maxsize=512)
def _read_der(der: bytes) -> Certificate:
    """The issuers are the same in every chain, and who comes back shows what it showed before."""
    return read(x509.load_der_x509_certificate(der))


def check(
    chain: Sequence[Certificate],
    claimed: str,
    now: float,
    rules: Rules,
    *,
    clock: float | None = None,
    grace_s: float = 0.0,
) -> Refused | None:
    """Whether the agent with this verified chain may be node ``claimed``; ``None`` means yes.

    The TLS handshake has verified signatures and trust, and nothing else is assumed of it. ``now`` is seconds
    since the epoch on the control plane's clock, ``clock`` what the node's own says, if it said so. A leaf that
    expired at most ``grace_s`` ago is let through: for renewing it, and for nothing else.
    """
    reissue = _REISSUE.format(node=claimed if is_id(claimed) else "ID")
    if not chain:
        return Refused("certificate", "a client certificate", "none", "none", reissue)
    leaf = chain[0]
    line = str(leaf)
    if len(chain) < 2:
        return Refused(
            "issuer", "a certificate issued by a CA", "a certificate that is trusted by itself", line, reissue
        )
    for link, name in zip(chain, ("certificate", *(f"issuer {c.subject}" for c in chain[1:])), strict=True):
        if link.fault:
            return Refused(name, "a certificate that can be read", link.fault, line, reissue)
        if not link.not_before <= now <= link.not_after + (grace_s if link is leaf else 0.0):
            return _outdated(link, name, now, line, reissue, clock)
    if rules.trusted is not None and chain[-1].sha256 not in rules.trusted:
        wanted = f"a CA that is still trusted: {', '.join(sorted(rules.trusted))}"
        return Refused("issuer", wanted, f"{chain[-1].subject}, SHA-256 {chain[-1].sha256}", line, reissue)
    if CLIENT_AUTH not in leaf.usages:
        usages = ", ".join(leaf.usages) or "no extended key usage"
        return Refused("usage", CLIENT_AUTH, usages, line, reissue)
    if len(leaf.names) != 1 or len(leaf.uris) != 1:
        found = ", ".join(leaf.names) or "no subject alternative name; the common name is not read"
        return Refused("identity", f"exactly one name, URI:{node_uri(rules.trust_domain, 'ID')}", found, line, reissue)
    node = identity(leaf, node_uri(rules.trust_domain, ""))
    if node is None:
        return Refused("identity", node_uri(rules.trust_domain, "ID"), leaf.uris[0], line, reissue)
    if (entry := rules.deny.find(node, chain)) is not None:
        return denied(entry, leaf)
    if rules.nodes is not None and node not in rules.nodes:
        remedy = f"add {node} to link.nodes in server.yaml and restart the server"
        return Refused("allow-list", "a node that link.nodes in server.yaml names", node, line, remedy)
    if node != claimed:
        remedy = f"set id: {node} in agent.yaml, or {reissue}"
        return Refused("node id", node, claimed, line, remedy)
    return None


def identity(certificate: Certificate, prefix: str) -> str | None:
    """The id after ``prefix`` in the certificate's only URI, if it has one such URI and a valid id."""
    if certificate.fault or len(certificate.uris) != 1 or not certificate.uris[0].startswith(prefix):
        return None
    found = certificate.uris[0].removeprefix(prefix)
    return found if is_id(found) else None


def server_fault(chain: Sequence[Certificate], now: float, trust_domain: str) -> tuple[str, str] | None:
    """What is wrong with a control plane's verified chain, and what to do; ``None`` if it is one of this domain.

    ``now`` is the agent's clock. Signatures, host name and use have been checked by the handshake.
    """
    if not chain:
        return "shows no certificate", "check the address"
    for link, name in zip(chain, ("certificate", *(f"issuer {c.subject}" for c in chain[1:])), strict=True):
        if link.fault:
            return f"shows a {name} that cannot be read: {link.fault}", "issue it anew"
        if not link.not_before <= now <= link.not_after:
            early = now < link.not_before
            apart = span(link.not_before - now if early else now - link.not_after)
            how = f"not valid before {_minute(link.not_before)}" if early else f"expired at {_minute(link.not_after)}"
            said = f"{_minute(now)}: {apart} too {'early' if early else 'late'}"
            reason = f"its {name} is {how}, and this node's clock says {said}"
            may = f"it may be {apart} {'behind' if early else 'ahead'}"
            return reason, (
                f"compare this node's clock with the control plane's: {may}; if it is right, issue the control plane's "
                "certificate anew: llmgw ca issue --server NAME --out DIR"
            )
    prefix = server_uri(trust_domain, "")
    if identity(chain[0], prefix) is None:
        reason = f"shows a certificate without a name of the form {prefix}ID ({chain[0]})"
        return reason, "compare trust_domain in agent.yaml with the CA's, and the address"
    return None


def span(seconds: float) -> str:
    """A length of time for people, in its two largest units."""
    whole = round(abs(seconds))
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def skew_of(clock: float, now: float) -> str:
    """How a node's clock stands to the control plane's, empty when it is close enough to be the network's doing."""
    if abs(clock - now) < _SKEW_S:
        return ""
    return f"this node's clock is {span(clock - now)} {'ahead of' if clock > now else 'behind'} the control plane's"


def _outdated(link: Certificate, name: str, now: float, line: str, reissue: str, clock: float | None) -> Refused:
    wanted = f"a {name} that is valid now, at {_minute(now)} on the control plane's clock"
    found = f"valid {_minute(link.not_before)} to {_minute(link.not_after)}"
    skew = skew_of(clock, now) if clock is not None else ""
    if skew:
        found = f"{found}; {skew}"
    if skew and clock is not None and link.not_before <= clock <= link.not_after:
        remedy = f"set the clocks right, on the node or the control plane: {skew}"
    elif now < link.not_before:
        remedy = (
            f"it is {span(link.not_before - now)} early: compare the clocks of the CA's machine and the control plane"
        )
    else:
        remedy = f"it expired {span(now - link.not_after)} ago; if the control plane's clock is right, {reissue}"
    return Refused("validity", wanted, found, line, remedy)


def denied(entry: Denied, leaf: Certificate) -> Refused:
    """The refusal that an entry of the deny list makes."""
    return Refused(
        "deny list",
        f"a {entry.kind} that is not on the deny list",
        f"{entry.kind} {entry.value}, denied: {entry.reason}",
        str(leaf),
        f"if that is over: llmgw ctl deny lift {entry.kind} {entry.value}",
    )


def _name(name: x509.GeneralName) -> str:
    match name:
        case x509.UniformResourceIdentifier():
            return f"URI:{name.value}"
        case x509.DNSName():
            return f"DNS:{name.value}"
        case x509.IPAddress():
            return f"IP:{name.value}"
        case _:
            return f"{type(name).__name__}:{name.value}"


def _minute(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M UTC")


def day(when: float) -> str:
    """A time for people, to the minute, in UTC."""
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%MZ")
