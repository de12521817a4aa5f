"""The listener of one router worker: accepts clients, sweeps deadlines, drains."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable

import trio

from llmgw.errors import OperatorError
from llmgw.router.connection import Connection
from llmgw.router.counts import Counts
from llmgw.router.exchange import Shared
from llmgw.router.gate import Gate
from llmgw.router.metrics import RouterMetrics
from llmgw.router.pool import Directory
from llmgw.router.sockets import HangUps, Peer
from llmgw.router.table import Table
from llmgw.settings.daemon import Address
from llmgw.settings.document import Auth
from llmgw.settings.keys import ApiKey
from llmgw.telemetry.logging import logger

_BACKLOG = 4096
_SWEEP_S = 0.25
_ACCEPTS_A_TURN = 64

_log = logger("router")


def listen(address: Address) -> socket.socket:
    """Open the listening socket. Raises :class:`OperatorError` naming the address when it cannot be had."""
    opened = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


class RouterServer:
    """One worker's data plane. Everything in it ends when :meth:`run` is cancelled or has drained."""

    def __init__(self, clock: Callable[[], float] = trio.current_time, counts: Counts | None = None) -> None:
        self.directory = Directory()
        self.metrics = RouterMetrics(self.directory.in_flight)
        self.gate = Gate(lambda: self.directory.table.settings if self._has_table else None, counts)
        self.metrics.add(self.gate)
        self._clock = clock
        self._draining = trio.Event()
        self._drain_until: float | None = None
        self._connections: dict[Connection, trio.CancelScope] = {}
        self._empty = trio.Event()
        self._has_table = False

    def use(self, table: Table) -> None:
        """Take over a routing table; it holds from the next request on."""
        self.directory.use(table)
        self._has_table = True

    def use_keys(self, base: int, upto: int, keys: Iterable[ApiKey], *, last: bool) -> None:
        """Take over keys, see :meth:`KeyTable.apply`; what is under way for one that was revoked is cut."""
        gone = self.gate.keys.apply(base, upto, keys, last=last)
        if gone:
            for connection in list(self._connections):
                holder = connection.holder
                if connection.exchange is not None and holder is not None and holder.key.id in gone:
                    connection.leave()

    def ready(self) -> str:
        """Why this worker should get no traffic; empty when it should."""
        if self._draining.is_set():
            return "draining"
        if not self._has_table:
            return "no routing table yet"
        if self.directory.table.settings.auth is Auth.KEYS and not self.gate.keys.complete:
            return "no API keys yet"
        return ""

    def drain(self, seconds: float) -> None:
        """Take no new connection, let requests under way end for so long, then end."""
        if not self._draining.is_set():
            self._drain_until = self._clock() + seconds
            self._draining.set()

    async def run(
        self, listener: socket.socket, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled or drained; the listener is closed."""
        hang_ups = HangUps()
        shared = Shared(self.directory, self.metrics, self.gate, self._clock, self.ready, self._draining.is_set)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hang_ups.run)
                nursery.start_soon(self._sweep)
                async with trio.open_nursery() as clients:
                    async with trio.open_nursery() as accepting:
                        accepting.start_soon(self._accept, listener, clients, hang_ups, shared)
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
            hang_ups.close()

    async def _drained(self) -> None:
        """Wait for the requests under way, as long as they may take; idle connections end at once."""
        for connection, scope in list(self._connections.items()):
            if connection.idle:
                scope.cancel(reason="draining")
        assert self._drain_until is not None
        with trio.move_on_at(trio.current_time() + self._drain_until - self._clock()):
            while self._connections:
                self._empty = trio.Event()
                await self._empty.wait()
        if self._connections:
            _log.warning("drain time is over, requests are cut", requests=len(self._connections))

    async def _accept(
        self,
        listener: socket.socket,
        clients: trio.Nursery,
        hang_ups: HangUps,
        shared: Shared,
    ) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            for _ in range(_ACCEPTS_A_TURN):
                try:
                    accepted, _address = listener.accept()
                except BlockingIOError:
                    break
                except OSError as failed:
                    if failed.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        # Clients wait in the backlog until something is free again; spinning would help nobody.
                        _log.error("cannot accept", error=failed.strerror, connections=len(self._connections))
                        await trio.sleep(0.1)
                        break
                    continue  # that client left before it was accepted
                clients.start_soon(self._client, accepted, hang_ups, shared)

    async def _client(self, accepted: socket.socket, hang_ups: HangUps, shared: Shared) -> None:
        with trio.CancelScope() as scope:
            peer = Peer(accepted)
            connection = Connection(peer, shared, scope)
            self._connections[connection] = scope
            hang_ups.watch(accepted, connection.leave)
            try:
                await connection.serve()
            except OSError:
                scope.cancel(reason="the client is gone")
            except Exception:  # noqa: BLE001
                # One client's request must not end the others': it is written down, and this connection ends.
                _log.exception("request failed")
            finally:
                if scope.cancel_called and connection.exchange is not None:
                    self.metrics.client_gone(connection.exchange.model)
                hang_ups.forget(accepted)
                peer.close()
                del self._connections[connection]
                if not self._connections:
                    self._empty.set()

    async def _sweep(self) -> None:
        """One look at every deadline a few times a second, instead of a time-out for every operation."""
        while True:
            await trio.sleep(_SWEEP_S)
            now = self._clock()
            for connection in list(self._connections):
                connection.sweep(now)
            self.directory.sweep(now)
