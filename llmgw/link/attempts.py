"""How often one address may get it wrong before it is not listened to for a while. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque

MOST = 10
WINDOW_S = 60.0
_ADDRESSES = 4096


class Attempts:
    """Failed attempts by address: ``most`` in ``window_s`` seconds and no more. Holds a bounded number of addresses.

    Guessing 256 random bits is hopeless anyway; this keeps whoever tries from filling store and log.
    """

    def __init__(self, most: int = MOST, window_s: float = WINDOW_S) -> None:
        self._most = most
        self._window_s = window_s
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()

    def failed(self, address: str, now: float) -> None:
        """One more."""
        times = self._failed.setdefault(address, deque(maxlen=self._most))
        times.append(now)
        self._failed.move_to_end(address)
        while len(self._failed) > _ADDRESSES:
            self._failed.popitem(last=False)

    def wait_s(self, address: str, now: float) -> float:
        """How long this address has to wait, 0 when it may try."""
        times = self._failed.get(address)
        if times is None or len(times) < self._most:
            return 0.0
        return max(0.0, times[0] + self._window_s - now)


def host_of(remote: str) -> str:
    """The host of ``host:port``: who connects again comes from another port."""
    return remote.rpartition(":")[0]
