"""Forgetting a node: it is not waited for any more, and the router sends nothing to what runs there."""

from __future__ import annotations

from llmgw.errors import ConflictError, UnknownError
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster
from llmgw.server.identities import Identities


async def forget(node: str, by: str, cluster: Cluster, agents: Agents, identities: Identities) -> None:
    """Forget a node that is not connected. It is no ban: with a valid certificate it registers anew.

    Raises :class:`OperatorError`.
    """
    if agents.connected(node):
        raise ConflictError(
            f"node {node}",
            "is connected, and would register again at once",
            f"stop its agent, or keep it out first: llmgw ctl deny node {node} --reason …",
        )
    known = cluster.row(node) is not None
    if not await identities.forget(node, by) and not known:
        raise UnknownError(f"node {node}", "is not known", "see: llmgw ctl nodes")
    if not agents.connected(node):  # it may have come back while the store was busy
        cluster.forget(node)
