"""Whether an agent may have the session of its node: one a node, and nobody is pushed out by a copy. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from attrs import frozen

from llmgw.link.messages import Refused


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
