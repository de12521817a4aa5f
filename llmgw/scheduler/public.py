"""How a model is, for whoever asks for it: one phrase of its own state, in which nobody else's name can be. Pure."""

from __future__ import annotations

_STEP = 5
"""Percent of loading are told in steps: each change of the phrase is a new routing table."""

_PHRASES = {
    "off": "is switched off",
    "idle": "starts with the first request",
    "unplaced": "has no place at present",
    "lost": "is not reachable at present",
    "placed": "is starting",
    "starting": "is starting",
    "draining": "is stopping",
    "stopping": "is stopping",
    "stopped": "is starting again",
    "failed": "failed and is started again",
}


def public(state: str, ready: int, wanted: int, *, progress: float | None, updating: bool, failed: bool) -> str:
    """The phrase for a model in this state, to be put behind its name or ``it``.

    ``progress`` is how far its first replica has loaded, ``updating`` says that one is stopped for an edited profile,
    ``failed`` that the one it waits for has failed before. Nothing but these comes in, so that nothing else comes out.
    """
    if ready:
        return "is ready" if ready >= wanted else f"is ready with {ready} of {wanted} replicas"
    if state == "loading":
        if progress is None:
            return "is loading"
        return f"is loading ({int(min(max(progress, 0.0), 1.0) * 100) // _STEP * _STEP} %)"
    if updating and state in ("draining", "stopping", "stopped", "waiting", "unplaced"):
        return "is being updated"
    if state == "waiting" and failed:
        return _PHRASES["failed"]
    return _PHRASES.get(state, "waits to be placed")
