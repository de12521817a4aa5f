"""Whether an agent may have the session of its node: one a node, not ever anew, nobody pushed out by a copy. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from datetime import UTC, datetime

from attrs import frozen

from llmgw.link.messages import Refused

SESSIONS_AT_ONCE = 30
SESSION_EVERY_S = 2.0
_NODES = 8192


@frozen
class Presence:
    """An agent as it registered: from where, on which boot of which machine, and with which state folder.

    ``since`` is in seconds since the epoch; ``installation`` is empty where it was not said.
    """

    address: str
    boot_id: str
    installation: str
    since: float


def same_agent(one: Presence, other: Presence) -> bool:
    """Whether these are one agent, connected or started again: same boot of the same machine, same state folder.

    A state folder is held by one process at a time, so that the older one is gone.
    """
    told = one.installation and other.installation
    return one.boot_id == other.boot_id and (not told or one.installation == other.installation)


def started_again(there: Presence, new: Presence) -> bool:
    """Whether ``new`` may be the machine of ``there`` after it was started again: a new boot, the same state folder.

    Then the open session may be of a machine that died without a word, and is worth asking. A copy with a state folder
    of its own is not: it would get in whenever the network of the first is down for a moment.
    """
    told = there.installation and new.installation
    return there.boot_id != new.boot_id and (not told or there.installation == new.installation)


class Sessions:
    """How often a node's session may begin: ``at_once`` times, then once in ``every_s`` seconds.

    Only those that began count: who is turned away, a copy of the node too, takes nothing from it. Nothing is
    remembered over a restart. Holds a bounded number of nodes. ``now`` is a clock that only goes forward.
    """

    def __init__(self, at_once: int = SESSIONS_AT_ONCE, every_s: float = SESSION_EVERY_S) -> None:
        self._at_once = at_once
        self._every_s = every_s
        self._paid_until: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, node: str, now: float) -> float:
        """How long this node has to wait, 0 when it may begin a session."""
        free_at = self._paid_until.get(node, -math.inf) - (self._at_once - 1) * self._every_s
        return max(0.0, free_at - now)

    def began(self, node: str, now: float) -> None:
        """One more."""
        self._paid_until[node] = max(now, self._paid_until.get(node, now)) + self._every_s
        self._paid_until.move_to_end(node)
        while len(self._paid_until) > _NODES:
            self._paid_until.popitem(last=False)

    def refusal(self, node: str, wait_s: float, certificate: str) -> Refused:
        """What a node is told that has to wait."""
        most = f"at most {self._at_once} sessions of node {node} one after the other, then one in {self._every_s:g} s"
        remedy = (
            f"come back in {math.ceil(wait_s)} s; the agent waits by itself. Why its sessions end so soon is in "
            "its log and the control plane's: an agent that crashes and is started again, or a network that fails"
        )
        return Refused("reconnects", most, "more of them", certificate, remedy, wait_s)


def admit(node: str, there: Presence | None, new: Presence, certificate: str) -> Refused | None:
    """Whether ``new`` may have the node's session, in place of ``there`` if somebody has it; ``None`` means yes.

    ``there`` is an agent whose session is open: one that is dead loses it within the link's time for silence, and then
    the next try gets in. Until then a second machine with the same certificate is kept out, not let in by turns.
    """
    if there is None or same_agent(there, new):
        return None
    since = datetime.fromtimestamp(there.since, UTC).strftime("%Y-%m-%d %H:%M UTC")
    where = f"connected from {there.address} since {since} (boot id {there.boot_id or 'unknown'})"
    if there.boot_id == new.boot_id:
        where += f" with the state folder {there.installation[:12]}"
    return Refused(
        "one agent a node",
        f"that no other agent is node {node}",
        f"{where}; this one is on boot id {new.boot_id or 'unknown'}",
        certificate,
        "stop one of the two; a second machine needs an identity of its own (llmgw ctl token create --node OTHER), and "
        f"if the key was copied against your will: llmgw ctl deny node {node}",
    )
