"""The control plane's side of its router: started, adopted, fed with tables, drained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import trio
from attrs import frozen

from llmgw import __version__
from llmgw.errors import OperatorError, PeerError
from llmgw.router.control_socket import Channel, listen
from llmgw.router.table import Table
from llmgw.router.wire import (
    Drain,
    Failed,
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
from llmgw.settings.daemon import Log, RouterListener
from llmgw.settings.keys import ApiKey
from llmgw.settings.keys import Spent as SpentRow
from llmgw.settings.usage import UsageRow
from llmgw.telemetry.logging import logger

_ADOPT_S = 2.5
"""How long a worker that is said to live may take to report: it tries again every two seconds at the latest."""

_START_S = 10.0
_AGAIN_FIRST_S = 0.5
_AGAIN_MOST_S = 10.0
_KILL_S = 1.0
_PAGE_KEYS = 100
"""So many keys a message: taking one over must not hold the worker's requests up."""


class KeySource(Protocol):
    """Who knows the keys: see :class:`llmgw.server.keys.KeyBook`."""

    version: int

    def since(self, version: int) -> tuple[ApiKey, ...]:
        """The keys that changed after this version, in the order of their changes."""
        ...

    def spent(self, mark: int) -> tuple[int, tuple[SpentRow, ...]]:
        """The newest mark, and what of the budgets changed after the one that is given."""
        ...

    async def used(self, ledger: str, seq: int, rows: tuple[UsageRow, ...]) -> bool:
        """Keep what a worker used; whether it is kept."""
        ...


@frozen
class WorkerState:
    """How the router stands: ``serving``, ``starting`` or ``down``, why, and since when (epoch seconds)."""

    state: str
    reason: str
    since: float
    pid: int | None


class RouterWorker:
    """Owns the router's process for as long as :meth:`run` runs; a cancelled one leaves it serving."""

    def __init__(self, folder: Path, config: RouterListener, log: Log) -> None:
        self._socket = folder / "router.sock"
        self._pid_file = folder / "router.pid"
        self._config = config
        self._log_config = log
        self._table: Table | None = None
        self._pushed = trio.Event()
        self._channel: Channel | None = None
        self._hello: Hello | None = None
        self._arrived = trio.Event()
        self._left = trio.Event()
        self._on_load: Callable[[Load], None] = lambda _load: None
        self._draining = False
        self._failure = ("the router", "failed", "")
        self._nursery: trio.Nursery | None = None
        self._log = logger("router")
        self._keys: KeySource | None = None
        self._held = trio.Event()
        self.keys_held = 0
        self.in_flight: Mapping[str, int] = {}
        self.state = WorkerState("starting", "not started yet", time.time(), None)

    @property
    def listen(self) -> str:
        """Where clients connect."""
        return str(self._config.listen)

    def on_load(self, call: Callable[[Load], None]) -> None:
        """Call this with the open and the waiting requests whenever they change."""
        self._on_load = call

    def push(self, table: Table) -> None:
        """Serve with this table from now on; a worker that comes later gets it too."""
        self._table = table
        self._pushed.set()

    def serve_keys(self, keys: KeySource) -> None:
        """Give workers these keys, and whatever changes of them once :meth:`keys_changed` is called."""
        self._keys = keys
        self._pushed.set()

    def keys_changed(self) -> None:
        """Something of the keys, or of what is spent, is new."""
        self._pushed.set()

    async def keys_in_force(self, version: int, seconds: float) -> bool:
        """Wait until the worker has this version of the keys, for so long; whether it has."""
        with trio.move_on_after(seconds):
            while self.keys_held < version or self.state.state != "serving":
                self._held = trio.Event()
                await self._held.wait()
            return True
        return False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep one worker serving until cancelled. Started once one serves.

        Raises :class:`OperatorError` when the first one cannot, for one because its address is taken.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            listener = await trio.to_thread.run_sync(listen, self._socket)
            nursery.start_soon(self._serve_control, listener)
            if not await self._adopted():
                await self._start()
            task_status.started()
            wait_s = _AGAIN_FIRST_S
            while True:
                await self._left.wait()
                if self._draining:
                    await trio.sleep_forever()
                self._log.error("the router is gone; starting another one")
                self._set("down", "its process ended", None)
                await trio.sleep(wait_s)
                wait_s = min(2 * wait_s, _AGAIN_MOST_S)
                try:
                    await self._start()
                    wait_s = _AGAIN_FIRST_S
                except OperatorError as failed:
                    self._log.error("the router cannot be started", error=str(failed))
                    self._set("down", failed.reason, None)

    async def drain(self, seconds: float) -> None:
        """Have the worker finish what is under way and end; returns when it has, or is killed after that time."""
        self._draining = True
        channel, hello = self._channel, self._hello
        if channel is None or hello is None:
            return
        self._set("draining", f"finishes within {seconds:g} s", hello.pid)
        try:
            await channel.send(Drain(seconds))
        except trio.BrokenResourceError:
            return
        with trio.move_on_after(seconds + _KILL_S):
            await self._left.wait()
            return
        self._log.warning("the router did not end; killing it", pid=hello.pid)
        os.kill(hello.pid, signal.SIGKILL)

    def _set(self, state: str, reason: str, pid: int | None) -> None:
        self.state = WorkerState(state, reason, time.time(), pid)

    async def _adopted(self) -> bool:
        """Whether a worker of an earlier control plane is there and fits."""
        if not self._pid_file.exists():
            return False
        with trio.move_on_after(_ADOPT_S):
            await self._arrived.wait()
        hello = self._hello
        if hello is None:
            return False
        if hello.version == __version__ and hello.listen == str(self._config.listen):
            self._log.info("router adopted", pid=hello.pid, table=hello.table)
            return True
        self._log.info("router replaced", pid=hello.pid, version=hello.version, listen=hello.listen)
        await self.drain(self._config.drain_s)
        self._draining = False
        return False

    async def _start(self) -> None:
        self._arrived, self._left = trio.Event(), trio.Event()
        self._hello = None
        self._set("starting", "process started", None)
        listen_at = self._config.listen
        argv = [
            sys.executable, "-m", "llmgw.router.main",
            "--socket", str(self._socket),
            "--listen-host", listen_at.host, "--listen-port", str(listen_at.port),
            "--drain", f"{self._config.drain_s:g}",
            "--log-level", self._log_config.level.value, "--log-format", self._log_config.format.value,
        ]  # fmt: skip
        with trio.move_on_after(_START_S):
            launched = await trio.run_process(argv, stdin=subprocess.DEVNULL, capture_stdout=True, check=False)
            if launched.returncode != 0:
                raise OperatorError("the router", f"cannot be launched (exit code {launched.returncode})")
            pid = int(launched.stdout)
            self._pid_file.write_text(f"{pid}\n")
            assert self._nursery is not None
            self._nursery.start_soon(self._watch_start, pid)
            await self._arrived.wait()
        if self.state.state == "failed":
            raise OperatorError(*self._failure)
        if self._hello is None:
            raise OperatorError("the router", f"did not come up within {_START_S:g} s", "see its log lines above")

    async def _watch_start(self, pid: int) -> None:
        """A worker that ends before it reported has failed."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            fd = None
        try:
            if fd is not None:
                await trio.lowlevel.wait_readable(fd)
        finally:
            if fd is not None:
                os.close(fd)
        if not self._arrived.is_set():
            self._failure = ("the router", "ended before it served", "see its log lines above")
            self._set("failed", self._failure[1], None)
            self._arrived.set()

    async def _serve_control(self, listener: trio.SocketListener) -> None:
        async with trio.open_nursery() as nursery:
            await trio.serve_listeners(self._worker, [listener], handler_nursery=nursery)

    async def _worker(self, stream: trio.SocketStream) -> None:
        """One worker's connection."""
        channel = Channel(stream)
        kept: list[UsageKept] = []
        try:
            async with trio.open_nursery() as nursery:
                while (message := await channel.receive()) is not None:
                    match message:
                        case Hello():
                            self._hello, self._channel = message, channel
                            self.keys_held = message.keys
                        case Serving() if self._hello is not None:
                            self._set("serving", "", self._hello.pid)
                            self._left = trio.Event()
                            self._arrived.set()
                            nursery.start_soon(self._feed, channel, kept, self._hello.keys, nursery.cancel_scope)
                        case Load():
                            self.in_flight = message.outstanding
                            self._on_load(message)
                        case KeysHeld(version=version):
                            self.keys_held = version
                            self._held.set()
                        case Usage(ledger=ledger, seq=seq, rows=rows):
                            if self._keys is not None and await self._keys.used(ledger, seq, rows):
                                kept.append(UsageKept(ledger, seq))
                                self._pushed.set()
                        case Failed(thing=thing, reason=reason, remedy=remedy):
                            self._failure = (thing, reason, remedy)
                            self._set("failed", reason, None)
                            self._arrived.set()
                        case _:
                            raise PeerError("router control", f"{type(message).__name__} is not for the control plane")
                nursery.cancel_scope.cancel(reason="the worker is gone")
        except* PeerError as wrong:
            self._log.error("the router talks nonsense", error=str(wrong.exceptions[0]))
        finally:
            if self._channel is channel:
                self._channel = None
                self._left.set()
            with trio.move_on_after(0.5, shield=True):
                await channel.aclose()

    async def _feed(self, channel: Channel, kept: list[UsageKept], keys: int, scope: trio.CancelScope) -> None:
        """Send the newest table and what is new of the keys, and each one after it."""
        table: Table | None = None
        mark = 0
        whole = False
        try:
            while True:
                self._pushed = trio.Event()
                if self._table is not None and self._table is not table:
                    table = self._table
                    await channel.send(UseTable(table))
                while kept:
                    await channel.send(kept.pop(0))
                source = self._keys
                if source is not None:
                    mark, rows = source.spent(mark)
                    if rows:
                        await channel.send(Spent(rows))
                    if not whole or source.version != keys:
                        keys, whole = await self._send_keys(channel, source, keys), True
                await self._pushed.wait()
        except trio.BrokenResourceError:
            scope.cancel(reason="the worker is gone")

    async def _send_keys(self, channel: Channel, source: KeySource, known: int) -> int:
        """Send what the worker lacks. Returns the version that it has then."""
        version = source.version
        if known > version:
            # The store is older than what this worker knows, as after a backup was put back. What it knows stays: a
            # stale table must not undo a revocation.
            self._log.error("the router has newer keys than the store; restart it to use the store's", store=version,
                            router=known)  # fmt: skip
            known = 0
        news = source.since(known)
        pages = [news[at : at + _PAGE_KEYS] for at in range(0, len(news), _PAGE_KEYS)] or [()]
        for number, page in enumerate(pages):
            last = number == len(pages) - 1
            upto = version if last else page[-1].version
            await channel.send(Keys(known, upto, page, last))
            known = upto
        return version
