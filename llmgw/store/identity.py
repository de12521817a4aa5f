"""Who may be a node, as it is remembered: join tokens, issued certificates, what nodes hold, the deny list, events.

Secrets are not in it: of a token there is only the SHA-256 of its secret. Times are seconds since the epoch, 0 where
something has not happened. Every write is durable when it returns.
"""

from __future__ import annotations

from typing import Protocol

from attrs import frozen


@frozen
class TokenRow:
    """A join token: who it is for, and what became of it. ``used_key`` is SHA-256 of the key it was used with."""

    id: str
    node: str
    digest: str
    created: float
    expires: float
    by: str
    used: float = 0.0
    used_key: str = ""
    used_from: str = ""
    revoked: float = 0.0


@frozen
class IssuedRow:
    """A certificate that this control plane issued; ``root`` is SHA-256 of the root above its issuer."""

    serial: str
    node: str
    key: str
    root: str
    not_after: float
    at: float


@frozen
class HeldRow:
    """What a node uses: its certificate by serial, the root above it, and SHA-256 of the CAs that it trusts.

    ``cas`` is ``None`` from a node that has never said it.
    """

    node: str
    serial: str
    key: str
    root: str
    not_after: float
    cas: tuple[str, ...] | None
    at: float


@frozen
class DenyRow:
    """An entry of the deny list: ``kind`` is ``node``, ``serial`` or ``key``."""

    kind: str
    value: str
    reason: str
    by: str
    at: float


OUTSIDE = frozenset({"join-refused", "refused", "taken-over", "reload", "renewed", "shown"})
"""Kinds that whoever reaches the link can cause, or that happen by themselves: the newest of these are kept. All others
are acts of somebody who may do them, and go into the audit, where nothing is ever dropped."""


@frozen
class Event:
    """Something that was done with an identity. ``by`` is a person or an address, ``kind`` one word, or an action."""

    at: float
    kind: str
    node: str
    by: str
    detail: str


class IdentityStore(Protocol):
    """What of this must outlive the process."""

    async def add_token(self, row: TokenRow, event: Event) -> None:
        """Remember a new token."""
        ...

    async def tokens(self) -> tuple[TokenRow, ...]:
        """Every token that is remembered, newest first."""
        ...

    async def token(self, token: str) -> TokenRow | None:
        """The token with this id."""
        ...

    async def use_token(self, token: str, key: str, remote: str, now: float, event: Event) -> bool:
        """Mark a token used by this key, if nobody has used it, it is not revoked and not expired: one wins.

        Answers whether it was this call.
        """
        ...

    async def revoke_token(self, token: str, now: float, event: Event) -> bool:
        """Revoke a token that was not used; answers whether there was one."""
        ...

    async def issued(self, row: IssuedRow, event: Event) -> None:
        """Remember a certificate; those that expired long ago are dropped."""
        ...

    async def newest_issued(self) -> tuple[IssuedRow, ...]:
        """The certificate that was issued last for each node, by node."""
        ...

    async def held(self) -> tuple[HeldRow, ...]:
        """What every node uses, by node."""
        ...

    async def save_held(self, row: HeldRow) -> None:
        """Replace what is known of a node."""
        ...

    async def denied(self) -> tuple[DenyRow, ...]:
        """The deny list, oldest first."""
        ...

    async def deny(self, row: DenyRow, event: Event) -> None:
        """Add an entry, or replace the reason of one that is there."""
        ...

    async def lift(self, kind: str, value: str, event: Event) -> bool:
        """Remove an entry; answers whether there was one."""
        ...

    async def forget_node(self, node: str, event: Event) -> bool:
        """Remove a node's row, what it holds and what was issued for it; answers whether there was any."""
        ...

    async def add_event(self, event: Event) -> None:
        """Remember an event; the oldest of very many are dropped."""
        ...

    async def ca_acts(self) -> tuple[Event, ...]:
        """Every act in the audit that is about a CA (``ca.…``), oldest first; ``node`` is the CA's SHA-256."""
        ...

    async def events(self, limit: int) -> tuple[Event, ...]:
        """The newest events, newest first."""
        ...
