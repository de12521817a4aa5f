"""A process of the router: serves clients with the table that the control plane pushes, and outlives it.

    python -m llmgw.router.main --socket PATH --listen-fd N --setup JSON --fingerprint TEXT [--alone]

When the control plane goes away without a word, this process serves on with its last table and connects again for
ever. It ends when it is told to drain, or by SIGTERM, which means the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import trio

from llmgw import __version__
from llmgw.errors import OperatorError, PeerError
from llmgw.router.balance import Balance
from llmgw.router.control_socket import Channel, connect
from llmgw.router.cors import CorsRules
from llmgw.router.counts import COUNTS_FOLDER, SharedCounts
from llmgw.router.journal import Batch, Journal
from llmgw.router.launch import Setup, decode
from llmgw.router.metrics_files import MetricsFiles
from llmgw.router.server import RouterServer
from llmgw.router.sight import Sight
from llmgw.router.telling import Teller
from llmgw.router.tls import Identity
from llmgw.router.wire import (
    Accept,
    Drain,
    Failed,
    FromWorker,
    Full,
    Hello,
    Keys,
    KeysHeld,
    Load,
    Serving,
    Spent,
    Usage,
    UsageKept,
    UseTable,
)
from llmgw.settings.document import Tracing
from llmgw.telemetry.collector import spare_what_is_loaded
from llmgw.telemetry.logging import Lines, configure, logger
from llmgw.telemetry.open_files import as_many_as_allowed
from llmgw.telemetry.tracing import Tracer

_AGAIN_FIRST_S = 0.2
_AGAIN_MOST_S = 2.0
_LOAD_EVERY_S = 0.25
_LOAD_ANYWAY_S = 1.0
"""A worker that says nothing for long is taken to be stuck, see :data:`llmgw.router.worker.SILENT_S`."""

_SIGHT_EVERY_S = 1.0
_USAGE_EVERY_S = 0.5
_AGAIN_S = 5.0
"""When usage is said again that nobody said was kept."""

_UNUSED_S = 10.0
"""A worker whose control plane went away before it was needed ends after this."""

_METRICS_EVERY_S = 1.0

_log = logger("control")


class Worker:
    """One router process. ``listener`` is shared with the others."""

    def __init__(self, path: Path, setup: Setup, fingerprint: str, listener: socket.socket, *, alone: bool) -> None:
        self._path = path
        self._setup = setup
        self._fingerprint = fingerprint
        self._listener = listener
        self._alone = alone
        self._drain_s = setup.router.drain_s
        self._folder = path.parent / COUNTS_FOLDER
        self._server: RouterServer
        self._tracer: Tracer | None = None
        self._lines: Lines | None = None
        self._retrace = trio.Event()
        self._journal = Journal(None)
        self._say: list[FromWorker] = []
        self._wake = trio.Event()
        self._accept = trio.Event()
        self._started = time.time()

    async def run(self) -> int:
        """Serve until drained. Returns the exit code."""
        try:
            self._server = self._made()
            self._open_counts()
        except OperatorError as failed:
            await self._report_failure(failed)
            return 2
        async with trio.open_nursery() as nursery:
            await nursery.start(self._signals)
            nursery.start_soon(self._control)
            nursery.start_soon(self._write_usage)
            nursery.start_soon(self._write_metrics)
            nursery.start_soon(self._follow_tracing)
            # A worker that has nothing to go by would answer with errors what another one can serve.
            await self._accept.wait()
            self._tell(Serving())
            try:
                await self._server.run(self._listener)
            finally:
                # Whatever is not said by now is in the file, and the control plane collects it from there.
                self._flush()
            nursery.cancel_scope.cancel(reason="drained")
        await self._close()
        return 0

    def _made(self) -> RouterServer:
        """The data plane as it is set up. Raises :class:`OperatorError`."""
        router = self._setup.router
        identity = None if router.tls is None else Identity(router.tls)
        server = RouterServer(time.monotonic, identity=identity, alone=self._alone)
        server.gate.unkept = lambda: self._journal.unkept
        if router.cors.origins:
            server.front.cors = CorsRules(router.cors.origins)
        if router.access_log:
            self._lines = Lines("access", "request")
            server.front.teller = Teller(time.monotonic, self._lines)
        return server

    async def _follow_tracing(self) -> None:
        """Trace as the newest table says. Requests under way when that changes may lose their spans."""
        traced: Tracing | None = None
        while True:
            wanted, news = self._server.directory.table.tracing, self._retrace
            if wanted == traced:
                await news.wait()
                continue
            traced, old, self._tracer = wanted, self._tracer, None
            if wanted is not None:
                try:
                    # In a thread: what it imports takes longer than a request may wait.
                    self._tracer = await trio.to_thread.run_sync(Tracer, wanted, "llmgw-router")
                except OperatorError as missing:
                    _log.error("requests are not traced", error=str(missing))
            told = self._lines is not None or self._tracer is not None
            teller = Teller(time.monotonic, self._lines, self._tracer) if told else None
            self._server.front.teller = teller
            _log.info("tracing changed", endpoint=None if wanted is None else wanted.endpoint)
            if old is not None:
                await trio.to_thread.run_sync(old.close)

    async def _close(self) -> None:
        self._journal.close()
        self._server.gate.counts.close()
        try:
            await self._server.metrics.write()
        except OSError as failed:
            _log.error("metrics cannot be written down", error=failed.strerror)
        if self._server.metrics.files is not None:
            self._server.metrics.files.close()
        if self._tracer is not None:
            await trio.to_thread.run_sync(self._tracer.close)

    def _open_counts(self) -> None:
        """A full disk is no reason not to serve: this worker then counts alone, and says so."""
        try:
            counts = self._server.gate.counts = SharedCounts(self._folder)
            if not self._alone:
                self._server.balance = Balance(self._folder, counts.lane)
            self._journal = Journal(self._folder)
            self._server.metrics.files = MetricsFiles(self._folder)
        except OSError as failed:
            _log.error(
                "limits, usage and metrics are kept in memory alone", folder=str(self._folder), error=failed.strerror
            )

    async def _write_usage(self) -> None:
        while True:
            await trio.sleep(_USAGE_EVERY_S)
            self._flush()

    async def _write_metrics(self) -> None:
        while True:
            await trio.sleep(_METRICS_EVERY_S)
            try:
                await self._server.metrics.write()
            except OSError as failed:
                _log.error("metrics cannot be written down", error=failed.strerror)

    def _tell(self, message: FromWorker) -> None:
        self._say.append(message)
        self._wake.set()

    def _flush(self) -> None:
        if not self._server.gate.book:
            return
        try:
            self._journal.add(self._server.gate.book.take())
        except OSError as failed:
            _log.error("usage cannot be written down, and is lost if this process dies", error=failed.strerror)

    async def _report_failure(self, failed: OperatorError) -> None:
        _log.error("cannot serve", error=str(failed))
        with trio.move_on_after(2.0):
            try:
                stream = await connect(self._path)
            except OSError:
                return
            channel = Channel(stream)
            await channel.send(Hello(os.getpid(), __version__, "", 0, self._started, setup=self._fingerprint))
            await channel.send(Failed(failed.thing, failed.reason, failed.remedy))
            await channel.aclose()

    async def _signals(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as received:
            task_status.started()
            async for _ in received:
                if self._server.draining:
                    os._exit(1)
                _log.info("draining", signal="SIGTERM", seconds=self._drain_s)
                self._drain(self._drain_s, replaced=False)

    def _drain(self, seconds: float, *, replaced: bool) -> None:
        self._server.drain(seconds, replaced=replaced)
        self._accept.set()

    def _hello(self) -> Hello:
        server = self._server
        table, keys = server.directory.table.version, server.gate.keys.version
        return Hello(
            os.getpid(), __version__, str(self._setup.router.listen), table, self._started, keys, self._fingerprint,
            server.draining,
        )  # fmt: skip

    def _sight(self) -> Sight:
        directory = self._server.directory
        engines = directory.sights(trio.current_time(), time.time())
        return Sight(engines, self._server.metrics.choices, directory.refused.lately())

    async def _control(self) -> None:
        """Talk to the control plane, whenever there is one."""
        wait_s, alone = _AGAIN_FIRST_S, False
        by = trio.current_time() + _UNUSED_S
        while True:
            try:
                stream = await connect(self._path)
            except OSError:
                if not self._accept.is_set() and trio.current_time() > by:
                    _log.warning("no control plane; ending, since nothing was served yet")
                    self._drain(0.0, replaced=True)
                elif not alone and self._accept.is_set():
                    _log.warning("no control plane; serving on with the last table")
                    alone = True
                await trio.sleep(wait_s)
                wait_s = min(2 * wait_s, _AGAIN_MOST_S)
                continue
            wait_s, alone = _AGAIN_FIRST_S, False
            channel = Channel(stream)
            try:
                await self._talk(channel)
            except PeerError as wrong:
                _log.error("control connection ended", error=str(wrong))
            finally:
                with trio.move_on_after(0.5, shield=True):
                    await channel.aclose()
            await trio.sleep(wait_s)

    async def _talk(self, channel: Channel) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._say_load, channel, nursery.cancel_scope)
            while (message := await channel.receive()) is not None:
                match message:
                    case UseTable(table=table):
                        self._server.use(table)
                        retrace, self._retrace = self._retrace, trio.Event()
                        retrace.set()
                    case Full(engines=engines):
                        self._server.directory.fill(engines)
                    case Keys(base=base, upto=upto, keys=keys, last=last):
                        self._server.use_keys(base, upto, keys, last=last)
                        self._tell(KeysHeld(self._server.gate.keys.version))
                    case Spent(rows=rows):
                        self._server.gate.learn(rows)
                    case UsageKept(ledger=ledger, seq=seq) if ledger == self._journal.ledger:
                        self._journal.kept(seq)
                    case UsageKept():
                        pass
                    case Accept():
                        self._accept.set()
                    case Drain(seconds=seconds, replaced=replaced):
                        _log.info("draining", seconds=seconds, replaced=replaced)
                        self._drain(seconds, replaced=replaced)
                    case _:
                        raise PeerError("router control", f"{type(message).__name__} is not for a worker")
            nursery.cancel_scope.cancel(reason="the control plane is gone")

    async def _say_load(self, channel: Channel, scope: trio.CancelScope) -> None:
        self._say.clear()  # before the control plane can send anything that is to be answered
        try:
            there = self._listener.fileno() >= 0
            await channel.send(self._hello(), along=self._listener if there else None)
            if self._accept.is_set():
                await channel.send(Serving())
            said: Load | None = None
            said_at = said_usage_at = looked_at = 0.0
            said_sight = Sight()
            said_usage: Batch | None = None
            while True:
                self._wake = trio.Event()
                now = trio.current_time()
                while self._say:
                    await channel.send(self._say.pop(0))
                usage = self._journal.next()
                if usage is not None and (usage is not said_usage or now - said_usage_at > _AGAIN_S):
                    said_usage, said_usage_at = usage, now
                    await channel.send(Usage(self._journal.ledger, usage.seq, usage.rows))
                directory = self._server.directory
                load = Load(directory.outstanding(), dict(directory.waiting), dict(directory.asked))
                if load != said or now - said_at > _LOAD_ANYWAY_S:
                    await channel.send(load)
                    said, said_at = load, now
                if now - looked_at >= _SIGHT_EVERY_S:
                    looked_at = now
                    if (sight := self._sight()) != said_sight:
                        await channel.send(sight)
                        said_sight = sight
                with trio.move_on_after(_LOAD_EVERY_S):
                    await self._wake.wait()
        except trio.BrokenResourceError:
            scope.cancel(reason="the control plane is gone")


def detach() -> None:
    """Become nobody's child, in a session of its own: the launcher prints our pid and ends.

    A process that is to outlive whoever started it is better not waited for by them.
    """
    sys.stdout.flush()
    if pid := os.fork():
        with contextlib.suppress(BrokenPipeError):  # who started it is gone; the next control plane finds it
            os.write(1, b"%d\n" % pid)
        os._exit(0)
    os.setsid()
    with open(os.devnull, "r+b") as null:
        for number in (0, 1):
            os.dup2(null.fileno(), number)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="llmgw's router process; started by llmgw server")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--setup", type=decode, required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--alone", action="store_true", help="nobody else accepts from the listening socket")
    args = parser.parse_args()
    detach()
    setup: Setup = args.setup
    configure(setup.log, "router")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=args.listen_fd)
    listener.set_inheritable(False)
    listener.setblocking(False)
    as_many_as_allowed()
    spare_what_is_loaded()
    worker = Worker(args.socket, setup, args.fingerprint, listener, alone=args.alone)
    raise SystemExit(trio.run(worker.run, strict_exception_groups=True))


if __name__ == "__main__":
    main()
