"""A control plane's link with everything that identities need: real TLS, a store on disk, clocks that can be set."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from llmgw.agent.dispatch import Dispatch
from llmgw.agent.epoch import Epoch
from llmgw.agent.identity import NodeIdentity
from llmgw.agent.outbox import Outbox
from llmgw.agent.session import Link, LinkState
from llmgw.hardware.inventory import Host, Inventory
from llmgw.link import ca, joining, tokens
from llmgw.link.authority import new_key, request_for
from llmgw.link.client import Backoff, connect
from llmgw.link.messages import Joined
from llmgw.link.own import OwnFiles
from llmgw.link.server import serve
from llmgw.link.session import Session
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster, remembered
from llmgw.server.identities import Identities
from llmgw.settings.daemon import Address, AgentConfig, Issuing, LinkListener, TlsFiles
from llmgw.settings.document import Settings
from llmgw.store.opening import sqlite_store
from llmgw.store.sql import SqlStore
from tests.agent.links import KeptEpoch, NoShards

DOMAIN = "test.llmgw"


class Plane:
    """A control plane. ``ahead_s`` is how far its clock is ahead."""

    def __init__(self, folder: Path, store: SqlStore, listener: LinkListener, cluster: Cluster) -> None:
        self.folder = folder
        self.store = store
        self.ahead_s = 0.0
        self.cluster = cluster
        self.identities = Identities(
            listener,
            store.identities,
            self.clock,
            lambda: self.agents.look_again(),
            lambda node: self.agents.connected(node),
        )
        self.agents = Agents(cluster, store, self.clock, identities=self.identities)
        self.address = Address("localhost", 0)

    def clock(self) -> float:
        return time.time() + self.ahead_s

    async def token(self, node: str = "n1", ttl_s: float = 60.0) -> tokens.JoinToken:
        text, _ = await self.identities.enrolment.create_token(node, ttl_s, "test")
        return tokens.parse(text)

    async def join(self, node: str = "n1") -> TlsFiles:
        """A node that has joined: where its files are."""
        key = new_key()
        joined = await joining.ask(self.address, await self.token(node), request_for(key), node, time.time())
        return written(self.folder / f"joined-{node}-{random.getrandbits(40):x}", joined, key)

    def issue(self, node: str = "n1", *, days: float = 1, now: float | None = None) -> TlsFiles:
        """A certificate by hand."""
        out = self.folder / f"issued-{node}-{random.getrandbits(40):x}"
        made = ca.issue_node(self.folder / "ca", node, out, days, time.time() if now is None else now)
        return TlsFiles(made.certificate, made.key, str(self.folder / "server" / "ca.pem"))

    async def events(self) -> list[str]:
        return [event.kind for event in await self.identities.events(100)]


def written(folder: Path, joined: Joined, key: object) -> TlsFiles:
    from llmgw.link.authority import key_pem

    folder.mkdir(mode=0o700)
    (folder / "key.pem").write_bytes(key_pem(key))  # type: ignore[arg-type]
    (folder / "key.pem").chmod(0o600)
    (folder / "cert.pem").write_text(joined.certificate)
    (folder / "ca.pem").write_text(joined.bundle)
    return TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem"))


@asynccontextmanager
async def plane(
    folder: Path, *, issuing: bool = True, nodes: tuple[str, ...] | None = None, hours: float = 24.0,
    expired_days: float = 7.0,
) -> AsyncIterator[Plane]:  # fmt: skip
    now = time.time()
    if not (folder / "ca").exists():
        ca.init(folder / "ca", DOMAIN, now - 20 * 86400)
        ca.issue_server(folder / "ca", ("localhost", "127.0.0.1"), folder / "server", 30, now)
    tls = TlsFiles(*(str(folder / "server" / name) for name in ("cert.pem", "key.pem", "ca.pem")))
    about = Issuing(str(folder / "ca"), hours, expired_days) if issuing else None
    listener = LinkListener(tls, Address("127.0.0.1", 0), trust_domain=DOMAIN, issuing=about, nodes=nodes)
    async with sqlite_store(folder / "db") as store:
        cluster = await remembered(store, Settings(), now, lambda: None)
        made = Plane(folder, store, listener, cluster)
        await made.identities.load()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.identities.run)
            (there,) = await nursery.start(
                partial(serve, listener, made.agents.serve, gate=made.identities.gate(), wall=made.clock)
            )
            made.address = Address("localhost", there.port)
            yield made
            nursery.cancel_scope.cancel(reason="test over")


class Early(random.Random):
    """Draws that are always the smallest, so that nobody waits for jitter."""

    def random(self) -> float:
        return 0.0


class Node:
    """A node's agent as far as the link goes. ``ahead_s`` is how far its clock is ahead."""

    def __init__(self, plane: Plane, tls: TlsFiles, state_dir: Path, node: str = "n1", boot_id: str = "boot") -> None:
        self.plane = plane
        self.ahead_s = 0.0
        self.states: list[LinkState] = []
        self.sessions: list[Session] = []
        state_dir.mkdir(mode=0o700, exist_ok=True)
        self.own = OwnFiles(tls, state_dir)
        self.identity = NodeIdentity(node, DOMAIN, self.own, self.clock, Early(), look_s=0.05)
        config = AgentConfig(id=node, control_planes=(plane.address,), tls=tls, state_dir=str(state_dir))
        here = Inventory(Host("host", boot_id), "test")
        epoch = Epoch(KeptEpoch())
        self.link = Link(
            config, self._dial, tuple, Dispatch(NoShards(), epoch, lambda: here), lambda: here, epoch, Outbox(),
            Backoff(random.Random(1), 0.02, 0.1), self.clock, identity=self.identity, stands=self.states.append,
        )  # fmt: skip

    def clock(self) -> float:
        return time.time() + self.ahead_s

    def _dial(self, address: Address) -> AbstractAsyncContextManager[Session]:
        @asynccontextmanager
        async def dialled() -> AsyncIterator[Session]:
            async with connect(address, self.own.files(), DOMAIN, wall=self.clock) as session:
                self.sessions.append(session)
                yield session

        return dialled()


async def until(done: object, seconds: float = 30.0) -> None:
    with trio.fail_after(seconds):
        while not done():  # type: ignore[operator]
            await trio.sleep(0.01)
