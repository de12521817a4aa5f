"""Which CA the nodes still need: what may be done next when one is to follow another. Pure.

Three steps, none of which ends a session: the new root is added to the bundle and every node says that it has it; then
certificates come from the new CA; when nobody needs the old root any more it is taken out.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from llmgw.link.identity import span
from llmgw.store.identity import HeldRow, IssuedRow


@frozen
class Standing:
    """What a node uses: SHA-256 of the root above its certificate, when that ends, and the CAs that it trusts.

    ``cas`` is ``None`` from a node that has never said it.
    """

    node: str
    root: str
    not_after: float
    cas: tuple[str, ...] | None


@frozen
class Needs:
    """A node that stands in the way of a step, and why."""

    node: str
    reason: str


def possible(held: HeldRow | None, issued: IssuedRow | None) -> tuple[Standing, ...]:
    """What one node may be using: what it showed last, and what was issued for it since and may have arrived.

    A node that shows another certificate after one was issued has not got that one: its key was in memory only.
    """
    made = []
    if held is not None:
        made.append(Standing(held.node, held.root, held.not_after, held.cas))
    if issued is not None and (held is None or (issued.serial != held.serial and issued.at > held.at)):
        cas = None if held is None else held.cas
        made.append(Standing(issued.node, issued.root, issued.not_after, cas))
    return tuple(made)


def lacking(root: str, nodes: Iterable[Standing], now: float, grace_s: float) -> tuple[Needs, ...]:
    """Who would not believe a control plane below ``root``: certificates must not come from it yet.

    A node whose certificate can no longer even be renewed has to join again, and gets the bundle with that.
    """
    made: dict[str, Needs] = {}
    for node in _counted(nodes, now, grace_s):
        if node.cas is None:
            why = "has never said which CAs it trusts: its agent must connect, or be upgraded"
            made[node.node] = Needs(node.node, why)
        elif root not in node.cas:
            made[node.node] = Needs(node.node, "does not have the new root yet: it gets it when it connects")
    return tuple(made.values())


def needing(root: str, nodes: Iterable[Standing], now: float, grace_s: float) -> tuple[Needs, ...]:
    """Who would be cut off if ``root`` were trusted no more: a root still in use cannot be retired."""
    made: dict[str, Needs] = {}
    for node in _counted(nodes, now, grace_s):
        if node.root == root:
            left = f"ends in {span(node.not_after - now)}" if node.not_after > now else "may still be renewed"
            why = f"its certificate is from it ({left}); it renews when it is connected"
            made[node.node] = Needs(node.node, why)
        elif node.cas is not None and set(node.cas) <= {root}:
            made[node.node] = Needs(node.node, "trusts no other CA yet: it gets the others when it connects")
    return tuple(made.values())


def _counted(nodes: Iterable[Standing], now: float, grace_s: float) -> Iterable[Standing]:
    return (node for node in nodes if node.not_after + grace_s > now)
