"""The agent's end: dial, shake hands, open the link; and how long to wait before the next try."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from llmgw.link import identity, keyfile
from llmgw.link.authority import certificates
from llmgw.link.identity import Certificate
from llmgw.link.messages import Refused
from llmgw.link.patience import DEFAULT_LIMITS, LinkLimits
from llmgw.link.protocol import Role
from llmgw.link.rejected import rejected
from llmgw.link.session import LinkRefused, PeerGone, Session, Unreached, open_session
from llmgw.link.tcp import Metered, bound_unacknowledged, why_unreached
from llmgw.link.tls import TlsError, TlsStream, client_context, handshake, verified_chain
from llmgw.settings.daemon import Address, TlsFiles

CONNECT_S = 4.0
"""How long a TCP connection may take: the kernel's third SYN is sent after 3 s, the fourth only after 7 s."""


@asynccontextmanager
async def connect(
    address: Address,
    tls: TlsFiles,
    trust_domain: str,
    *,
    limits: LinkLimits = DEFAULT_LIMITS,
    connect_s: float = CONNECT_S,
    handshake_s: float = 5.0,
    wall: Callable[[], float] = time.time,
) -> AsyncIterator[Session]:
    """Open the link to the control plane at ``address`` for the length of the scope.

    Yields once the control plane has accepted our certificate's chain and opened HTTP/2; send ``Register`` first.
    Whether it has us at all is in its answer: :meth:`Session.receive` gives ``Welcome`` or raises
    :class:`LinkRefused`. The certificate files are read anew at each call, so that a renewed one is used.

    Raises :class:`PeerGone` when there is no control plane that we accept at this address (:class:`Unreached`, which
    is one, when nobody took the connection), :class:`LinkRefused` when it does not accept our certificate,
    :class:`~llmgw.errors.OperatorError` for unusable files.
    """
    context = client_context(tls)
    thing = f"control plane at {address}"
    transport = await _dial(address, thing, connect_s)
    async with transport:
        bound_unacknowledged(transport, limits.silence_s)
        stream: TlsStream = trio.SSLStream(Metered(transport), context, server_hostname=address.host)
        try:
            await handshake(stream, thing, handshake_s)
            chain = identity.read_chain(verified_chain(stream))
            server = _identify(chain, wall(), trust_domain, thing)
            async with open_session(stream, Role.AGENT, peer=server, remote=str(address), limits=limits) as session:
                session.chain = chain
                yield session
        except TlsError as failed:
            if failed.alert is not None:
                raise LinkRefused(thing, _rejected(tls, failed.alert)) from failed
            raise PeerGone(thing, failed.reason, failed.remedy or _remedy(tls, address)) from failed
        except PeerGone as gone:
            if gone.alert is not None:
                raise LinkRefused(thing, _rejected(tls, gone.alert)) from gone
            raise


async def _dial(address: Address, thing: str, within_s: float) -> trio.SocketStream:
    try:
        with trio.fail_after(within_s):
            return await trio.open_tcp_stream(address.host, address.port)
    except trio.TooSlowError as cause:
        raise Unreached(thing, f"no connection within {within_s:g} s", "check the address and the firewall") from cause
    except OSError as cause:
        raise Unreached(
            thing, f"cannot be reached: {why_unreached(cause)}", "check the address, and that llmgw server runs"
        ) from cause


def _identify(chain: tuple[Certificate, ...], now: float, trust_domain: str, thing: str) -> str:
    """The id of the control plane: host name, chain and usage are checked by the handshake already."""
    if (fault := identity.server_fault(chain, now, trust_domain)) is not None:
        raise PeerGone(thing, *fault)
    server = identity.identity(chain[0], identity.server_uri(trust_domain, ""))
    assert server is not None
    return server


def _rejected(tls: TlsFiles, alert: str) -> Refused:
    """A TLS alert says little: what it was about is in our own certificate."""
    own = certificates(keyfile.read(Path(tls.certificate)), tls.certificate)
    pinned = certificates(keyfile.read(Path(tls.ca)), tls.ca)
    return rejected(own, pinned, alert)


def _remedy(tls: TlsFiles, address: Address) -> str:
    return f"check that {address} is the control plane's link listener and that {tls.ca} is its CA"


class Backoff:
    """How long to wait before the next try: full jitter under a ceiling that doubles.

    Each delay is uniform between 0 and the ceiling (Brooker, "Exponential Backoff and Jitter", AWS Architecture
    Blog, 2015), so that agents that lost one control plane together do not come back together. A try that reached
    nobody cost nobody anything: after it the wait stays below ``unreached_s``, so that the end of a long outage is
    noticed at once. Those whom a crowd then keeps from being welcomed wait longer and longer.
    """

    def __init__(
        self, source: random.Random, first_s: float = 0.5, most_s: float = 60.0, unreached_s: float = 2.0
    ) -> None:
        self._source = source
        self._first_s = first_s
        self._most_s = most_s
        self._unreached_s = unreached_s
        self._ceiling_s = first_s

    def next_s(self, *, unreached: bool = False, told_s: float = 0.0) -> float:
        """The next delay in seconds; the one after it may be twice as long.

        ``unreached``: nobody took the connection. ``told_s``: how long the control plane said to stay away; the delay
        begins after it, and no control plane keeps us away for longer than we would stay by ourselves.
        """
        most_s = self._unreached_s if unreached else self._most_s
        delay = self._source.uniform(0, min(most_s, self._ceiling_s))
        self._ceiling_s = max(self._ceiling_s, min(most_s, 2 * self._ceiling_s))
        return delay + min(max(told_s, 0.0), self._most_s)

    def reset(self) -> None:
        """Start again from the shortest delays: call it when a session was welcomed, not when it connected."""
        self._ceiling_s = self._first_s
