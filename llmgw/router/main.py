"""The router's process: serves clients with the table that the control plane pushes, and outlives it.

    python -m llmgw.router.main --socket PATH --listen HOST:PORT --drain SECONDS [--log-level L --log-format F]

When the control plane goes away without a word, this process serves on with its last table and connects again for
ever. It ends when it is told to drain, or by SIGTERM, which means the same.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import trio

from llmgw import __version__
from llmgw.errors import OperatorError, PeerError
from llmgw.router.control_socket import Channel, connect
from llmgw.router.counts import COUNTS_FOLDER, SharedCounts
from llmgw.router.journal import Batch, Journal
from llmgw.router.server import RouterServer, listen
from llmgw.router.wire import (
    Drain,
    Failed,
    FromWorker,
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
from llmgw.settings.daemon import Address, Log, LogFormat, LogLevel
from llmgw.telemetry.logging import configure, logger

_AGAIN_FIRST_S = 0.2
_AGAIN_MOST_S = 2.0
_LOAD_EVERY_S = 0.25
_LOAD_ANYWAY_S = 5.0
_USAGE_EVERY_S = 0.5
_AGAIN_S = 5.0
"""When usage is said again that nobody said was kept."""

_log = logger("control")


class Worker:
    """One router process."""

    def __init__(self, path: Path, address: Address, drain_s: float) -> None:
        self._path = path
        self._address = address
        self._drain_s = drain_s
        self._folder = path.parent / COUNTS_FOLDER
        self._server = RouterServer()
        self._journal = Journal(None)
        self._server.gate.unkept = lambda: self._journal.unkept
        self._say: list[FromWorker] = []
        self._wake = trio.Event()
        self._started = time.time()
        self._failure: OperatorError | None = None

    async def run(self) -> int:
        """Serve until drained. Returns the exit code."""
        try:
            listener = listen(self._address)
            self._open_counts()
        except OperatorError as failed:
            await self._report_failure(failed)
            return 2
        async with trio.open_nursery() as nursery:
            await nursery.start(self._signals)
            nursery.start_soon(self._control)
            nursery.start_soon(self._write_usage)
            try:
                await self._server.run(listener)
            finally:
                # Whatever is not said by now is in the file, and the control plane collects it from there.
                self._flush()
            nursery.cancel_scope.cancel(reason="drained")
        self._journal.close()
        self._server.gate.counts.close()
        return 0

    def _open_counts(self) -> None:
        """A full disk is no reason not to serve: this worker then counts alone, and says so."""
        try:
            self._server.gate.counts = SharedCounts(self._folder)
            self._journal = Journal(self._folder)
        except OSError as failed:
            _log.error("limits and usage are kept in memory alone", folder=str(self._folder), error=failed.strerror)

    async def _write_usage(self) -> None:
        while True:
            await trio.sleep(_USAGE_EVERY_S)
            self._flush()

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
            await channel.send(self._hello())
            await channel.send(Failed(failed.thing, failed.reason, failed.remedy))
            await channel.aclose()

    async def _signals(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as received:
            task_status.started()
            async for _ in received:
                if self._server.ready() == "draining":
                    os._exit(1)
                _log.info("draining", signal="SIGTERM", seconds=self._drain_s)
                self._server.drain(self._drain_s)

    def _hello(self) -> Hello:
        server = self._server
        table, keys = server.directory.table.version, server.gate.keys.version
        return Hello(os.getpid(), __version__, str(self._address), table, self._started, keys)

    async def _control(self) -> None:
        """Talk to the control plane, whenever there is one."""
        wait_s, alone = _AGAIN_FIRST_S, False
        while True:
            try:
                stream = await connect(self._path)
            except OSError:
                if not alone:
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
                    case Keys(base=base, upto=upto, keys=keys, last=last):
                        self._server.use_keys(base, upto, keys, last=last)
                        self._say.append(KeysHeld(self._server.gate.keys.version))
                        self._wake.set()
                    case Spent(rows=rows):
                        self._server.gate.learn(rows)
                    case UsageKept(ledger=ledger, seq=seq) if ledger == self._journal.ledger:
                        self._journal.kept(seq)
                    case UsageKept():
                        pass
                    case Drain(seconds=seconds):
                        _log.info("draining", seconds=seconds)
                        self._server.drain(seconds)
                    case _:
                        raise PeerError("router control", f"{type(message).__name__} is not for a worker")
            nursery.cancel_scope.cancel(reason="the control plane is gone")

    async def _say_load(self, channel: Channel, scope: trio.CancelScope) -> None:
        self._say.clear()  # before the control plane can send anything that is to be answered
        try:
            await channel.send(self._hello())
            await channel.send(Serving())
            said: Load | None = None
            said_at = said_usage_at = 0.0
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
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        os._exit(0)
    os.setsid()
    with open(os.devnull, "r+b") as null:
        for number in (0, 1):
            os.dup2(null.fileno(), number)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="llmgw's router process; started by llmgw server")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--listen-host", required=True)
    parser.add_argument("--listen-port", type=int, required=True)
    parser.add_argument("--drain", type=float, required=True)
    parser.add_argument("--log-level", type=LogLevel, default=LogLevel.INFO)
    parser.add_argument("--log-format", type=LogFormat, default=LogFormat.AUTO)
    args = parser.parse_args()
    detach()
    configure(Log(args.log_level, args.log_format), "router")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is loaded by now stays for ever; the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    worker = Worker(args.socket, Address(args.listen_host, args.listen_port), args.drain)
    raise SystemExit(trio.run(partial(worker.run), strict_exception_groups=True))


if __name__ == "__main__":
    main()
