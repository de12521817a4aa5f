"""What the service manager is told, when it asked to be told."""

from __future__ import annotations

import os
import socket
import time

from llmgw.telemetry.logging import logger


def notify(state: str) -> None:
    """Tell systemd (sd_notify(3): one datagram, ``@`` stands for NUL)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
        try:
            told.connect("\0" + path[1:] if path.startswith("@") else path)
            told.send(state.encode())
        except OSError as failed:
            logger("agent").warning("systemd cannot be told", error=str(failed))


def reloading() -> None:
    """The configuration is being loaded anew; ``READY=1`` ends it."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
