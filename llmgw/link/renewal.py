"""When a certificate is renewed. Pure."""

from __future__ import annotations

RENEWAL = "renewal"
"""The claim of a refusal that is about renewing alone: the agent may still connect."""

_SHARE = 0.67
_SPREAD = 0.1


def renew_at(not_before: float, not_after: float, draw: float) -> float:
    """When to renew, in seconds since the epoch: after about 67 % of the life, 62 to 72 by ``draw`` from 0 to 1.

    Nodes that got their certificates together do not come for new ones together.
    """
    return not_before + (not_after - not_before) * (_SHARE + _SPREAD * (draw - 0.5))


def due_at(not_before: float, not_after: float, draw: float, wanted_by: tuple[float, float] | None) -> float:
    """As :func:`renew_at`, or somewhere within the time in which the control plane wants it: its begin and length."""
    usual = renew_at(not_before, not_after, draw)
    return usual if wanted_by is None else min(usual, wanted_by[0] + wanted_by[1] * draw)


def spread_s(nodes: int) -> float:
    """In how much time so many nodes are to renew when all of them have to: ten in a second, a minute at most."""
    return min(60.0, nodes / 10)


def retry_s(failures: int, draw: float) -> float:
    """How long to wait after so many failures in a row: half a minute doubling up to half an hour, jittered."""
    return min(1800.0, 30.0 * 2.0 ** min(failures, 10)) * (0.5 + 0.5 * draw)
