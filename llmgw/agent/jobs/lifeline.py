"""A child's tie to its agent: standard input, which ends when the agent is gone, however it went.

``PR_SET_PDEATHSIG`` would not do: it follows the thread that forked, and Trio forks from threads that come and go.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def hold() -> None:
    """End this process's whole group as soon as nobody holds the other end of standard input."""
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        continue
    os.killpg(os.getpgid(0), signal.SIGKILL)
