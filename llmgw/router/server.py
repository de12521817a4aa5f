"""The listener of one router worker: accepts clients, sweeps deadlines, drains."""

from __future__ import annotations

import errno
import math
import random
import resource
import secrets
import socket
import ssl
from collections.abc import Callable, Iterable

import trio

from llmgw.errors import OperatorError
from llmgw.router.balance import PAUSE_S, Balance
from llmgw.router.connection import Connection
from llmgw.router.counts import Counts
from llmgw.router.front import Front
from llmgw.router.gate import Gate
from llmgw.router.metrics import RouterMetrics
from llmgw.router.pool import Directory
from llmgw.router.shared import Shared
from llmgw.router.sockets import UNSENT_BYTES, Peer, Ticker, Watch
from llmgw.router.steps import Steps
from llmgw.router.table import Table
from llmgw.router.tls import HANDSHAKE_S, Identity, TlsPeer
from llmgw.settings.daemon import Address
from llmgw.settings.document import Auth
from llmgw.settings.keys import ApiKey
from llmgw.telemetry.logging import logger

_BACKLOG = 4096
_SWEEP_S = 0.25
_ACCEPTS_A_TURN = 64
_ACCEPTS_AMONG_OTHERS = 4
_LAST_REQUEST_S = 5.0
"""How long an idle connection to a worker that was replaced may take to send the request that ends it well."""

_SAY_EVERY_S = 60.0
_READERS = 2
_OTHER_FILES = 64
_FILES_A_CLIENT = 2
"""A client's socket and its engine's: clients that there is no room for wait in the kernel's queue, where they cost
nothing, instead of being accepted and then failing."""

_log = logger("router")


def listen(address: Address) -> socket.socket:
    """Open the listening socket. Raises :class:`OperatorError` naming the address when it cannot be had."""
    opened = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Whoever is accepted has this from its listener (tcp(7)): no more of an answer waits in the kernel to be sent.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        opened.bind((address.host, address.port))
        opened.listen(_BACKLOG)
        opened.setblocking(False)
    except OSError as failed:
        opened.close()
        raise OperatorError(
            f"router.listen {address}",
            f"cannot listen there: {failed.strerror}",
            "stop whatever listens on this address, or choose another one in server.yaml",
        ) from failed
    return opened


def _most_clients() -> int:
    return max(1, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES) // _FILES_A_CLIENT)


class RouterServer:
    """One worker's data plane. Everything in it ends when :meth:`run` is cancelled or has drained.

    ``alone`` is whether nobody else accepts from the same listening socket.
    """

    def __init__(
        self,
        clock: Callable[[], float] = trio.current_time,
        counts: Counts | None = None,
        chance: random.Random | None = None,
        *,
        identity: Identity | None = None,
        alone: bool = True,
    ) -> None:
        self.directory = Directory(chance)
        self.metrics = RouterMetrics(self.directory.in_flight, lambda: self.directory.waiting)
        self.gate = Gate(counts=counts)
        self.metrics.add(self.gate)
        self.front = Front(self.metrics.scrape)
        self._identity = identity
        self._accepts_a_turn = _ACCEPTS_A_TURN if alone else _ACCEPTS_AMONG_OTHERS
        self.balance: Balance | None = None
        self._clock = clock
        self._draining = trio.Event()
        self._drain_until = self._idle_until = 0.0
        self._replaced = False
        self._connections: dict[Connection, trio.CancelScope] = {}
        self._left = trio.Event()
        self._said = -math.inf
        self._name = secrets.token_hex(6).encode()
        self._count = 0

    def use(self, table: Table) -> None:
        """Take over a routing table; it holds from the next request on."""
        self.directory.use(table)
        self.gate.settings = table.settings

    def use_keys(self, base: int, upto: int, keys: Iterable[ApiKey], *, last: bool) -> None:
        """Take over keys, see :meth:`KeyTable.apply`; what is under way for one that was revoked is cut."""
        gone = self.gate.keys.apply(base, upto, keys, last=last)
        if gone:
            for connection in list(self._connections):
                holder = connection.holder
                if holder is not None and holder.key.id in gone:
                    connection.cut("its key was revoked")

    def ready(self) -> str:
        """Why this worker should get no traffic; empty when it should."""
        if self._draining.is_set() and not self._replaced:
            return "draining"
        if self.gate.settings is None:
            return "no routing table yet"
        if self.directory.table.settings.auth is Auth.KEYS and not self.gate.keys.complete:
            return "no API keys yet"
        return ""

    @property
    def draining(self) -> bool:
        """Whether it takes no new connection any more."""
        return self._draining.is_set()

    def drain(self, seconds: float, *, replaced: bool = False) -> None:
        """Take no new connection, let requests under way end for so long, then end.

        Where it is ``replaced`` the address goes on being served, so that nobody must fail: a connection that is idle
        is told with its next answer.
        """
        if not self._draining.is_set():
            self._drain_until = self._clock() + seconds
            self._idle_until = self._clock() + (min(seconds, _LAST_REQUEST_S) if replaced else 0.0)
            self._replaced = replaced
            self._draining.set()
            if self.balance is not None:
                self.balance.leave()

    async def run(
        self, listener: socket.socket, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled or drained; the listener is closed."""
        watch = Watch()
        self._count_clients()
        ticker = Ticker(self._clock())
        shared = Shared(
            self.directory, self.metrics, self.gate, self._clock, ticker, self._request_id, self.ready,
            self._draining.is_set, self.front, watch, trio.CapacityLimiter(_READERS),
        )  # fmt: skip
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch.run)
                nursery.start_soon(self._sweep, ticker, nursery)
                if self._identity is not None:
                    nursery.start_soon(self._identity.follow)
                async with trio.open_nursery() as clients:
                    async with trio.open_nursery() as accepting:
                        accepting.start_soon(self._accept, listener, clients, watch, shared)
                        task_status.started()
                        await self._draining.wait()
                        accepting.cancel_scope.cancel(reason="draining")
                    listener.close()
                    await self._drained()
                    clients.cancel_scope.cancel(reason="drained")
                nursery.cancel_scope.cancel(reason="drained")
        finally:
            listener.close()
            self.directory.close()
            watch.close()
            if self.front.teller is not None:
                self.front.teller.flush()

    async def _drained(self) -> None:
        """Wait for the requests under way, as long as they may take; idle connections end when their time is over."""
        while self._connections and (now := self._clock()) < self._drain_until:
            if now >= self._idle_until:
                for connection, scope in self._connections.items():
                    # One whose next request has arrived meanwhile is not idle, it just has not noticed.
                    if connection.idle and not connection.asked_already():
                        scope.cancel(reason="draining")
            self._left = trio.Event()
            with trio.move_on_after(min(_SWEEP_S, self._drain_until - now)):
                await self._left.wait()
        if self._connections:
            _log.warning("drain time is over, requests are cut", requests=len(self._connections))

    async def _accept(
        self,
        listener: socket.socket,
        clients: trio.Nursery,
        watch: Watch,
        shared: Shared,
    ) -> None:
        while True:
            while len(self._connections) >= (most := _most_clients()):
                if self._to_be_said():
                    _log.warning("as many clients as open files allow; others wait", connections=most)
                self._left = trio.Event()
                await self._left.wait()
            await trio.lowlevel.wait_readable(listener)
            if self.balance is not None and self.balance.ahead(len(self._connections)):
                await trio.sleep(PAUSE_S)
            for _ in range(min(self._accepts_a_turn, _most_clients() - len(self._connections))):
                try:
                    accepted, _address = listener.accept()
                except BlockingIOError:
                    break
                except OSError as failed:
                    if failed.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        # Clients wait in the backlog until something is free again; spinning would help nobody.
                        if self._to_be_said():
                            _log.error("cannot accept", error=failed.strerror, connections=len(self._connections))
                        await trio.sleep(0.1)
                        break
                    continue  # that client left before it was accepted
                try:
                    peer = Peer(accepted) if self._identity is None else self._identity.peer(accepted)
                except OSError:
                    accepted.close()  # it has left again
                    continue
                scope = trio.CancelScope()
                connection = Connection(peer, shared, scope)
                self._connections[connection] = scope
                self._count_clients()
                clients.start_soon(self._client, connection, peer, scope, watch)

    def _to_be_said(self) -> bool:
        """Whether it is to be said that clients wait: not again for each one."""
        now = self._clock()
        if now - self._said < _SAY_EVERY_S:
            return False
        self._said = now
        return True

    async def _client(self, connection: Connection, peer: Peer, scope: trio.CancelScope, watch: Watch) -> None:
        with scope:
            try:
                watch.watch(peer, connection.leave)
                if isinstance(peer, TlsPeer):
                    connection.deadline = self._clock() + HANDSHAKE_S
                    await peer.handshake()
                connection.steps = Steps(connection.serve())
                if not isinstance(peer, TlsPeer):
                    peer.steps = connection.steps
                await connection.steps.run()
            except OSError as failed:
                if isinstance(failed, ssl.SSLError):
                    _log.debug("TLS failed", reason=failed.reason or str(failed), client=peer.address)
            except Exception:  # noqa: BLE001
                # One client's request must not end the others': it is written down, and this connection ends.
                _log.exception("request failed", request_id=connection.request_id.decode())
            finally:
                if connection.gone and connection.exchange is not None:
                    self.metrics.client_gone(connection.exchange.model)
                # What refers back would stay until the collector comes.
                connection.exchange = connection.steps = peer.steps = None
                peer.close()
                del self._connections[connection]
                self._count_clients()
                self._left.set()

    def _count_clients(self) -> None:
        if self.balance is not None and not self._draining.is_set():
            self.balance.have(len(self._connections))

    def _request_id(self) -> bytes:
        """An id that nobody else gives: this process's name and a number."""
        self._count += 1
        return b"req-%b-%x" % (self._name, self._count)

    async def _sweep(self, ticker: Ticker, probes: trio.Nursery) -> None:
        """One look at every deadline a few times a second, instead of a time-out for every operation."""
        while True:
            await trio.sleep(_SWEEP_S)
            now = ticker.now = self._clock()
            # Deadlines are counted from the sweep before they were made, so that much more has to be over.
            for connection in list(self._connections):
                connection.sweep(now - _SWEEP_S)
            for engine in self.directory.sweep(now):
                probes.start_soon(engine.probe, self._clock)
            if self.front.teller is not None:
                self.front.teller.flush()
