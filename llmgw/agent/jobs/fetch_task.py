"""What a fetch is told, what ends it before it is done, and the errors that it tells in words."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

from attrs import frozen

from llmgw.durable import regular


@frozen
class FetchTask:
    """What to fetch and how. Sizes in bytes, times in seconds.

    ``reserve`` is what must stay free on the cache's disk. A transfer that fails is tried ``tries`` times, with
    ``wait_s`` before the second, twice that before the third, and so on. ``chunk`` is how much is read at once.
    """

    repository: str
    revision: str
    cache: str
    file: str = ""
    endpoint: str = ""
    offline: bool = False
    update: bool = False
    token_file: str = ""
    reserve: int = 0
    workers: int = 4
    tries: int = 6
    wait_s: float = 2.0
    timeout_s: float = 30.0


class FetchError(Exception):
    """It cannot be fetched: why, what to do, and whether the same might work a little later."""

    def __init__(self, reason: str, remedy: str = "", *, again: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.again = again


def full(task: FetchTask, what: str) -> FetchError:
    """The disk of the cache has no room, as ``what`` says."""
    return FetchError(
        f"{what}: no room on the disk of {task.cache}",
        "free some space, or set weights.cache of agent.yaml to a larger disk",
    )


class Stop:
    """Whether a fetch shall end before it is done, and why: every thread of it asks."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._why: FetchError | None = None

    def set(self, why: FetchError | None = None) -> None:
        """Make every thread end at its next bytes, so that none leaves a part behind; the first reason counts."""
        self._why = self._why or why
        self._asked.set()

    def is_set(self) -> bool:
        """Whether it shall end."""
        return self._asked.is_set()

    def check(self) -> None:
        """Raise :class:`FetchError` with the reason if it shall end."""
        if self._asked.is_set():
            raise self.why()

    def wait(self, seconds: float) -> bool:
        """Wait so long at most; whether it shall end by then."""
        return self._asked.wait(seconds)

    def why(self, otherwise: FetchError | None = None) -> FetchError:
        """Why it ends."""
        return self._why or otherwise or FetchError("stopped")


def read_token(path: str) -> str | None:
    """The token in this file. Raises :class:`FetchError` when others may read it; never says what is in it."""
    if not path:
        return None
    try:
        with regular(Path(path)) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read().decode().strip()
    except (OSError, ValueError) as failed:
        reason = getattr(failed, "strerror", None) or type(failed).__name__
        raise FetchError(f"the token file {path} cannot be read: {reason}", "check weights.token_file") from None
    if mode & 0o077:
        raise FetchError(f"others may read the token file {path} (mode {mode:04o})", f"run: chmod 600 {path}")
    if not text:
        raise FetchError(f"the token file {path} is empty", "put a token of the hub into it")
    return text
