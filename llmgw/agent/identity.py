"""Keeping the node's certificate young: renewed over the open link, and what is trusted kept up with the cluster."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import trio
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.errors import LlmgwError, OperatorError, PeerError
from llmgw.link import identity
from llmgw.link.authority import certificates, fingerprint, new_key, request_for
from llmgw.link.identity import Certificate
from llmgw.link.joining import certificate_fault
from llmgw.link.messages import (
    CertificateIssued,
    IdentityAnswer,
    IdentityHeld,
    RenewalRefused,
    RenewCertificate,
    TrustBundle,
)
from llmgw.link.own import OwnFiles
from llmgw.link.renewal import due_at, retry_s
from llmgw.link.session import LinkRefused, PeerGone, Session
from llmgw.telemetry.logging import logger

_ANSWER_S = 30.0


class NodeIdentity:
    """One node's certificate and the CAs that it trusts. ``clock`` is in seconds since the epoch.

    Clocks are set, so how long to wait is worked out anew every ``look_s`` seconds.
    """

    def __init__(
        self,
        node: str,
        trust_domain: str,
        own: OwnFiles,
        clock: Callable[[], float],
        source: random.Random,
        look_s: float = 60.0,
    ) -> None:
        self._look_s = look_s
        self._node = node
        self._trust_domain = trust_domain
        self._own = own
        self._clock = clock
        self._source = source
        self._draw = source.random()
        self._bundle: TrustBundle | None = None
        self._wanted: tuple[float, float] | None = None
        self._answer: CertificateIssued | RenewalRefused | None = None
        self._heard = trio.Event()
        self._failures = 0
        self._not_before_s = 0.0
        self._said = ""
        self._log = logger("identity")
        own.check()
        try:
            self.installation = own.installation()
        except OperatorError as failed:
            # A disk that is full must not keep an agent from its engines.
            self.installation = ""
            self._log.warning("this agent cannot be told from a copy", error=str(failed))

    def heard(self, message: IdentityAnswer) -> None:
        """The control plane said something of it."""
        if isinstance(message, TrustBundle):
            self._bundle = message
            if message.renew_within_s is None:
                self._wanted = None
            elif self._wanted is None:
                self._wanted = self._clock(), message.renew_within_s
        else:
            self._answer = message
        self._heard.set()

    def connected(self) -> None:
        """A session was opened: what was said in others does not count."""
        self._bundle = self._answer = self._wanted = None

    def _answered(self) -> CertificateIssued | RenewalRefused | None:
        answer, self._answer = self._answer, None
        return answer

    async def run(self, session: Session) -> None:
        """While a session is open: take up what is to be trusted, say so, and renew when it is time.

        Raises :class:`PeerError` when the session has ended.
        """
        taken: TrustBundle | None = None
        while True:
            self._heard = trio.Event()
            bundle = self._bundle
            if bundle is not None and bundle != taken:
                taken = bundle
                await self._take(session, bundle)
            wait_s = self._look_s
            if taken is not None and taken.renewal:
                wait_s = await self._due_s()
                if wait_s <= 0:
                    await self._renew(session)
                    continue
            with trio.move_on_after(min(wait_s, self._look_s)):
                await self._heard.wait()

    async def _due_s(self) -> float:
        try:
            own = await trio.to_thread.run_sync(self._own.certificate)
        except OperatorError:
            return self._look_s  # the next connection says what is wrong with it
        due = due_at(own.not_before, own.not_after, self._draw, self._wanted)
        return max(due, self._not_before_s) - self._clock()

    async def _take(self, session: Session, bundle: TrustBundle) -> None:
        """Trust what the cluster trusts, as long as that does not leave us without this control plane."""
        try:
            new = {fingerprint(c) for c in certificates(bundle.certificates.encode(), "the CA bundle")}
            if not new & {fingerprint(c) for c in await trio.to_thread.run_sync(self._own.cas)}:
                raise OperatorError(
                    "the CA bundle from the control plane",
                    "holds none of the CAs that this node trusts",
                    "the old one stays; let both be in the bundle that server.yaml names until every node has both",
                )
            if await trio.to_thread.run_sync(self._own.trust, bundle.certificates):
                self._log.info("other CAs are trusted from now on")
            await self._hold(session)
        except (PeerGone, LinkRefused):
            raise
        except LlmgwError as wrong:
            self._say(str(wrong))
        if not bundle.renewal:
            self._log.info("certificates are not renewed over the link: have this node's issued in time")

    async def _hold(self, session: Session) -> None:
        """Say what is on the disk now."""

        def held() -> IdentityHeld:
            cas = tuple(sorted(fingerprint(c) for c in self._own.cas()))
            return IdentityHeld(f"{self._own.certificate().serial:x}", cas)

        await session.send(await trio.to_thread.run_sync(held))

    async def _renew(self, session: Session) -> None:
        """One try. The new key is on the disk together with its certificate or not at all."""
        key = new_key()
        self._answered()  # a late one is for another key
        answer = None
        try:
            await session.send(RenewCertificate(request_for(key)))
            with trio.move_on_after(_ANSWER_S):
                while (answer := self._answered()) is None:
                    self._heard = trio.Event()
                    await self._heard.wait()
            match answer:
                case CertificateIssued():
                    leaf = await self._install(answer, key)
                    await self._hold(session)
                case RenewalRefused(reason=reason, remedy=remedy):
                    raise PeerError("the control plane", f"does not renew: {reason}", remedy)
                case _:
                    raise PeerError("the control plane", f"did not answer a renewal within {_ANSWER_S:g} s")
        except (PeerGone, LinkRefused):
            raise
        except LlmgwError as wrong:
            self._not_before_s = self._clock() + retry_s(self._failures, self._source.random())
            self._failures += 1
            self._say(str(wrong))
            return
        self._renewed(leaf)

    async def _install(self, issued: CertificateIssued, key: ec.EllipticCurvePrivateKey) -> Certificate:
        chain = certificates(issued.certificate.encode(), "the certificate that was issued")
        sha256 = identity.key_sha256(key.public_key())
        fault = certificate_fault(chain, issued.bundle, sha256, self._trust_domain, self._node)
        if fault is not None:
            raise PeerError("the certificate that was issued", fault, "look at the control plane's log")
        await trio.to_thread.run_sync(partial(self._own.renewed, issued.certificate, key))
        return identity.read(chain[0])

    def _renewed(self, leaf: Certificate) -> None:
        self._failures, self._not_before_s, self._wanted, self._said = 0, 0.0, None, ""
        self._draw = self._source.random()
        self._log.info("certificate renewed", serial=f"{leaf.serial:x}", ends=identity.day(leaf.not_after))

    def _say(self, wrong: str) -> None:
        if wrong != self._said:
            self._said = wrong
            self._log.error("the node's identity stays as it is", error=wrong)

    async def expired(self) -> bool:
        """Whether our certificate has expired by our own clock. Raises :class:`OperatorError`."""
        own = await trio.to_thread.run_sync(self._own.certificate)
        return self._clock() > own.not_after

    async def renew_expired(self, link: AbstractAsyncContextManager[Session], within_s: float) -> None:
        """Renew a certificate that has expired, over a connection that is good for nothing else.

        Raises :class:`~llmgw.link.session.LinkRefused` when the control plane does not do that (any more).
        """
        key = new_key()
        async with link as session:
            await session.send(RenewCertificate(request_for(key)))
            answered = None
            with trio.move_on_after(within_s):
                answered = await session.receive()
            if not isinstance(answered, CertificateIssued):
                said = "nothing" if answered is None else type(answered).__name__
                raise PeerGone("the control plane", f"answered {said} when asked to renew what has expired")
            self._renewed(await self._install(answered, key))
