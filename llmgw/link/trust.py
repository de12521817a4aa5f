"""What a control plane shows and whom it trusts, as its files have it; read again when they change, without a restart.

New handshakes use what was read last. A change that cannot be used is reported and the old one stays.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from llmgw.errors import OperatorError
from llmgw.link import ca, identity, keyfile
from llmgw.link.authority import Issuer, certificates, fingerprint, pem
from llmgw.link.identity import Certificate
from llmgw.link.tls import joining_server_context, server_context
from llmgw.settings.daemon import LinkListener, TlsFiles

_DEEPEST = 8


@frozen
class Trust:
    """One reading of the files. ``anchor`` is the CA in the bundle that our own certificate leads to, if one does.

    ``issuer`` and ``joining`` are missing where certificates come from elsewhere.
    """

    own: Certificate
    bundle: tuple[x509.Certificate, ...]
    anchor: x509.Certificate | None
    issuer: Issuer | None
    link: ssl.SSLContext
    joining: ssl.SSLContext | None

    @property
    def bundle_pem(self) -> str:
        """The trusted CAs as PEM."""
        return b"".join(pem(c) for c in self.bundle).decode()

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """SHA-256 of the trusted CAs."""
        return tuple(fingerprint(c) for c in self.bundle)


class TrustFiles:
    """The files of a link listener. Raises :class:`OperatorError` when they cannot be used at the start."""

    def __init__(self, listener: LinkListener) -> None:
        self._listener = listener
        self._stamp = self._stamps()
        self.now = read(listener)

    def refresh(self) -> bool:
        """Read again if a file is another than at the last call; whether that changed anything. Blocking, briefly.

        Raises :class:`OperatorError` when the files cannot be used as they are; what was read before stays. Each
        change raises once.
        """
        stamp = self._stamps()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.now = read(self._listener)
        return True

    def _stamps(self) -> tuple[object, ...]:
        tls, issuing = self._listener.tls, self._listener.issuing
        paths = [Path(tls.certificate), Path(tls.key), Path(tls.ca)]
        if issuing is not None:
            folder = Path(issuing.ca)
            paths += [folder / "active", folder / "issuing.pem", folder / "issuing.key"]
        return tuple(_stamp(path) for path in paths)


def read(listener: LinkListener) -> Trust:
    """Read everything once. Raises :class:`OperatorError` naming what cannot be used."""
    tls = listener.tls
    chain = certificates(keyfile.read(Path(tls.certificate)), tls.certificate)
    bundle = certificates(keyfile.read(Path(tls.ca)), tls.ca)
    issuer = None if listener.issuing is None else ca.load(Path(listener.issuing.ca))
    if issuer is not None and listener.issuing is not None:
        if issuer.trust_domain != listener.trust_domain:
            raise OperatorError(
                listener.issuing.ca,
                f"issues for {issuer.trust_domain}, and link.trust_domain is {listener.trust_domain}",
                f"set link.trust_domain: {issuer.trust_domain} in server.yaml",
            )
        if issuer.root not in bundle:
            raise OperatorError(
                tls.ca,
                f"does not hold the root of the CA in {listener.issuing.ca}: whoever it issued for would not get in",
                "add its root.pem to the bundle",
            )
    return Trust(
        own=identity.read(chain[0]),
        bundle=bundle,
        anchor=anchor(chain, bundle),
        issuer=issuer,
        link=_context(server_context, listener),
        joining=None if issuer is None else _context(joining_server_context, listener),
    )


def _context(make: Callable[[TlsFiles], ssl.SSLContext], listener: LinkListener) -> ssl.SSLContext:
    try:
        return make(listener.tls)
    except OSError as cause:  # a file that was there a moment ago
        reason = f"cannot be read: {cause.strerror or cause}"
        raise OperatorError(f"one of the files of link.tls ({listener.tls.certificate}, …)", reason) from cause


def anchor(chain: Sequence[x509.Certificate], bundle: Sequence[x509.Certificate]) -> x509.Certificate | None:
    """The CA of ``bundle`` that the first certificate of ``chain`` leads to, over the others in it."""
    current = chain[0]
    for _ in range(_DEEPEST):
        if (found := next((c for c in bundle if _issued(current, c)), None)) is not None:
            return found
        above = next((c for c in chain[1:] if c != current and _issued(current, c)), None)
        if above is None:
            return None
        current = above
    return None


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
