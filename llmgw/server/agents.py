"""The service that agents talk to: one session a node, from its registration to its end, and what it is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import trio

from llmgw import __version__
from llmgw.errors import PeerError
from llmgw.link.attempts import host_of
from llmgw.link.codec import UnsendableError
from llmgw.link.messages import (
    PROTOCOL,
    Command,
    LookForWeights,
    Refused,
    Register,
    SettingsChanged,
    TrustBundle,
    Welcome,
)
from llmgw.link.repeats import Repeats, gist
from llmgw.link.session import Session
from llmgw.server.admission import Presence, Sessions, admit, started_again
from llmgw.server.cluster import Cluster
from llmgw.server.doctors import Doctors
from llmgw.server.identities import Identities
from llmgw.server.jobs import Jobs
from llmgw.server.logs import LogReader
from llmgw.server.node_session import NodeSession
from llmgw.server.reports import Reports
from llmgw.store.api import Store
from llmgw.telemetry.logging import logger

_REFUSING_S = 0.4
_PAST_S = 0.01
_LONGEST_LOOK_S = 3600.0
"""Clocks are set: when a certificate ends is worked out anew now and then."""

_SETTINGS_S = 1.0
"""A node is told of its settings at most this often: what changes in between is one change."""

_ANSWER_S = 2.0
"""A machine that was started again is let in when its old session leaves a PING unanswered for so long."""


class Agents:
    """Sessions by node. Commands are level-triggered: what a session did not carry is sent by a later pass."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        clock: Callable[[], float],
        jobs: Jobs | None = None,
        identities: Identities | None = None,
        doctors: Doctors | None = None,
    ) -> None:
        self._jobs = jobs
        self._identities = identities
        self._cluster = cluster
        self._clock = clock
        self._reports = Reports(cluster, store, clock, jobs, identities, doctors)
        self._sessions: dict[str, NodeSession] = {}
        self._begun = Sessions()
        self._repeats = Repeats()
        self._log = logger("agents")

    def dispatch(self, node: str, commands: Iterable[Command]) -> None:
        """Queue what this node's session was not yet sent; without a session nothing happens."""
        known = self._sessions.get(node)
        if known is None:
            return
        now = self._clock()
        for command in commands:
            known.command(command, now)

    def ask_for_weights(self) -> None:
        """Tell nodes which weights the catalog names, where that is news to them."""
        now = self._clock()
        for node, mine in self._sessions.items():
            if (names := self._cluster.ask_for_weights(node, now)) is not None:
                mine.put(LookForWeights(names))

    def tell_settings(self) -> float:
        """Tell nodes of their settings, where they are others than they were told.

        Returns in how many seconds that is to be done again for one that was told a moment ago; infinity for none.
        """
        now, again_s = trio.current_time(), math.inf
        for node, mine in self._sessions.items():
            wanted = self._cluster.node_settings(node)
            if mine.told is None or mine.told.digest == wanted.digest or mine.full:
                continue
            if (wait_s := mine.told_at + _SETTINGS_S - now) > 0:
                again_s = min(again_s, wait_s)
                continue
            mine.put(SettingsChanged(wanted))
            mine.told, mine.told_at = wanted, now
        return again_s

    def look_again(self) -> None:
        """Who may be a node, or what nodes are to trust, has changed: every session is checked and told."""
        for mine in self._sessions.values():
            mine.look.set()

    def read_log(
        self, node: str, shard: str, generation: int, lines: int, *, follow: bool, previous: bool
    ) -> LogReader | None:
        """Read a log on a node; ``None`` without a session."""
        mine = self._sessions.get(node)
        return None if mine is None else mine.readers.open(shard, generation, lines, follow=follow, previous=previous)

    def connected(self, node: str) -> bool:
        """Whether this node has a session."""
        return node in self._sessions

    async def serve(self, session: Session, register: Register) -> None:
        """One node's session, from its registration to its end. Cancelling it ends the session."""
        node = register.node
        presence = Presence(session.remote, register.boot_id, register.installation, self._clock())
        dead = await self._dead(node, presence)
        older = self._sessions.get(node)
        there = None if older is None or older is dead else older.presence
        if (refused := self._turned_away(node, there, presence, session)) is not None:
            if self._identities is not None:
                self._identities.turned_away(session.remote, node, refused)
            await session.refuse(refused)
            return
        self._begun.began(node, trio.current_time())
        self._repeats.over(f"{node}@{host_of(session.remote)}")
        if older is not None:
            self._log.warning("session replaced", node=node, old=older.session.remote, new=session.remote)
            if self._identities is not None:
                self._identities.taken_over(node, older.session.remote, session.remote)
            older.replaced.cancel(reason=f"node {node} connected again from {session.remote}")
        reason = "closed by the agent"
        with trio.CancelScope() as replaced:
            mine = NodeSession(node, session, presence, replaced, session.chain)
            self._sessions[node] = mine
            try:
                await self._reports.remember(self._cluster.register(register, self._clock()))
                self._log.info(
                    "node registered",
                    node=node,
                    remote=session.remote,
                    version=register.version,
                    devices=len(register.inventory.devices),
                    shards=len(register.shards),
                )
                told = mine.told = self._cluster.node_settings(node)
                mine.told_at = trio.current_time()
                await session.send(
                    Welcome(
                        protocol=PROTOCOL,
                        version=__version__,
                        cluster=self._cluster.id,
                        epoch=self._cluster.epoch,
                        heartbeat_s=self._cluster.settings.liveness.heartbeat_s,
                        settings=told,
                    )
                )
                if register.settings == 0 and told.text != "{}":
                    # It may be an agent that takes no notice of them there; asked for it, it says so.
                    mine.put(SettingsChanged(told))
                if self._jobs is not None:
                    self.dispatch(node, await self._jobs.registered(node, register.jobs))
                reason = await self._talk(node, mine)
            finally:
                mine.readers.ended(f"the link with {node} ended: {reason}")
                if self._sessions.get(node) is mine:
                    del self._sessions[node]
                    self._cluster.disconnected(node, reason)
                    self._log.info("session ended", node=node, reason=reason)

    async def _dead(self, node: str, new: Presence) -> NodeSession | None:
        """The node's open session, if it may be of the last boot of ``new`` and does not answer."""
        older = self._sessions.get(node)
        if older is None or not started_again(older.presence, new) or await older.session.answers(_ANSWER_S):
            return None
        self._log.warning("session dead", node=node, old=older.session.remote, unanswered_s=_ANSWER_S)
        return older

    def _turned_away(self, node: str, there: Presence | None, new: Presence, session: Session) -> Refused | None:
        """Why this agent must not have the node's session, said in the log once a change; ``None`` if it may."""
        now = trio.current_time()
        shown = str(session.chain[0]) if session.chain else "none"
        what = "a second agent of one node"
        refused = admit(node, there, new, shown)
        if refused is None and (wait_s := self._begun.wait_s(node, now)) > 0:
            what = "a node reconnects too often"
            refused = self._begun.refusal(node, wait_s, shown)
        if refused is None:
            return None
        if times := self._repeats.times(f"{node}@{host_of(session.remote)}", gist(refused), now):
            self._log.error(
                what, node=node, remote=session.remote, wanted=refused.wanted, found=refused.found, times=times
            )
        return refused

    async def _talk(self, node: str, mine: NodeSession) -> str:
        """Send and receive until the session ends or must end; returns why it did."""
        reason = ""
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                nonlocal reason
                reason = await self._reports.take_in(mine)
                nursery.cancel_scope.cancel(reason="session ended")

            nursery.start_soon(self._send, mine)
            nursery.start_soon(receive)
            if self._identities is not None and mine.chain:
                await self._identities.connected(node, mine.chain, mine.session.remote)
                refused = await self._until_refused(node, mine, self._identities)
                with trio.move_on_after(_REFUSING_S):
                    await mine.session.send(refused)
                reason = f"refused because of the {refused.claim}: {refused.found}"
                nursery.cancel_scope.cancel(reason=reason)
        return reason

    async def _until_refused(self, node: str, mine: NodeSession, identities: Identities) -> Refused:
        """Tell the node what to trust, now and when it changes, until it may not be this node any more."""
        told: TrustBundle | None = None
        while True:
            mine.look = trio.Event()
            if (refused := identities.check(node, mine.session.chain, mine.chain)) is not None:
                return refused
            if (bundle := identities.trust_bundle(node)) != told:
                told = bundle
                mine.put(bundle)
            ends = min(c.not_after for c in mine.chain)
            with trio.move_on_after(min(max(ends - self._clock(), 0.0) + _PAST_S, _LONGEST_LOOK_S)):
                await mine.look.wait()

    async def _send(self, mine: NodeSession) -> None:
        while True:
            await mine.ready.wait()
            mine.ready = trio.Event()
            queue, mine.queue = mine.queue, []
            for message in queue:
                try:
                    await mine.session.send(message)
                except PeerError:
                    return  # the reader sees the same end, and says why
                except UnsendableError as wrong:
                    self._log.error("a command cannot be sent", node=mine.session.peer, error=str(wrong))
