"""What one link may hold, and how long one end waits for the other. Pure."""

from __future__ import annotations

from math import inf

from attrs import frozen

from llmgw.link.codec import MESSAGE_BYTES

_LATE_S = 1.0


@frozen
class LinkLimits:
    """What one link may hold and how long it may take. Times are in seconds.

    Received bytes that nobody took never exceed ``window_bytes`` plus one message, bytes waiting to be sent
    never exceed ``unsent_bytes`` plus one message. ``open_s`` bounds the wait for the peer's first frames and, on
    the control plane, for the first message after them; ``answer_s`` the agent's wait for the answer to its
    first message. After ``ping_s`` of silence a PING is sent, after ``silence_s`` the peer counts as gone.
    ``send_s`` is how long one message may wait for room, ``message_s`` how long one may be on its way.
    """

    message_bytes: int = MESSAGE_BYTES
    window_bytes: int = 256 * 1024
    unsent_bytes: int = 256 * 1024
    control_bytes: int = 64 * 1024
    header_bytes: int = 8 * 1024
    open_s: float = 5.0
    answer_s: float = 15.0
    ping_s: float = 6.0
    silence_s: float = 15.0
    send_s: float = 30.0
    message_s: float = 60.0


DEFAULT_LIMITS = LinkLimits()


@frozen
class Ping:
    """It has been silent for a while: ask whether it is there."""


@frozen
class TooLate:
    """The link is over. ``excessive`` is whether the other end took more time than it has, and is not just gone."""

    reason: str
    excessive: bool


class Patience:
    """How long one end goes on waiting. ``now`` is any clock that only goes forward, in seconds.

    One thing at most is due at a time (:meth:`expect`); beside it the other end must be heard, and a message that has
    begun must become whole.
    """

    def __init__(self, now: float, limits: LinkLimits) -> None:
        self._limits = limits
        self._heard = now
        self._pinged = now
        self._unfinished_since: float | None = None
        self._due: tuple[float, str] | None = None
        self.expect(now, limits.open_s, "no HTTP/2 connection was set up")

    def expect(self, now: float, within_s: float, missing: str) -> None:
        """The next thing that is due, in place of the one before; ``missing`` says what it is called if it fails."""
        self._due = (now + within_s, f"{missing} within {within_s:g} s")

    def came(self) -> None:
        """What was due is there."""
        self._due = None

    @property
    def expects(self) -> bool:
        """Whether something is due."""
        return self._due is not None

    def heard(self, now: float) -> None:
        """The other end said something, whatever it was."""
        self._heard = now

    def pinged(self, now: float) -> None:
        """It was asked whether it is there."""
        self._pinged = now

    def message(self, now: float, *, begun: bool) -> None:
        """Whether a message has begun that is not whole."""
        if not begun:
            self._unfinished_since = None
        elif self._unfinished_since is None:
            self._unfinished_since = now

    def until(self) -> float:
        """When :meth:`tick` is wanted next."""
        ping = max(self._heard, self._pinged) + self._limits.ping_s
        unfinished = inf if self._unfinished_since is None else self._unfinished_since + self._limits.message_s
        return min(ping, self._heard + self._limits.silence_s, unfinished, self._due[0] if self._due else inf)

    def tick(self, now: float) -> Ping | TooLate | None:
        """What the time that has passed asks for."""
        late = now - self.until()
        if late < 0:
            return None
        if late > _LATE_S:
            # This process stood still, and what the peer said meanwhile is unread: silence is counted anew.
            self._heard = now
            if self._due:
                self._due = (self._due[0] + late + _LATE_S, self._due[1])
            if self._unfinished_since is not None:
                self._unfinished_since = now
            return None
        if self._due and now >= self._due[0]:
            return TooLate(self._due[1], excessive=True)
        if now >= self._heard + self._limits.silence_s:
            return TooLate(f"nothing was heard for {self._limits.silence_s:g} s", excessive=False)
        if self._unfinished_since is not None and now >= self._unfinished_since + self._limits.message_s:
            return TooLate(f"a message was not whole within {self._limits.message_s:g} s", excessive=True)
        return Ping()
