"""How a node without a certificate gets one: its own small protocol beside the link, on the same listener.

One TLS connection that offers ``llmgw-join/1`` and shows no certificate, one request, one answer, framed like the
link's messages; no HTTP/2. The node connects twice: first it asks which CAs there are and believes nothing, then it
trusts the one whose fingerprint is in its token, and only then says the token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio
from cryptography import x509

from llmgw.errors import PeerError
from llmgw.link import identity
from llmgw.link.authority import certificates, fingerprint, pem
from llmgw.link.codec import JOIN_ANSWERS, JOINING, MalformedError, MessageBuffer, Unknown, decode, encode
from llmgw.link.messages import AskBundle, Bundle, Join, Joined, JoinMessage, Message, Refused
from llmgw.link.session import LinkRefused, PeerGone
from llmgw.link.tcp import why_unreached
from llmgw.link.tls import JOIN_ALPN, TlsError, TlsStream, explain, handshake, joining_context, verified_chain
from llmgw.link.tokens import JoinToken
from llmgw.link.trust import anchor
from llmgw.settings.daemon import Address

REQUEST_BYTES = 16 * 1024
WITHIN_S = 10.0
AT_ONCE = 64
AT_ONCE_ADDRESS = 16
"""Whoever is slow on purpose holds some of the places, and not all of them."""

_ANSWER_BYTES = 256 * 1024

Welcome = Callable[[Join, str], Awaitable[Joined | Refused]]
"""Decides about a request from an address."""


async def answer(stream: TlsStream, remote: str, bundle: str, welcome: Welcome, within_s: float = WITHIN_S) -> None:
    """Control plane: take one request over a connection whose handshake is done, answer it, and hang up.

    Raises :class:`PeerGone`. Bounded by ``within_s`` and :data:`REQUEST_BYTES`, whatever the other end does.
    """
    thing = f"somebody who wants to join at {remote}"
    with trio.move_on_after(within_s) as slow:
        request = await _receive(stream, thing, JOINING, REQUEST_BYTES)
        match request:
            case AskBundle():
                answered: Message = Bundle(bundle)
            case Join():
                answered = await welcome(request, remote)
            case _:
                raise PeerGone(thing, "sent no request that can be answered here")
        await _send(stream, thing, answered)
        await _close(stream)
    if slow.cancelled_caught:
        raise PeerGone(thing, f"was not done within {within_s:g} s")


async def ask(address: Address, token: JoinToken, request: str, node: str, now: float) -> Joined:
    """Node: join at ``address`` with a certificate request. ``now`` is this node's clock, in seconds since the epoch.

    Raises :class:`LinkRefused` with the control plane's reason, :class:`PeerGone` when it is not there or is not the
    one that the token is from; then it has not seen the token.
    """
    thing = f"control plane at {address}"
    shown = await _exchange(address, thing, None, AskBundle())
    if not isinstance(shown, Bundle):
        raise PeerGone(thing, f"answered {type(shown).__name__} when asked for its CAs")
    pinned = _pinned(shown.certificates, token, thing)
    answered = await _exchange(address, thing, (pinned, now), Join(str(token), request, node))
    if isinstance(answered, Refused):
        raise LinkRefused(thing, answered)
    if not isinstance(answered, Joined):
        raise PeerGone(thing, f"answered {type(answered).__name__} when asked for a certificate")
    return answered


def _pinned(bundle: str, token: JoinToken, thing: str) -> x509.Certificate:
    shown = certificates(bundle.encode(), thing)
    found = next((c for c in shown if fingerprint(c) == token.ca), None)
    if found is None:
        raise PeerGone(
            thing,
            f"is not the one that the token is from: it shows {', '.join(fingerprint(c) for c in shown)}, "
            f"the token names CA {token.ca}",
            "check --server; if the CA was rotated meanwhile, make a new token",
        )
    return found


async def _exchange(
    address: Address, thing: str, trusted: tuple[x509.Certificate, float] | None, request: JoinMessage
) -> Message | Unknown:
    """One request and its answer, with whoever is there, or only with a control plane below the trusted CA."""
    context = joining_context(None if trusted is None else pem(trusted[0]).decode())
    try:
        with trio.fail_after(WITHIN_S):
            transport = await trio.open_tcp_stream(address.host, address.port)
            async with transport:
                stream: TlsStream = trio.SSLStream(transport, context, server_hostname=address.host)
                await handshake(stream, thing, WITHIN_S, JOIN_ALPN)
                if trusted is not None:
                    _known(stream, trusted[1], thing)
                await _send(stream, thing, request)
                return await _receive(stream, thing, JOIN_ANSWERS, _ANSWER_BYTES)
    except trio.TooSlowError as slow:
        raise PeerGone(thing, f"did not answer within {WITHIN_S:g} s", "check the address and the firewall") from slow
    except TlsError as failed:
        remedy = failed.remedy or "check --server: its host name must be in the control plane's certificate"
        if failed.alert == "no application protocol" or failed.alert == "certificate required":
            remedy = "nothing can join there: set link.issuing in server.yaml"
        raise PeerGone(thing, failed.reason, remedy) from failed
    except OSError as failed:
        reason = f"cannot be reached: {why_unreached(failed)}"
        raise PeerGone(thing, reason, "check --server, and that llmgw server runs") from failed


def _known(stream: TlsStream, now: float, thing: str) -> None:
    chain = identity.read_chain(verified_chain(stream))
    domain = next((u.split("/")[2] for u in chain[0].uris if u.startswith("spiffe://")), "")
    if (fault := identity.server_fault(chain, now, domain)) is not None:
        raise PeerGone(thing, *fault)


def check_joined(joined: Joined, key_sha256: str, node: str) -> tuple[x509.Certificate, ...]:
    """The chain that a control plane gave us, if it is what we asked for. ``node`` may be empty.

    Raises :class:`PeerError` when it is for another key or node, or from no CA in the bundle that came with it.
    """
    thing = "the certificate that was issued"
    chain = certificates(joined.certificate.encode(), thing)
    fault = certificate_fault(chain, joined.bundle, key_sha256, joined.trust_domain, joined.node)
    if fault is None and node not in ("", joined.node):
        fault = f"is for node {joined.node}"
    if fault is not None:
        raise PeerError(thing, fault, "look at the control plane's log")
    return chain


def certificate_fault(
    chain: Sequence[x509.Certificate], bundle: str, key_sha256: str, trust_domain: str, node: str
) -> str | None:
    """Why a chain is not one for this key and node, from a CA in the bundle; ``None`` if it is."""
    leaf = identity.read(chain[0])
    if leaf.key != key_sha256:
        return "is for another key"
    if leaf.names != (f"URI:{identity.node_uri(trust_domain, node)}",) or not identity.is_id(node):
        return f"has the names {', '.join(leaf.names) or 'none'}"
    if anchor(chain, certificates(bundle.encode(), "the CA bundle")) is None:
        return "is from no CA in the bundle that came with it"
    return None


async def _send(stream: TlsStream, thing: str, message: Message) -> None:
    try:
        await stream.send_all(encode(message))
    except trio.BrokenResourceError as broken:
        raise PeerGone(thing, explain(broken)) from broken


async def _receive(
    stream: TlsStream, thing: str, known: Mapping[str, type[JoinMessage]], most_bytes: int
) -> Message | Unknown:
    buffer = MessageBuffer(most_bytes)
    try:
        while (payload := buffer.take()) is None:
            data = await stream.receive_some(4096)
            if not data:
                raise PeerGone(thing, "hung up in the middle of a message")
            buffer.feed(bytes(data))
        return decode(payload, known)
    except MalformedError as malformed:
        raise PeerGone(thing, str(malformed)) from malformed
    except trio.BrokenResourceError as broken:
        raise PeerGone(thing, explain(broken)) from broken


async def _close(stream: TlsStream) -> None:
    """See that the answer has gone out before the connection does: the other end hangs up when it has it."""
    try:
        while await stream.receive_some(4096):
            pass
    except trio.BrokenResourceError:
        return
