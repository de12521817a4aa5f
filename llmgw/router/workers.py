"""The control plane's side of its router: its workers started, adopted, fed, replaced one after the other, drained.

The listening socket is one, and every worker has a copy of it. So the queue of connections that nobody has accepted yet
belongs to none of them: when one dies, the others take what waits, which with a socket for each (SO_REUSEPORT) the
kernel would reset. Workers that live on without a control plane keep the socket, and give it to the next one.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import trio

from llmgw.errors import OperatorError, PeerError
from llmgw.router.control_socket import Channel
from llmgw.router.control_socket import listen as listen_control
from llmgw.router.counts import COUNTS_FOLDER
from llmgw.router.launch import Setup, count, fingerprint, launch
from llmgw.router.metrics_files import forget
from llmgw.router.server import listen
from llmgw.router.sight import Sight, together
from llmgw.router.table import Table
from llmgw.router.tls import context_of
from llmgw.router.wire import Hello, Load
from llmgw.router.worker import SILENT_S, Feed, KeySource, RouterWorker, WorkerState
from llmgw.settings.daemon import Log, RouterListener
from llmgw.telemetry.logging import logger

_ADOPT_S = 2.5
"""How long workers that live may take to report: they try again every two seconds at the latest."""

_START_S = 10.0
_HELLO_S = 5.0
_AGAIN_FIRST_S = 0.5
_AGAIN_MOST_S = 10.0
_KILL_S = 1.0
_SOCKET, _PIDS = "router.sock", "router.pid"


class RouterWorkers:
    """Owns the router's processes for as long as :meth:`run` runs; a cancelled one leaves them serving."""

    def __init__(self, folder: Path, config: RouterListener, log: Log, silent_s: float = SILENT_S) -> None:
        self._socket = folder / _SOCKET
        self._pid_file = folder / _PIDS
        self._counts = folder / COUNTS_FOLDER
        self._config = config
        self._silent_s = silent_s
        self._setup = Setup(config, log)
        self._fingerprint = fingerprint(self._setup)
        self._count = count(config)
        self._feed = Feed(self._count)
        self._workers: dict[int, RouterWorker] = {}
        self._listener: socket.socket | None = None
        self._changed = trio.Event()
        self._on_load: Callable[[Load], None] = lambda _load: None
        self._said: Load | None = None
        self._asked: Counter[str] = Counter()
        self._adopting = True
        self._draining = False
        self._failure = ""
        self._since = time.time()
        self._word = ""
        self._nursery: trio.Nursery
        self._log = logger("router")

    @property
    def listen(self) -> str:
        """Where clients connect."""
        return str(self._config.listen)

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """Every worker, oldest first."""
        return tuple(worker.state for worker in self._workers.values())

    @property
    def state(self) -> WorkerState:
        """How the router stands as a whole: it serves as long as one worker does. ``pid`` is the oldest one's."""
        serving = [w for w in self._workers.values() if w.serving and not w.draining]
        reason = self._failure
        if self._draining:
            state, reason = "draining", f"finishes within {self._config.drain_s:g} s"
        elif serving:
            state = "serving"
            if len(serving) < self._count:
                reason = f"{len(serving)} of {self._count} workers; {reason or 'another one is started'}"
        elif self._workers or not self._failure:
            state = "starting"
        else:
            state = "down"
        if state != self._word:
            self._word, self._since = state, time.time()
        return WorkerState(state, reason, self._since, serving[0].pid if serving else None, self._streams)

    @property
    def _streams(self) -> int:
        return sum(self.in_flight.values())

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Open requests by endpoint id, of all workers."""
        return self._load().outstanding

    @property
    def load(self) -> Load:
        """What all workers have to do."""
        return self._load()

    @property
    def sight(self) -> Sight:
        """What the choices of all workers rest on, as of a second ago."""
        return together(worker.sight for worker in self._workers.values())

    @property
    def table(self) -> Table | None:
        """What they route by."""
        return self._feed.table

    @property
    def keys_held(self) -> int:
        """The version of the keys that every worker has."""
        return min((w.keys for w in self._workers.values()), default=0)

    def on_load(self, call: Callable[[Load], None]) -> None:
        """Call this with the open and the waiting requests of all workers whenever they change."""
        self._on_load = call

    def push(self, table: Table) -> None:
        """Serve with this table from now on; a worker that comes later gets it too."""
        self._feed.table = table
        self._feed.changed()
        self._woken()

    def serve_keys(self, keys: KeySource) -> None:
        """Give workers these keys, and whatever changes of them once :meth:`keys_changed` is called."""
        self._feed.keys = keys
        self._feed.changed()

    def keys_changed(self) -> None:
        """Something of the keys, or of what is spent, is new."""
        self._feed.changed()

    async def keys_in_force(self, version: int, seconds: float) -> bool:
        """Wait until every worker has this version of the keys, for so long; whether they have."""
        with trio.move_on_after(seconds):
            while self.keys_held < version or self.state.state != "serving":
                await self._changed.wait()
            return True
        return False

    @property
    def full(self) -> tuple[str, ...]:
        """The engines that say that they have no room."""
        return self._feed.full

    def fill(self, full: tuple[str, ...]) -> None:
        """These engines say that they have no room."""
        if full != self._feed.full:
            self._feed.full = full
            self._feed.changed()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the workers serving until cancelled. Started once one serves.

        Raises :class:`OperatorError` when the first ones cannot, for one because the address is taken.
        """
        if self._config.tls is not None:
            await trio.to_thread.run_sync(context_of, self._config.tls)  # whoever starts us hears what is wrong with it
        control = await trio.to_thread.run_sync(listen_control, self._socket)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(trio.serve_listeners, self._talk, [control])
                await self._adopt()
                if self._listener is None:
                    self._listener = listen(self._config.listen)
                    await self._start_first()
                task_status.started()
                await self._keep()
        finally:
            self._close_listener()

    async def drain(self, seconds: float) -> None:
        """Have every worker finish what is under way and end; returns when they have, or are killed after that time."""
        self._draining = True
        self._close_listener()
        async with trio.open_nursery() as nursery:
            for worker in list(self._workers.values()):
                nursery.start_soon(partial(worker.drain, seconds, replaced=False))

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _woken(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    # Which workers there are.

    async def _adopt(self) -> None:
        """Wait for the workers of an earlier control plane that live, and take their listening socket over."""
        for pid in _left(self._pid_file, self._socket):
            self._known(pid)
        with trio.move_on_after(_ADOPT_S):
            while not all(worker.load for worker in self._workers.values()):
                await self._changed.wait()
        # One that is stuck may hold the only listening socket there is: the address is free once it is killed.
        while self._listener is None and any(not worker.heard for worker in self._workers.values()):
            await self._changed.wait()
        self._adopting = False
        if not self._workers:
            # Nobody counts on from here, so the counters may begin anew, as those of every process that starts do.
            await trio.to_thread.run_sync(forget, self._counts)
        for worker in self._workers.values():
            self._log.info("router worker adopted", pid=worker.pid, fits=worker.fits)

    async def _start_first(self) -> None:
        """Start all workers at once. Raises the first failure where none of them serves."""
        failures: list[OperatorError] = []

        async def start() -> None:
            try:
                await self._start()
            except OperatorError as failed:
                failures.append(failed)

        async with trio.open_nursery() as nursery:
            for _ in range(self._count):
                nursery.start_soon(start)
        if len(failures) == self._count:
            raise failures[0]

    async def _keep(self) -> None:
        """As many workers as there shall be, of the right kind; others are drained once these serve."""
        wait_s = _AGAIN_FIRST_S
        while True:
            changed = self._changed
            right = [w for w in self._workers.values() if w.fits and not w.draining]
            others = [w for w in self._workers.values() if not w.fits and not w.draining]
            if self._draining:
                await trio.sleep_forever()
            if len(right) < self._count and not (others and not self._fed):
                if wait_s > _AGAIN_FIRST_S or not others:
                    await trio.sleep(wait_s)
                try:
                    await self._start()
                    self._failure, wait_s = "", _AGAIN_FIRST_S
                except OperatorError as failed:
                    self._log.error("a router worker cannot be started", error=str(failed))
                    self._failure, wait_s = failed.reason, min(2 * wait_s, _AGAIN_MOST_S)
                    continue
            # As many as there were go on serving, whatever comes of the new ones.
            serving = [w for w in self._workers.values() if w.serving and not w.draining]
            surplus = max(0, len(serving) - self._count)
            leaving = (others + right[self._count :])[:surplus]
            for worker in leaving:
                self._log.info("router worker replaced", pid=worker.pid, version=worker.version)
                self._nursery.start_soon(partial(worker.drain, self._config.drain_s, replaced=True))
                worker.draining = True
            if len(right) >= self._count or (others and not self._fed):
                await changed.wait()

    @property
    def _fed(self) -> bool:
        """Whether a new worker could do what the old ones do."""
        return self._feed.table is not None

    async def _start(self) -> None:
        """Start one worker. Raises :class:`OperatorError` if it does not serve in time; it is ended then."""
        listener = self._listener
        if listener is None:
            raise OperatorError("the router", "is draining")
        worker: RouterWorker | None = None
        with trio.move_on_after(_START_S):
            pid = await launch(self._socket, self._setup, listener, alone=self._count == 1)
            worker = self._known(pid)
            while not (worker.serving or worker.failure or worker.ended.is_set()):
                await self._changed.wait()
        if worker is None:
            raise OperatorError("the router", f"could not be launched within {_START_S:g} s")
        if worker.failure is not None:
            raise worker.failure
        if worker.ended.is_set():
            raise OperatorError("the router", "ended before it served", "see its log lines above")
        if not worker.serving:
            worker.kill()
            raise OperatorError("the router", f"did not come up within {_START_S:g} s", "see its log lines above")

    def _known(self, pid: int) -> RouterWorker:
        worker = self._workers.get(pid)
        if worker is None:
            worker = self._workers[pid] = RouterWorker(pid, self._feed, self._worker_changed)
            self._write_pids()
            self._nursery.start_soon(self._watch, worker)
            if self._draining:
                self._nursery.start_soon(partial(worker.drain, 0.0, replaced=False))  # it was just being started
        return worker

    async def _watch(self, worker: RouterWorker) -> None:
        await worker.watch(self._silent_s)
        self._workers.pop(worker.pid, None)
        self._write_pids()
        if worker.load is not None:
            self._asked.update(worker.load.asked)
        if not worker.draining:
            self._log.error("a router worker is gone", pid=worker.pid)
        self._worker_changed()

    # What they say.

    async def _talk(self, stream: trio.SocketStream) -> None:
        """One worker's connection."""
        channel = Channel(stream)
        try:
            with trio.move_on_after(_HELLO_S):
                hello = await channel.receive()
            if not isinstance(hello, Hello):
                return
            if self._listener is None and not self._draining and hello.listen == self.listen and channel.came:
                self._listener = channel.came.pop()
                self._listener.setblocking(False)
            while channel.came:
                channel.came.pop().close()
            worker = self._known(hello.pid)
            worker.fits = hello.setup == self._fingerprint
            await worker.talk(channel, hello)
        except* PeerError as wrong:
            self._log.error("a router worker talks nonsense", error=str(wrong.exceptions[0]))
        finally:
            with trio.move_on_after(0.5, shield=True):
                await channel.aclose()

    def _load(self) -> Load:
        outstanding: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        asked = Counter(self._asked)
        for worker in self._workers.values():
            if worker.load is not None:
                outstanding.update(worker.load.outstanding)
                waiting.update(worker.load.waiting)
                asked.update(worker.load.asked)
        return Load(dict(outstanding), dict(waiting), dict(asked))

    def _worker_changed(self) -> None:
        self._woken()
        # What one has not said yet may be the request that a replica's end waits for.
        if self._adopting or any(w.serving and w.load is None for w in self._workers.values()):
            return
        load = self._load()
        if load != self._said:
            self._said = load
            self._on_load(load)

    def _write_pids(self) -> None:
        self._pid_file.write_text("".join(f"{pid}\n" for pid in self._workers))


async def stop_left(folder: Path, seconds: float) -> None:
    """Have the workers of a control plane that ended finish what is under way and end; where nobody adopts them.

    Those that do not within this time are killed.
    """
    async with trio.open_nursery() as nursery:
        for pid in _left(folder / _PIDS, folder / _SOCKET):
            nursery.start_soon(_stop, pid, folder / _SOCKET, seconds)


async def _stop(pid: int, control: Path, seconds: float) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _is_worker(pid, control):
            signal.pidfd_send_signal(handle, signal.SIGTERM)  # a worker takes that as being told to drain
            with trio.move_on_after(seconds + _KILL_S):
                await trio.lowlevel.wait_readable(handle)
                return
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended by itself
    finally:
        os.close(handle)


def _left(pid_file: Path, control: Path) -> tuple[int, ...]:
    """The workers that were written down and live."""
    try:
        written = tuple(int(line) for line in pid_file.read_text().split())
    except (OSError, ValueError):
        return ()
    return tuple(pid for pid in written if _is_worker(pid, control))


def _is_worker(pid: int, control: Path) -> bool:
    """Whether this is a worker that talks over this socket: numbers of processes are used again."""
    try:
        return os.fsencode(control) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
