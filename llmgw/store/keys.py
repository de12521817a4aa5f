"""What the store knows of keys and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from llmgw.settings.keys import ApiKey
from llmgw.settings.usage import UsageRow


@frozen
class KeyEvent:
    """What was done to a key, when, and by whom; ``at`` in epoch seconds."""

    at: float
    key: str
    action: str
    by: str
    detail: str


class KeyStore(Protocol):
    """What the store knows of keys and usage."""

    async def version(self) -> int:
        """The version of the table of keys: another one after every change."""
        ...

    async def keys(self) -> tuple[int, tuple[ApiKey, ...]]:
        """The version of the table of keys, and every key that ever was, by its last change."""
        ...

    async def add_key(self, key: ApiKey, event: KeyEvent) -> ApiKey:
        """Write a new key with its event; returns it with the slot and the version that it got."""
        ...

    async def change_key(self, key: ApiKey, event: KeyEvent) -> ApiKey:
        """Write a key whole, unless it changed since; returns it with its new version."""
        ...

    async def key_events(self, key: str, limit: int) -> tuple[KeyEvent, ...]:
        """The newest events of a key, newest first."""
        ...

    async def add_usage(self, ledger: str, batches: Sequence[tuple[int, tuple[UsageRow, ...]]], now: float) -> None:
        """Add batches of a worker's ledger, but for those up to the highest that was ever added."""
        ...

    async def usage(self, since: int, until: int, key: str | None = None) -> tuple[UsageRow, ...]:
        """The sums of these days, both included."""
        ...
