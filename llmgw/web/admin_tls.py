"""TLS of the admin listener: its own certificate, and who is at the other end."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import trio
from cryptography import x509

from llmgw.errors import OperatorError
from llmgw.link import keyfile
from llmgw.link.identity import Certificate, read
from llmgw.link.tls import verified_chain
from llmgw.settings.daemon import AdminTls, ServerConfig

ALPN = "http/1.1"
_HANDSHAKE_S = 10.0


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener on this host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def trust_domain(config: ServerConfig) -> str:
    """What certificates of people are named after: the link's trust domain, or without a link the listener's own."""
    if config.link is not None:
        return config.link.trust_domain
    return "" if config.admin.tls is None else config.admin.tls.trust_domain


class AdminTlsContext:
    """What the listener shakes hands with; blocking. Raises :class:`OperatorError` naming the file at fault."""

    def __init__(self, files: AdminTls) -> None:
        self._files = files
        self.context = self._made()

    def load(self) -> None:
        """Read the files again; new connections use them. Where they cannot be used the old ones stay."""
        self.context = self._made()

    def _made(self) -> ssl.SSLContext:
        files = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([ALPN])
        context.num_tickets = 0  # a resumed session would not be checked against the certificate again
        keyfile.read(Path(files.certificate))
        keyfile.check_private(Path(files.key))
        try:
            context.load_cert_chain(files.certificate, files.key, password="")
        except ssl.SSLError as cause:
            reason = f"and {files.key} are no certificate and its unencrypted key ({cause.reason or cause})"
            raise OperatorError(files.certificate, reason, "name the two files that were issued together") from cause
        if files.ca is not None:
            keyfile.read(Path(files.ca))
            try:
                context.load_verify_locations(cafile=files.ca)
            except ssl.SSLError as cause:
                raise OperatorError(files.ca, "holds no CA certificates in PEM form") from cause
            context.verify_mode = ssl.CERT_OPTIONAL  # a token may do instead
            context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        return context


async def shaken(
    stream: trio.SocketStream, context: ssl.SSLContext
) -> tuple[trio.SSLStream[trio.SocketStream], Sequence[Certificate]]:
    """The stream over TLS, and the verified chain of the other end, empty where it showed none.

    Raises :class:`trio.BrokenResourceError` or :class:`trio.TooSlowError` when the handshake fails.
    """
    tls = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
    with trio.fail_after(_HANDSHAKE_S):
        await tls.do_handshake()
    if context.verify_mode is ssl.CERT_NONE or not tls.getpeercert(binary_form=True):
        return tls, ()
    return tls, tuple(read(x509.load_der_x509_certificate(der)) for der in verified_chain(tls))
