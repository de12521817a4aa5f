"""Who may be a node, as the daemon keeps it: tokens, certificates, the deny list, and what each node trusts.

Decisions are pure functions beside this (:mod:`~llmgw.server.tokens`, :mod:`~llmgw.server.roots`,
:mod:`llmgw.link.identity`); here they meet the store and the CA. Whatever is done is an event in the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import trio
from attrs import evolve, frozen
from cryptography import x509

from llmgw.errors import LlmgwError, OperatorError
from llmgw.link import identity, tokens
from llmgw.link.authority import Issuer, fingerprint, requested_key
from llmgw.link.identity import Certificate, Denied, DenyKind, DenyList, Rules
from llmgw.link.messages import (
    CertificateIssued,
    IdentityHeld,
    Join,
    Joined,
    Refused,
    RenewalRefused,
    RenewCertificate,
    TrustBundle,
)
from llmgw.link.renewal import spread_s
from llmgw.link.server import Gate
from llmgw.link.trust import TrustFiles
from llmgw.server.roots import Standing, possible
from llmgw.server.tokens import check_new, refusal
from llmgw.settings.daemon import Issuing, LinkListener
from llmgw.store.identity import DenyRow, Event, HeldRow, IdentityStore, IssuedRow, TokenRow
from llmgw.telemetry.logging import logger

_LOOK_S = 1.0
_BETWEEN_S = 5.0
"""A node gets a certificate at most this often over the link."""

_TOLD = 1000
_OFF = "no certificates are issued here: server.yaml has no link.issuing"


@frozen
class Granted:
    """A certificate that was issued, and what it says: leaf, issuing CA and root."""

    message: CertificateIssued
    chain: tuple[Certificate, ...]


class Identities:
    """Call :meth:`load` first. ``changed`` is called when sessions have to be looked at again."""

    def __init__(
        self, listener: LinkListener, store: IdentityStore, clock: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        self._listener = listener
        self._files = TrustFiles(listener)
        self._store = store
        self._clock = clock
        self._changed = changed
        self._deny = DenyList()
        self._held: dict[str, HeldRow] = {}
        self._issued: dict[str, IssuedRow] = {}
        self._told: dict[str, tuple[str, str]] = {}
        self._events: list[Event] = []
        self._woken = trio.Event()
        self._log = logger("identity")

    async def load(self) -> None:
        """Take up what is remembered, and say what is off."""
        self._held = {row.node: row for row in await self._store.held()}
        self._issued = {row.node: row for row in await self._store.newest_issued()}
        await self._read_denied()
        if self._listener.issuing is None:
            self._log.info("joining and renewal are off", reason=_OFF)
        if self._files.now.anchor is None:
            self._log.warning("our own certificate leads to no CA in the bundle", ca=self._listener.tls.ca)

    async def run(self) -> None:
        """Look at the files now and then, and at once when woken; write down who was turned away."""
        while True:
            with trio.move_on_after(_LOOK_S):
                await self._woken.wait()
            self._woken = trio.Event()
            events, self._events = self._events, []
            try:
                if await trio.to_thread.run_sync(self._files.refresh):
                    await self._refreshed()
                for event in events:
                    await self._store.add_event(event)
            except OperatorError as wrong:
                self._log.error("what was read before stays in use", error=str(wrong))

    def wake(self) -> None:
        """Look at the files now."""
        self._woken.set()

    async def _refreshed(self) -> None:
        now = self._files.now
        self._log.info("certificates read again", serial=f"{now.own.serial:x}", cas=[c[:16] for c in now.fingerprints])
        await self._store.add_event(self._event("reload", "", "server", f"own certificate {now.own.serial:x}"))
        self._changed()

    # The gate

    def gate(self) -> Gate:
        """What the link's listener asks."""
        issuing = self._listener.issuing
        return Gate(
            trust=lambda: self._files.now,
            rules=lambda: self.rules,
            join=None if issuing is None else self.join,
            renew=None if issuing is None else self.renew_expired,
            grace_s=self.grace_s,
            refused=self.turned_away,
        )

    @property
    def rules(self) -> Rules:
        """What is asked of an agent now."""
        nodes = self._listener.nodes
        return Rules(self._listener.trust_domain, self._deny, None if nodes is None else frozenset(nodes))

    @property
    def grace_s(self) -> float:
        """How long a certificate may have expired and still be renewed."""
        return 0.0 if self._listener.issuing is None else self._listener.issuing.renew_expired_days * 86400

    def check(self, node: str, shown: tuple[Certificate, ...], chain: tuple[Certificate, ...]) -> Refused | None:
        """Whether an open session may go on; it was opened with ``shown`` and may have been renewed to ``chain``."""
        rules = evolve(self.rules, trusted=frozenset(self._files.now.fingerprints))
        if (entry := rules.deny.find(node, shown)) is not None:  # a renewal does not wash off what was shown
            return identity.denied(entry, shown[0])
        return identity.check(chain, node, self._clock(), rules)

    def turned_away(self, remote: str, node: str, refused: Refused) -> None:
        """An agent was refused; written down once a change."""
        told = refused.claim, refused.certificate
        if self._told.get(node) != told and len(self._events) < _TOLD:
            if len(self._told) > _TOLD:
                self._told.clear()
            self._told[node] = told
            self._events.append(self._event("refused", node, remote, f"{refused.claim}: {refused.found}"))

    # Tokens

    async def create_token(self, node: str, ttl_s: float, by: str) -> tuple[str, TokenRow]:
        """A new token and its row; the text is nowhere else. Raises :class:`OperatorError`."""
        check_new(node, ttl_s)
        self._issuing()
        if (anchor := self._files.now.anchor) is None:
            raise OperatorError(
                self._listener.tls.certificate,
                f"leads to no CA in {self._listener.tls.ca}, which nodes could know us by",
                "add that CA to the bundle",
            )
        if self.rules.nodes is not None and node not in self.rules.nodes:
            raise OperatorError(f"node {node}", "is not among link.nodes", "add it to link.nodes in server.yaml")
        if (denied := self._deny.find(node, ())) is not None:
            raise OperatorError(f"node {node}", f"is denied: {denied.reason}", f"llmgw ctl deny lift node {node}")
        token, now = tokens.new(fingerprint(anchor)), self._clock()
        row = TokenRow(token.id, node, token.digest, now, now + ttl_s, by)
        await self._store.add_token(row, self._event("token-created", node, by, f"token {token.id}, for {ttl_s:g} s"))
        return str(token), row

    async def tokens(self) -> tuple[TokenRow, ...]:
        """Every token, newest first."""
        return await self._store.tokens()

    async def revoke_token(self, token: str, by: str) -> None:
        """Raises :class:`OperatorError` when there is none that could still be used."""
        row = await self._store.token(token)
        event = self._event("token-revoked", "" if row is None else row.node, by, f"token {token}")
        if row is None or not await self._store.revoke_token(token, self._clock(), event):
            raise OperatorError(
                f"token {token[:20]}", "is not there, or is used or revoked already", "see: llmgw ctl token list"
            )

    # Certificates

    async def join(self, request: Join, remote: str) -> Joined | Refused:
        """Decide about a node that wants its first certificate."""
        now = self._clock()
        try:
            token, key = tokens.parse(request.token), requested_key(request.request)
        except LlmgwError as wrong:
            return await self._not_joined("", remote, _no_request(wrong))
        row, sha256 = await self._store.token(token.id), identity.key_sha256(key)
        refused = refusal(row, token.digest, request.node, sha256, now)
        if refused is not None or row is None:
            assert refused is not None
            return await self._not_joined("" if row is None else row.node, remote, refused)
        used = self._event("token-used", row.node, remote, f"token {row.id}, key {sha256}")
        if not row.used and not await self._store.use_token(row.id, sha256, remote, now, used):
            # Somebody else was faster: what became of it tells who.
            row = await self._store.token(token.id)
            lost = refusal(row, token.digest, request.node, sha256, now)
            if lost is not None:
                return await self._not_joined("" if row is None else row.node, remote, lost)
            assert row is not None
        granted = await self._grant(row.node, request.request, remote, "joined")
        if isinstance(granted, Refused):
            return await self._not_joined(row.node, remote, granted)
        issued = granted.message
        self._log.info("node joined", node=row.node, remote=remote, serial=f"{granted.chain[0].serial:x}")
        return Joined(row.node, self._listener.trust_domain, issued.certificate, issued.bundle)

    async def _not_joined(self, node: str, remote: str, refused: Refused) -> Refused:
        self._log.warning("not joined", node=node, remote=remote, claim=refused.claim, found=refused.found)
        await self._store.add_event(self._event("join-refused", node, remote, f"{refused.claim}: {refused.found}"))
        return refused

    async def renew(self, node: str, request: RenewCertificate, remote: str) -> Granted | RenewalRefused:
        """Renew over an open session."""
        newest = self._issued.get(node)
        if newest is not None and 0 <= self._clock() - newest.at < _BETWEEN_S:
            return RenewalRefused("it was renewed a moment ago", f"ask again in {_BETWEEN_S:g} s")
        granted = await self._grant(node, request.request, remote, "renewed")
        if isinstance(granted, Refused):
            return RenewalRefused(f"{granted.claim}: {granted.found}", granted.remedy)
        return granted

    async def renew_expired(self, node: str, request: RenewCertificate, remote: str) -> CertificateIssued | Refused:
        """Renew for an agent whose certificate lets it do nothing else."""
        granted = await self._grant(node, request.request, remote, "renewed-expired")
        return granted if isinstance(granted, Refused) else granted.message

    async def _grant(self, node: str, request: str, remote: str, kind: str) -> Granted | Refused:
        now = self._clock()
        try:
            issuer, issuing = self._issuing()
            key = requested_key(request)
            sha256 = identity.key_sha256(key)
            denied = self._deny.find(node, (Certificate("", "", 0, 0, 0, key=sha256),))
            if denied is not None:
                raise OperatorError(f"{denied.kind} {denied.value}", f"is denied: {denied.reason}", "ask your operator")
            if self.rules.nodes is not None and node not in self.rules.nodes:
                raise OperatorError(f"node {node}", "is not among link.nodes", "add it there in server.yaml")
            leaf = issuer.node(node, key, issuing.node_hours * 3600, now)
            serial, root = f"{leaf.serial_number:x}", fingerprint(issuer.root)
            row = IssuedRow(serial, node, sha256, root, leaf.not_valid_after_utc.timestamp(), now)
            await self._store.issued(
                row,
                self._event(kind, node, remote, f"serial {serial}, key {sha256}"),
            )
        except LlmgwError as wrong:
            return _no_request(wrong)
        self._issued[node] = row
        chain = tuple(identity.read(c) for c in (leaf, issuer.issuing.certificate, issuer.root))
        return Granted(CertificateIssued(issuer.chain(leaf).decode(), self._files.now.bundle_pem), chain)

    def _issuing(self) -> tuple[Issuer, Issuing]:
        issuer, issuing = self._files.now.issuer, self._listener.issuing
        if issuer is None or issuing is None:
            raise OperatorError(
                "server.yaml: link.issuing", "is not set: certificates are issued elsewhere",
                "set it to the folder of llmgw ca init, or have certificates issued as the first one was",
            )  # fmt: skip
        return issuer, issuing

    # What nodes hold

    async def connected(self, node: str, chain: tuple[Certificate, ...]) -> None:
        """An agent was let in with this chain."""
        leaf, before = chain[0], self._held.get(node)
        new = HeldRow(
            node, f"{leaf.serial:x}", leaf.key, chain[-1].sha256, leaf.not_after,
            None if before is None else before.cas, self._clock(),
        )  # fmt: skip
        await self._hold(new)

    async def holds(self, node: str, message: IdentityHeld, chain: tuple[Certificate, ...]) -> None:
        """An agent said what it uses from now on; ``chain`` is what the session goes by."""
        leaf, cas = chain[0], tuple(sorted(message.cas))
        await self._hold(
            HeldRow(node, f"{leaf.serial:x}", leaf.key, chain[-1].sha256, leaf.not_after, cas, self._clock())
        )

    async def _hold(self, row: HeldRow) -> None:
        before, self._held[row.node] = self._held.get(row.node), row
        if before is None or evolve(before, at=row.at) != row:
            try:
                await self._store.save_held(row)
            except OperatorError as failed:
                # It is known all the same, until a restart; then the node says it again.
                self._log.error("what a node holds is not stored", node=row.node, error=str(failed))

    def trust_bundle(self, node: str) -> TrustBundle:
        """What this node is told of the CAs."""
        now, held = self._files.now, self._held.get(node)
        other = now.issuer is not None and held is not None and held.root != fingerprint(now.issuer.root)
        within_s = spread_s(len(self._held)) if other else None
        return TrustBundle(now.bundle_pem, renewal=now.issuer is not None, renew_within_s=within_s)

    def standings(self) -> tuple[Standing, ...]:
        """What every node that is not denied may be using."""
        nodes = sorted(self._held.keys() | self._issued.keys())
        return tuple(
            standing
            for node in nodes
            if self._deny.find(node, ()) is None
            for standing in possible(self._held.get(node), self._issued.get(node))
        )

    def held(self) -> tuple[HeldRow, ...]:
        """What every node uses."""
        return tuple(self._held.values())

    @property
    def own(self) -> Certificate:
        """Our own certificate."""
        return self._files.now.own

    @property
    def cas(self) -> tuple[x509.Certificate, ...]:
        """The CAs that are trusted."""
        return self._files.now.bundle

    @property
    def anchor(self) -> str:
        """SHA-256 of the CA that our own certificate leads to, empty if to none of the bundle."""
        return "" if self._files.now.anchor is None else fingerprint(self._files.now.anchor)

    @property
    def issuing_root(self) -> str:
        """SHA-256 of the root that certificates are issued below, empty if none are."""
        issuer = self._files.now.issuer
        return "" if issuer is None else fingerprint(issuer.root)

    # The deny list

    async def deny(self, kind: str, value: str, reason: str, by: str) -> DenyRow:
        """Keep somebody out from now on; open sessions end. Raises :class:`OperatorError`."""
        row = DenyRow(kind, normal(kind, value), reason.strip(), by, self._clock())
        if not row.reason:
            raise OperatorError("the reason", "is missing", "say why: whoever is refused is told")
        node = row.value if kind == DenyKind.NODE else ""
        await self._store.deny(row, self._event("denied", node, by, f"{kind} {row.value}: {row.reason}"))
        await self._read_denied()
        self._changed()
        return row

    async def lift(self, kind: str, value: str, by: str) -> None:
        """Let somebody in again. Raises :class:`OperatorError` when there is no such entry."""
        value = normal(kind, value)
        node = value if kind == DenyKind.NODE else ""
        if not await self._store.lift(kind, value, self._event("deny-lifted", node, by, f"{kind} {value}")):
            raise OperatorError(f"{kind} {value}", "is not denied", "see: llmgw ctl deny list")
        await self._read_denied()

    async def denied(self) -> tuple[DenyRow, ...]:
        """The deny list."""
        return await self._store.denied()

    async def _read_denied(self) -> None:
        rows = await self._store.denied()
        self._deny = DenyList(tuple(Denied(DenyKind(row.kind), row.value, row.reason) for row in rows))

    # Events, and nodes that are to be forgotten

    async def forget(self, node: str, by: str) -> bool:
        """Forget a node; whether there was one."""
        there = await self._store.forget_node(node, self._event("evicted", node, by, "forgotten"))
        self._held.pop(node, None)
        self._issued.pop(node, None)
        return there

    async def events(self, limit: int) -> tuple[Event, ...]:
        """The newest events."""
        return await self._store.events(limit)

    def _event(self, kind: str, node: str, by: str, detail: str) -> Event:
        return Event(self._clock(), kind, node, by[:100], detail[:500])


def normal(kind: str, value: str) -> str:
    """A value of the deny list as it is compared. Raises :class:`OperatorError` when it can be no such thing."""
    if kind not in set(DenyKind):
        raise OperatorError(repr(kind[:20]), "cannot be denied", "node, serial or key")
    if kind == DenyKind.NODE:
        if not identity.is_id(value):
            raise OperatorError(f"node id {value[:70]!r}", "is none", "letters, digits, dots, dashes and underscores")
        return value
    text = value.lower().removeprefix("sha256:").removeprefix("0x").replace(":", "")
    if kind == DenyKind.KEY:
        if not re.fullmatch("[0-9a-f]{64}", text):
            raise OperatorError(f"key {value[:70]!r}", "is no SHA-256 of a public key", "64 hexadecimal digits")
        return text
    if not re.fullmatch("[0-9a-f]{1,40}", text):
        raise OperatorError(f"serial {value[:70]!r}", "is no serial number", "up to 40 hexadecimal digits")
    return text.lstrip("0") or "0"


def _no_request(wrong: LlmgwError) -> Refused:
    return Refused("request", "a request that can be granted", f"{wrong.thing} {wrong.reason}", "none", wrong.remedy)
