"""Which CA the nodes still need: what may be done next when one is to follow another. Pure.

Three steps, none of which ends a session: the new root is added to the bundle and every node says that it has it; then
certificates come from the new CA; when nobody needs the old root any more it is taken out.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from llmgw.link.identity import span


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


def lacking(root: str, nodes: Iterable[Standing], now: float, grace_s: float) -> tuple[Needs, ...]:
    """Who would not believe a control plane below ``root``: certificates must not come from it yet.

    A node whose certificate can no longer even be renewed has to join again, and gets the bundle with that.
    """
    made = []
    for node in _counted(nodes, now, grace_s):
        if node.cas is None:
            made.append(Needs(node.node, "has never said which CAs it trusts: its agent must connect, or be upgraded"))
        elif root not in node.cas:
            made.append(Needs(node.node, "does not have the new root yet: it gets it when it connects"))
    return tuple(made)


def needing(root: str, nodes: Iterable[Standing], now: float, grace_s: float) -> tuple[Needs, ...]:
    """Who would be cut off if ``root`` were trusted no more: a root still in use cannot be retired."""
    made = []
    for node in _counted(nodes, now, grace_s):
        if node.root == root:
            left = f"ends in {span(node.not_after - now)}" if node.not_after > now else "may still be renewed"
            made.append(Needs(node.node, f"its certificate is from it ({left}); it renews when it is connected"))
        elif node.cas is not None and set(node.cas) <= {root}:
            made.append(Needs(node.node, "trusts no other CA yet: it gets the others when it connects"))
    return tuple(made)


def _counted(nodes: Iterable[Standing], now: float, grace_s: float) -> Iterable[Standing]:
    return (node for node in nodes if node.not_after + grace_s > now)
