"""Who may be a node, as the daemon keeps it: tokens, certificates, the deny list, and what each node trusts.

Decisions are pure functions beside this (:mod:`~llmgw.server.tokens`, :mod:`~llmgw.server.roots`,
:mod:`llmgw.link.identity`); here they meet the store and the CA. Whatever is done is an event in the store.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import trio
from attrs import evolve
from cryptography import x509

from llmgw.errors import OperatorError, UnknownError
from llmgw.link import identity
from llmgw.link.attempts import host_of
from llmgw.link.authority import fingerprint
from llmgw.link.identity import Certificate, Denied, DenyKind, DenyList, Rules
from llmgw.link.messages import (
    IdentityHeld,
    Refused,
    TrustBundle,
)
from llmgw.link.renewal import spread_s
from llmgw.link.repeats import Repeats, gist
from llmgw.link.server import Gate
from llmgw.link.trust import Trust, TrustFiles
from llmgw.server import ca_acts
from llmgw.server.enrolment import Enrolment, event
from llmgw.server.roots import Standing, possible
from llmgw.settings.bounds import reason_of
from llmgw.settings.daemon import LinkListener
from llmgw.store.identity import DenyRow, Event, HeldRow, IdentityStore
from llmgw.telemetry.logging import logger

_LOOK_S = 1.0
_TOLD = 1000
_SOON = 0.25
_AGAIN_S = 86400.0
_OFF = "no certificates are issued here: server.yaml has no link.issuing"


class Identities:
    """Call :meth:`load` first.

    ``changed`` is called when sessions have to be looked at again, ``connected`` says who has one.
    """

    def __init__(
        self,
        listener: LinkListener,
        store: IdentityStore,
        clock: Callable[[], float],
        changed: Callable[[], None],
        connected: Callable[[str], bool],
    ) -> None:
        self._listener = listener
        self._files = TrustFiles(listener)
        self._store = store
        self._clock = clock
        self._changed = changed
        self.enrolment = Enrolment(
            listener,
            lambda: self._files.now,
            lambda: self.rules,
            store,
            clock,
            lambda node: self._held.get(node),
            connected,
        )
        self._deny = DenyList()
        self._held: dict[str, HeldRow] = {}
        self._repeats = Repeats(again_s=math.inf)
        self._events: list[Event] = []
        self._noted: Trust | None = None
        self._said = ""
        self._warn_at = 0.0
        self._woken = trio.Event()
        self._log = logger("identity")

    async def load(self) -> None:
        """Take up what is remembered, and say what is off."""
        self._held = {row.node: row for row in await self._store.held()}
        await self.enrolment.load()
        await self._read_denied()
        if self._listener.issuing is None:
            self._log.info("joining and renewal are off", reason=_OFF)
        if self._files.now.anchor is None:
            self._log.warning("our own certificate leads to no CA in the bundle", ca=self._listener.tls.ca)

    async def reload(self) -> None:
        """Take up what the control plane that leads has written down. Raises :class:`OperatorError`."""
        self._held = {row.node: row for row in await self._store.held()}
        await self.enrolment.load()

    async def run(self) -> None:
        """Look at the files now and then, and at once when woken; write down who was turned away."""
        while True:
            try:
                if await trio.to_thread.run_sync(self._files.refresh):
                    await self._refreshed()
            except OperatorError as wrong:
                self._log.error("what was read before stays in use", error=str(wrong))
            try:
                await self._keep_up()
            except OperatorError as wrong:
                self._say(str(wrong))
            else:
                self._said = ""
            self._look_at_own()
            with trio.move_on_after(_LOOK_S):
                await self._woken.wait()
            self._woken = trio.Event()

    def wake(self) -> None:
        """Look at the files now."""
        self._woken.set()

    async def _refreshed(self) -> None:
        now = self._files.now
        self._log.info("certificates read again", serial=f"{now.own.serial:x}", cas=[c[:16] for c in now.fingerprints])
        self._changed()
        self._events.append(self._event("reload", "", "server", f"own certificate {now.own.serial:x}"))

    async def _keep_up(self) -> None:
        """Take up what another control plane has denied meanwhile, and write down who was turned away."""
        before = self._deny
        await self._read_denied()
        if self._deny != before:
            self._changed()
        await self._note_cas()
        while self._events:
            await self._store.add_event(self._events[0])
            del self._events[0]

    async def _note_cas(self) -> None:
        """Write down which CAs are others than the audit says: nobody tells us who changed the files."""
        now = self._files.now
        if now is self._noted:
            return
        issuing = "", ""
        if now.issuer is not None:
            below = now.issuer.issuing.certificate
            issuing = fingerprint(now.issuer.root), f"issuing CA {fingerprint(below)}, {identity.read(below)}"[:500]
        acts = ca_acts.changes(
            await self._store.ca_acts(), {fingerprint(c): str(identity.read(c))[:500] for c in now.bundle}, issuing,
            self._clock(), self._name,
        )  # fmt: skip
        for act in acts:
            await self._store.add_event(act)
        self._noted = now

    @property
    def _name(self) -> str:
        """This control plane, as its certificate calls it."""
        found = identity.identity(self.own, identity.server_uri(self._listener.trust_domain, ""))
        return f"server {found}" if found else "server"

    def _say(self, wrong: str) -> None:
        """Once a change: a disk that is full stays that for a while."""
        if wrong != self._said:
            self._said = wrong
            self._log.error("what is done with identities is not written down", error=wrong)

    def _look_at_own(self) -> None:
        own, now = self._files.now.own, self._clock()
        if own.not_after - now < _SOON * (own.not_after - own.not_before) and now >= self._warn_at:
            self._warn_at = now + _AGAIN_S
            self._log.error(
                "our own certificate ends soon: agents will not connect any more",
                ends=identity.day(own.not_after),
                remedy="issue it anew into the same files, or: llmgw ca issue --server NAME --out DIR",
            )

    # The gate

    def gate(self) -> Gate:
        """What the link's listener asks."""
        issuing = self._listener.issuing
        return Gate(
            trust=lambda: self._files.now,
            rules=lambda: self.rules,
            join=None if issuing is None else self.enrolment.join,
            renew=None if issuing is None else self.enrolment.renew_expired,
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
        if len(self._events) >= _TOLD:
            return
        who = f"{host_of(remote)} {refused.certificate}"  # the id is what it claims
        if self._repeats.times(who, (node, *gist(refused)), trio.current_time()):
            self._events.append(self._event("refused", node, remote, f"{refused.claim}: {refused.found}"))

    def taken_over(self, node: str, old: str, new: str) -> None:
        """An agent took over the session of its node; written down when it comes from another address."""
        if host_of(old) != host_of(new) and len(self._events) < _TOLD:
            self._events.append(self._event("taken-over", node, new, f"the session of {old}, by the same state folder"))

    # What nodes hold

    async def connected(self, node: str, chain: tuple[Certificate, ...], remote: str) -> None:
        """An agent was let in with this chain."""
        leaf, before = chain[0], self._held.get(node)
        serials = {row.serial for row in (before, self.enrolment.issued.get(node)) if row is not None}
        if f"{leaf.serial:x}" not in serials and len(self._events) < _TOLD:
            # Made with `llmgw ca issue` or a CA of their own; or by somebody who has the issuing key.
            text = f"serial {leaf.serial:x}, key {leaf.key}, which was not issued here"
            self._events.append(self._event("shown", node, remote, text))
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
        nodes = sorted(self._held.keys() | self.enrolment.issued.keys())
        return tuple(
            standing
            for node in nodes
            if self._deny.find(node, ()) is None
            for standing in possible(self._held.get(node), self.enrolment.issued.get(node))
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

    def kept_out(self, chain: Sequence[Certificate]) -> str | None:
        """Why a person's certificate is denied, by a serial number or key in its chain; nothing if it is not."""
        entry = self._deny.find("", chain)
        return None if entry is None else entry.reason

    async def deny(self, kind: DenyKind, value: str, reason: str, by: str) -> DenyRow:
        """Keep somebody out from now on; open sessions end. Raises :class:`OperatorError`."""
        row = DenyRow(kind, normal(kind, value), reason_of(reason), by, self._clock())
        if not row.reason:
            raise OperatorError("the reason", "is missing", "say why: whoever is refused is told")
        node = row.value if kind == DenyKind.NODE else ""
        await self._store.deny(row, self._event("node.deny", node, by, f"{kind} {row.value}: {row.reason}"))
        await self._read_denied()
        self._changed()
        return row

    async def lift(self, kind: DenyKind, value: str, by: str) -> None:
        """Let somebody in again. Raises :class:`OperatorError` when there is no such entry."""
        value = normal(kind, value)
        node = value if kind == DenyKind.NODE else ""
        if not await self._store.lift(kind, value, self._event("node.lift", node, by, f"{kind} {value}")):
            raise UnknownError(f"{kind} {value}", "is not denied", "see: llmgw ctl deny list")
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
        there = await self._store.forget_node(node, self._event("node.forget", node, by, "forgotten"))
        self._held.pop(node, None)
        self.enrolment.issued.pop(node, None)
        return there

    async def events(self, limit: int) -> tuple[Event, ...]:
        """The newest events."""
        return await self._store.events(limit)

    def _event(self, kind: str, node: str, by: str, detail: str) -> Event:
        return event(self._clock(), kind, node, by, detail)


def normal(kind: DenyKind, value: str) -> str:
    """A value of the deny list as it is compared. Raises :class:`OperatorError` when it can be no such thing."""
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
