"""What the admin API may do with identities, as :class:`llmgw.web.identity.Identities`."""

from __future__ import annotations

from collections.abc import Callable

from llmgw.link.authority import fingerprint
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster
from llmgw.server.eviction import forget
from llmgw.server.identities import Identities
from llmgw.server.roots import Needs, lacking, needing
from llmgw.server.tokens import state
from llmgw.store.identity import DenyRow, Event, HeldRow, TokenRow
from llmgw.web.identity import CaView, NodeNeed, ca_view


class IdentityAdmin:
    """Identities, and the cluster that they are nodes of."""

    def __init__(self, identities: Identities, cluster: Cluster, agents: Agents, clock: Callable[[], float]) -> None:
        self._identities = identities
        self._cluster = cluster
        self._agents = agents
        self._clock = clock
        self.create_token = identities.enrolment.create_token
        self.revoke_token = identities.enrolment.revoke_token
        self.deny = identities.deny
        self.lift = identities.lift

    async def tokens(self) -> tuple[tuple[TokenRow, str], ...]:
        """Every token with its state."""
        now = self._clock()
        return tuple((row, state(row, now)) for row in await self._identities.enrolment.tokens())

    async def denied(self) -> tuple[DenyRow, ...]:
        """The deny list."""
        return await self._identities.denied()

    async def forget(self, node: str, by: str) -> None:
        """Forget a node."""
        await forget(node, by, self._cluster, self._agents, self._identities)

    async def events(self, limit: int) -> tuple[Event, ...]:
        """The newest events."""
        return await self._identities.events(limit)

    def cas(self) -> tuple[CaView, ...]:
        """Every CA that is trusted, and which nodes stand in the way of using or retiring it."""
        identities, now = self._identities, self._clock()
        nodes, grace_s = identities.standings(), identities.grace_s
        made = []
        for ca in identities.cas:
            sha256 = fingerprint(ca)
            made.append(
                ca_view(
                    ca,
                    sha256,
                    issuing=sha256 == identities.issuing_root,
                    ours=sha256 == identities.anchor,
                    lacking=_shown(lacking(sha256, nodes, now, grace_s)),
                    needing=_shown(needing(sha256, nodes, now, grace_s)),
                )
            )
        return tuple(made)

    def held(self) -> tuple[HeldRow, ...]:
        """What every node uses."""
        return self._identities.held()


def _shown(needs: tuple[Needs, ...]) -> tuple[NodeNeed, ...]:
    return tuple(NodeNeed(need.node, need.reason) for need in needs)
