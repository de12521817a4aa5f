"""Socket options that the link wants and Trio does not set."""

from __future__ import annotations

import contextlib
import socket

import trio


def bound_unacknowledged(stream: trio.SocketStream, seconds: float) -> None:
    """Let the kernel give up on a peer that acknowledges nothing for this long (tcp(7), ``TCP_USER_TIMEOUT``).

    It covers what our own timers cannot: bytes that were handed to the kernel and wait for a peer whose window is
    shut. Trio has set ``TCP_NODELAY`` already.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):  # a socket that is no TCP socket, or is gone already
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def why_unreached(failed: OSError) -> str:
    """Why nobody took a connection, in words: Trio tries every address of a name and groups what each answered."""
    each = failed.__cause__.exceptions if isinstance(failed.__cause__, BaseExceptionGroup) else (failed,)
    return ", ".join(dict.fromkeys(e.strerror or str(e) for e in each if isinstance(e, OSError))).lower()
