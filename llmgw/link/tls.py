"""TLS for the link: version 1.3 only, certificates both ways, and failures that reach the other end."""

from __future__ import annotations

import contextlib
import ssl
import sys
from pathlib import Path

import trio

from llmgw.errors import OperatorError, PeerError
from llmgw.link import keyfile
from llmgw.settings.daemon import TlsFiles

ALPN = "h2"
JOIN_ALPN = "llmgw-join/1"
"""What a client offers that has no certificate yet and wants one."""

_NO_CHECK_TIME = 0x200000
"""``X509_V_FLAG_NO_CHECK_TIME`` of OpenSSL's x509_vfy.h; Python passes flags that it has no name for."""

_ALERT_S = 1.0

TlsStream = trio.SSLStream[trio.abc.HalfCloseableStream]


class TlsError(PeerError):
    """A TLS handshake failed. ``alert`` is what the other end said against us, if it said so."""

    def __init__(self, thing: str, reason: str, remedy: str = "", *, alert: str | None = None) -> None:
        super().__init__(thing, reason, remedy)
        self.alert = alert


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """What the control plane accepts agents with. Raises :class:`OperatorError` naming the file at fault.

    A client certificate must chain to the CA bundle and be for client use. Its dates, and its issuers', are let
    through: only after the handshake can we tell the agent which date is wrong, so
    :func:`llmgw.link.identity.check` looks at them before anything that the agent says is acted on.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    context.num_tickets = 0  # a resumed session would not be checked against the certificate again
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """What an agent connects with: checks the control plane's chain and host name.

    Dates are let through here too, so that a clock that is wrong can be told from a certificate that is:
    :func:`llmgw.link.identity.server_fault` looks at them before anything is said.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, files)
    context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    return context


def joining_server_context(files: TlsFiles) -> ssl.SSLContext:
    """What the control plane meets those with who have no certificate yet. Raises :class:`OperatorError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files)
    context.set_alpn_protocols([JOIN_ALPN])
    context.num_tickets = 0
    return context


def joining_context(ca: str | None) -> ssl.SSLContext:
    """What a node joins with: checks host name and chain against this CA (PEM).

    Without one nothing is checked: only for asking what CAs there are, and never for saying anything.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([JOIN_ALPN])
    if ca is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
        context.load_verify_locations(cadata=ca)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN  # a bundle may hold just an issuing CA
    context.set_alpn_protocols([ALPN])
    certificate, key, ca = Path(files.certificate), Path(files.key), Path(files.ca)
    for path in (certificate, ca):
        keyfile.read(path)  # OpenSSL's errors do not say which file
    keyfile.check_private(key)
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError as cause:
        raise OperatorError(files.ca, "holds no CA certificates in PEM form") from cause
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as cause:
        if cause.reason == "KEY_VALUES_MISMATCH":
            reason = f"is not the key of the certificate in {files.certificate}"
            raise OperatorError(files.key, reason, "name the two files that were issued together") from cause
        reason = f"and {files.key} are no certificate and unencrypted key in PEM form ({cause.reason or cause})"
        raise OperatorError(files.certificate, reason) from cause


async def handshake(
    stream: TlsStream, thing: str, within_s: float, alpn: str = ALPN, *, by: float | None = None
) -> None:
    """Shake hands, or raise :class:`TlsError` about ``thing`` after telling the other end why.

    ``by`` is when ``within_s`` is over, on Trio's clock, where it began to count before. Cancelled or failed, the
    stream is of no further use; the caller closes it.
    """
    await trio.lowlevel.checkpoint()
    broke: trio.BrokenResourceError | None = None
    try:
        with trio.fail_at(trio.current_time() + within_s if by is None else by):
            await stream.do_handshake()
    except trio.TooSlowError as cause:
        raise TlsError(thing, f"the TLS handshake was not done within {within_s:g} s") from cause
    except trio.BrokenResourceError as cause:
        broke = cause
    if broke is not None:
        await deliver_alert(stream)
        raise TlsError(thing, explain(broke), alert=alert(broke)) from broke
    if stream.selected_alpn_protocol() == alpn:
        return
    if alpn == JOIN_ALPN:
        raise TlsError(thing, "lets nothing join", "set link.issuing in server.yaml; or check the address")
    raise TlsError(thing, "the other end does not speak HTTP/2", "check the address: is it the link's listener?")


async def deliver_alert(stream: TlsStream) -> None:
    """Send the alert that a failed handshake left behind.

    Trio drops it: ``SSLStream`` raises before it writes what OpenSSL put out, so the other end would see a
    connection that just ends. The wait for the other end's close keeps our own close from overtaking the alert.
    Takes a second at most.
    """
    await trio.lowlevel.checkpoint()
    if not (pending := stream._outgoing.read()):
        return
    with trio.move_on_after(_ALERT_S), contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.transport_stream.send_all(pending)
        await stream.transport_stream.send_eof()
        while await stream.transport_stream.receive_some():
            pass


def verified_chain(stream: TlsStream | trio.SSLStream[trio.SocketStream]) -> tuple[bytes, ...]:
    """The other end's chain as OpenSSL verified it, in DER: leaf first, trust anchor last."""
    tls = stream._ssl_object
    if sys.version_info >= (3, 13):
        return tuple(tls.get_verified_chain())
    import _ssl  # the same call, before it had a public name

    return tuple(c.public_bytes(_ssl.ENCODING_DER) for c in tls._sslobj.get_verified_chain())  # type: ignore[attr-defined]


def alert(broken: trio.BrokenResourceError) -> str | None:
    """What the other end said against us (``unknown ca``, ``certificate required``), if it said so."""
    cause = broken.__cause__
    if isinstance(cause, ssl.SSLError) and cause.reason and "_ALERT_" in cause.reason:
        return cause.reason.partition("_ALERT_")[2].lower().replace("_", " ")
    return None


def explain(broken: trio.BrokenResourceError) -> str:
    """Why a connection broke, in words."""
    cause = broken.__cause__
    if (said := alert(broken)) is not None:
        return f"the other end answered with the TLS alert '{said}'"
    match cause:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not acceptable: {cause.verify_message}"
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError():
            return "the connection was cut"
        case ssl.SSLError():
            return f"TLS failed: {(cause.reason or str(cause)).lower().replace('_', ' ')}"
        case OSError():
            return f"the connection broke: {(cause.strerror or str(cause)).lower()}"
        case _:
            return "the connection broke"
