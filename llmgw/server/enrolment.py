"""How a node gets its certificates: the first one for a token, the next ones for the one before.

What a token is worth is decided in :mod:`~llmgw.server.tokens`, and who may be a node at all in
:mod:`llmgw.link.identity`; here both meet the store and the CA. Whatever is done or refused is an event in the store.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from llmgw.errors import ConflictError, LlmgwError, UnknownError
from llmgw.link import identity, tokens
from llmgw.link.authority import Issuer, fingerprint, requested_key
from llmgw.link.identity import Certificate, Rules
from llmgw.link.messages import CertificateIssued, Join, Joined, Refused, RenewalRefused, RenewCertificate
from llmgw.link.renewal import RENEWAL
from llmgw.link.trust import Trust
from llmgw.server.tokens import check_new, refusal
from llmgw.settings.daemon import Issuing, LinkListener
from llmgw.store.identity import Event, HeldRow, IdentityStore, IssuedRow, TokenRow
from llmgw.telemetry.logging import logger

_BETWEEN_S = 5.0
"""A node gets a certificate at most this often over the link, and so each is an event that can be found again."""

_NONE = -1
"""The serial number of a certificate that is not issued yet: no entry of the deny list has it."""

_JUST_NOW, _LATER = "it was renewed a moment ago", f"ask again in {_BETWEEN_S:g} s"


@frozen
class Granted:
    """A certificate that was issued, and what it says: leaf, issuing CA and root."""

    message: CertificateIssued
    chain: tuple[Certificate, ...]


class Enrolment:
    """Call :meth:`load` first. The functions are asked anew each time: whom to trust, what nodes hold, who is there."""

    def __init__(
        self,
        listener: LinkListener,
        trust: Callable[[], Trust],
        rules: Callable[[], Rules],
        store: IdentityStore,
        clock: Callable[[], float],
        held: Callable[[str], HeldRow | None],
        connected: Callable[[str], bool],
    ) -> None:
        self._held = held
        self._connected = connected
        self._listener = listener
        self._trust = trust
        self._rules = rules
        self._store = store
        self._clock = clock
        self.issued: dict[str, IssuedRow] = {}
        self._issuing_to: set[str] = set()
        self._log = logger("enrolment")

    async def load(self) -> None:
        """Take up what is remembered."""
        self.issued = {row.node: row for row in await self._store.newest_issued()}

    async def create_token(self, node: str, ttl_s: float, by: str) -> tuple[str, TokenRow]:
        """A new token and its row; the text is nowhere else. Raises :class:`OperatorError`."""
        check_new(node, ttl_s)
        self._issuing()
        if (anchor := self._trust().anchor) is None:
            raise ConflictError(
                self._listener.tls.certificate,
                f"leads to no CA in {self._listener.tls.ca}, which nodes could know us by",
                "add that CA to the bundle",
            )
        self._check_welcome(node, "")
        token, now = tokens.new(fingerprint(anchor)), self._clock()
        row = TokenRow(token.id, node, token.digest, now, now + ttl_s, by)
        await self._store.add_token(row, self._event("token.create", node, by, f"token {token.id}, for {ttl_s:g} s"))
        return str(token), row

    async def tokens(self) -> tuple[TokenRow, ...]:
        """Every token, newest first."""
        return await self._store.tokens()

    async def revoke_token(self, token: str, by: str) -> None:
        """Raises :class:`OperatorError` when there is none that could still be used."""
        row = await self._store.token(token)
        event = self._event("token.revoke", "" if row is None else row.node, by, f"token {token}")
        if row is None or not await self._store.revoke_token(token, self._clock(), event):
            raise UnknownError(
                f"token {token[:20]}", "is not there, or is used or revoked already", "see: llmgw ctl token list"
            )

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
        if row.used and self._just_issued(row.node):
            return Refused("token", "no more of them", "one that was used a moment ago", "none", _LATER, _BETWEEN_S)
        used = self._event("token.use", row.node, remote, f"token {row.id}, key {sha256}")
        if not row.used and not await self._store.use_token(row.id, sha256, remote, now, used):
            # Somebody else was faster: what became of it tells who.
            row = await self._store.token(token.id)
            lost = refusal(row, token.digest, request.node, sha256, now)
            if lost is not None:
                return await self._not_joined("" if row is None else row.node, remote, lost)
            assert row is not None
        granted = await self._grant(row.node, request.request, remote, "node.join")
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
        if self._just_issued(node):
            return RenewalRefused(_JUST_NOW, _LATER)
        granted = await self._grant(node, request.request, remote, "renewed")
        if isinstance(granted, Refused):
            return RenewalRefused(f"{granted.claim}: {granted.found}", granted.remedy)
        return granted

    async def renew_expired(
        self, chain: tuple[Certificate, ...], node: str, request: RenewCertificate, remote: str
    ) -> CertificateIssued | Refused:
        """Renew for an agent whose certificate lets it do nothing else.

        Not while that node is connected, nor with a certificate that the node has put another one in the place of: an
        old key that was copied must not make itself young.
        """
        serial, known = f"{chain[0].serial:x}", self._held(node)
        if self._connected(node):
            found = "that it is connected, with another one"
        elif known is not None and known.serial != serial:
            found = f"that it showed serial {known.serial} at {identity.day(known.at)}"
        elif self._just_issued(node):
            return Refused(RENEWAL, "no more of them", _JUST_NOW, str(chain[0]), _LATER, _BETWEEN_S)
        else:
            granted = await self._grant(node, request.request, remote, "node.renew-expired")
            return granted if isinstance(granted, Refused) else granted.message
        copied = f"if this is no copy of yours: llmgw ctl deny serial {serial}"
        remedy = f"join again: llmgw ctl token create --node {node}; {copied}"
        return Refused("newest certificate", f"the certificate that node {node} had last", found, str(chain[0]), remedy)

    def _just_issued(self, node: str) -> bool:
        if node in self._issuing_to:
            return True
        newest = self.issued.get(node)
        return newest is not None and 0 <= self._clock() - newest.at < _BETWEEN_S

    async def _grant(self, node: str, request: str, remote: str, kind: str) -> Granted | Refused:
        now = self._clock()
        self._issuing_to.add(node)
        try:
            issuer, issuing = self._issuing()
            key = requested_key(request)
            sha256 = identity.key_sha256(key)
            self._check_welcome(node, sha256)
            leaf = issuer.node(node, key, issuing.node_hours * 3600, now)
            serial, root = f"{leaf.serial_number:x}", fingerprint(issuer.root)
            row = IssuedRow(serial, node, sha256, root, leaf.not_valid_after_utc.timestamp(), now)
            await self._store.issued(row, self._event(kind, node, remote, f"serial {serial}, key {sha256}"))
        except LlmgwError as wrong:
            return _no_request(wrong)
        finally:
            self._issuing_to.discard(node)
        self.issued[node] = row
        chain = tuple(identity.read(c) for c in (leaf, issuer.issuing.certificate, issuer.root))
        return Granted(CertificateIssued(issuer.chain(leaf).decode(), self._trust().bundle_pem), chain)

    def _check_welcome(self, node: str, key: str) -> None:
        """Raise :class:`ConflictError` when this node, or this key, would be refused with any certificate."""
        rules = self._rules()
        entry = rules.deny.find(node, (Certificate("", "", _NONE, 0, 0, key=key),))
        if entry is not None:
            remedy = f"if that is over: llmgw ctl deny lift {entry.kind} {entry.value}"
            raise ConflictError(f"{entry.kind} {entry.value}", f"is denied: {entry.reason}", remedy)
        if rules.nodes is not None and node not in rules.nodes:
            raise ConflictError(f"node {node}", "is not among link.nodes", "add it to link.nodes in server.yaml")

    def _issuing(self) -> tuple[Issuer, Issuing]:
        issuer, issuing = self._trust().issuer, self._listener.issuing
        if issuer is None or issuing is None:
            raise ConflictError(
                "server.yaml: link.issuing", "is not set: certificates are issued elsewhere",
                "set it to the folder of llmgw ca init, or have certificates issued as the first one was",
            )  # fmt: skip
        return issuer, issuing

    def _event(self, kind: str, node: str, by: str, detail: str) -> Event:
        return event(self._clock(), kind, node, by, detail)


def event(at: float, kind: str, node: str, by: str, detail: str) -> Event:
    """An event of a bounded size."""
    return Event(at, kind, node, by[:100], detail[:500])


def _no_request(wrong: LlmgwError) -> Refused:
    return Refused("request", "a request that can be granted", f"{wrong.thing} {wrong.reason}", "none", wrong.remedy)
