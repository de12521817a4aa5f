"""Who is at the other end: read from its certificate, checked in one place.

A node's certificate carries exactly one name, the URI ``spiffe://<trust domain>/llmgw/node/<id>``; a control
plane's carries ``spiffe://<trust domain>/llmgw/server/<id>`` beside its host names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from attrs import frozen
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from llmgw.link.messages import Refused

CLIENT_AUTH = "clientAuth"
SERVER_AUTH = "serverAuth"

_USAGES = {ExtendedKeyUsageOID.CLIENT_AUTH: CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH: SERVER_AUTH}
_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}", re.ASCII)
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]{1,255}", re.ASCII)
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


@frozen
class Certificate:
    """What a certificate says, as far as the link asks. Times are seconds since the epoch.

    ``names`` are the subject alternative names, as ``URI:…``, ``DNS:…``, ``IP:…``. ``fault`` is set when a part
    of it could not be read; then nothing else may be relied on.
    """

    subject: str
    issuer: str
    serial: int
    not_before: float
    not_after: float
    names: tuple[str, ...] = ()
    usages: tuple[str, ...] = ()
    fault: str = ""

    @property
    def uris(self) -> tuple[str, ...]:
        """The names that are URIs."""
        return tuple(n.removeprefix("URI:") for n in self.names if n.startswith("URI:"))

    def __str__(self) -> str:
        names = ", ".join(self.names) or "none"
        return (
            f"subject {self.subject}; SAN {names}; serial {self.serial:x}; issuer {self.issuer}; "
            f"valid {_day(self.not_before)} to {_day(self.not_after)}"
        )


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
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as cause:
        fault = f"an extension cannot be read: {cause}"
    return Certificate(
        subject=certificate.subject.rfc4514_string() or "empty",
        issuer=certificate.issuer.rfc4514_string() or "empty",
        serial=certificate.serial_number,
        not_before=certificate.not_valid_before_utc.timestamp(),
        not_after=certificate.not_valid_after_utc.timestamp(),
        names=names,
        usages=usages,
        fault=fault,
    )


def read_chain(chain: Iterable[bytes]) -> tuple[Certificate, ...]:
    """The facts of a verified chain in DER, leaf first.

    Raises ``ValueError`` for bytes that are no certificate, which a TLS library that verified them never gives.
    """
    return tuple(read(x509.load_der_x509_certificate(der)) for der in chain)


def check(chain: Sequence[Certificate], claimed: str, now: float, trust_domain: str) -> Refused | None:
    """Whether the agent with this verified chain may be node ``claimed``; ``None`` means yes.

    The TLS handshake has verified signatures and trust, and nothing else is assumed of it. ``now`` is seconds
    since the epoch on the control plane's clock.
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
        if not link.not_before <= now <= link.not_after:
            return _outdated(link, name, now, line, reissue)
    if CLIENT_AUTH not in leaf.usages:
        usages = ", ".join(leaf.usages) or "no extended key usage"
        return Refused("usage", CLIENT_AUTH, usages, line, reissue)
    if len(leaf.names) != 1 or len(leaf.uris) != 1:
        found = ", ".join(leaf.names) or "no subject alternative name"
        return Refused("identity", f"exactly one name, URI:{node_uri(trust_domain, 'ID')}", found, line, reissue)
    node = identity(leaf, node_uri(trust_domain, ""))
    if node is None:
        return Refused("identity", node_uri(trust_domain, "ID"), leaf.uris[0], line, reissue)
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


def _outdated(link: Certificate, name: str, now: float, line: str, reissue: str) -> Refused:
    wanted = f"a {name} that is valid now, at {_minute(now)} on the control plane's clock"
    found = f"valid {_minute(link.not_before)} to {_minute(link.not_after)}"
    if now < link.not_before:
        early = link.not_before - now
        remedy = f"it is {early:.0f} s early: compare the clocks of the CA's machine and the control plane"
        return Refused("validity", wanted, found, line, remedy)
    return Refused("validity", wanted, found, line, f"if the control plane's clock is right, {reissue}")


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


def _day(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%MZ")
