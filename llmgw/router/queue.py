"""Who of those that wait comes next: the tenants in turn, and each tenant's own in their order. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A bounded queue. One tenant with a thousand requests delays another's first one by one of its own only."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def room(self, tenant: str, most: int) -> bool:
        """Whether this tenant may wait where ``most`` may in all.

        A full queue has room for none. A tenant alone may have all but an eighth of it, which is kept for others: a
        queue full of one tenant's requests would turn everybody else away.
        """
        if self._count >= most:
            return False
        mine = len(self._tenants.get(tenant, ()))
        return mine < max(1, most - max(1, most // 8)) if most > 1 else True

    def put(self, tenant: str, item: T) -> None:
        """Wait behind the tenant's own."""
        self._tenants.setdefault(tenant, deque()).append(item)
        self._count += 1

    def take(self) -> T | None:
        """The next one of the tenant whose turn it is."""
        if not self._tenants:
            return None
        tenant, mine = next(iter(self._tenants.items()))
        item = mine.popleft()
        self._count -= 1
        if mine:
            self._tenants.move_to_end(tenant)
        else:
            del self._tenants[tenant]
        return item

    def drop(self, tenant: str, item: T) -> bool:
        """Wait no more. Whether it still did."""
        mine = self._tenants.get(tenant)
        if mine is None or item not in mine:
            return False
        mine.remove(item)
        self._count -= 1
        if not mine:
            del self._tenants[tenant]
        return True
