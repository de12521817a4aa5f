"""The control plane's daemon: what runs in it, in which order it starts, and in which it stops.

Order of start: state folder and store, router, admin listener, then the link and the reconcile loop. Order of
stop: the reverse, each step bounded and named, so that the log says which one was slow.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import trio
from attrs import evolve

from llmgw import __version__
from llmgw.errors import OperatorError, first_error
from llmgw.link.server import serve as serve_link
from llmgw.router.counts import COUNTS_FOLDER
from llmgw.router.table import Table
from llmgw.router.workers import RouterWorkers
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster, remembered
from llmgw.server.doctors import Doctors
from llmgw.server.follower import Follower
from llmgw.server.identities import Identities
from llmgw.server.identity_admin import IdentityAdmin
from llmgw.server.jobs import Jobs
from llmgw.server.keys import KeyBook
from llmgw.server.leader import Leadership
from llmgw.server.loads import Loads
from llmgw.server.operations import Operations
from llmgw.server.reconcile import Reconciler
from llmgw.server.registry import table
from llmgw.server.settings_book import SettingsBook
from llmgw.server.status import Status
from llmgw.settings.daemon import ServerConfig
from llmgw.settings.document import Auth, Settings
from llmgw.store.database import LostLeadError, StoreAwayError
from llmgw.store.folder import held, instance_of
from llmgw.store.identity import IdentityStore
from llmgw.store.lease import Leader, Leases
from llmgw.store.opening import FILE, store_of
from llmgw.store.sql import SqlStore
from llmgw.telemetry.collector import spare_what_is_loaded
from llmgw.telemetry.logging import configure, logger
from llmgw.telemetry.metrics import ControlPlaneMetrics
from llmgw.web.access import Access
from llmgw.web.admin_tls import AdminTlsContext, is_loopback, trust_domain
from llmgw.web.api import app
from llmgw.web.auth import token_of
from llmgw.web.serve import listen as listen_admin
from llmgw.web.serve import serve as serve_admin
from llmgw.web.watch import Watch

_KILL_MARGIN_S = 2.0
_STORE_AGAIN_S = 2.0
_ANSWER_S = 0.5


def run(config: ServerConfig) -> None:
    """Run until a signal ends it. Raises :class:`OperatorError` when it cannot start."""
    configure(config.log, "server")
    spare_what_is_loaded()
    if trio.run(partial(_main, config), strict_exception_groups=True):
        # The same process, so that whoever started it keeps it in sight; what is on the disk by now is what runs. A
        # signal that comes before that listens for signals must not end it.
        for number in (signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606


async def _main(config: ServerConfig) -> bool:
    """Whether another control plane is to take this one's place."""
    folder = Path(config.state_dir)
    with held(folder, "server"), first_error():
        if config.store is None:
            _not_lost(folder)
        while True:
            try:
                async with store_of(config.store, folder) as store:
                    server = Server(config, store, store.identities)
                    await server.run()
                    return server.hands_over
            except LostLeadError as lost:
                logger("server").error("no longer the leader", reason=str(lost))
                return True
            except StoreAwayError as away:
                # Others use it too: it comes back without us, and so may we. The router's workers go on meanwhile.
                logger("server").error("the store cannot be used; trying again", error=str(away))
            await trio.sleep(_STORE_AGAIN_S)
    raise AssertionError("an error that nobody raised")


def _not_lost(folder: Path) -> None:
    """A new store in a folder that had one knows no key, and may not even know that keys are wanted: everybody would be
    let in. Raises :class:`OperatorError`."""
    if (folder / COUNTS_FOLDER).exists() and not (folder / FILE).exists():
        raise OperatorError(
            str(folder / FILE),
            "is missing, though a server ran on this folder: keys and settings are not known",
            f"put it back, or a backup with llmgw server restore; to begin with nothing move {folder} away",
        )


class Server:
    """One run of the daemon over an open store."""

    def __init__(self, config: ServerConfig, store: SqlStore, identity_store: IdentityStore) -> None:
        self._config = config
        self._store = store
        self._identity_store = identity_store
        self._log = logger("server")
        self._stopping = trio.Event()
        self._reload = trio.Event()
        self._signal = ""
        self._table = Table()
        self._admin_tls: AdminTlsContext | None = None
        self.hands_over = False

    async def run(self) -> None:
        """Start everything, serve until SIGTERM or SIGINT, then stop everything.

        After SIGUSR2 the router's workers are left as they are: ``hands_over`` says so then.
        """
        book = SettingsBook(self._store, Path(self._config.settings), time.time, link=self._config.link is not None)
        leadership = await self._leadership(book)
        # From here on: what follows may take longer than a lease lasts.
        async with nullcontext() if leadership is None else leadership.kept(self._part_over):
            await self._serve(book, leadership)

    async def _serve(self, book: SettingsBook, leadership: Leadership | None) -> None:
        await book.start(records=leadership is None or leadership.leads)
        settings = book.settings
        control_plane = settings.needs_control_plane
        started = time.time()
        metrics = ControlPlaneMetrics()
        epoch = None if leadership is None else leadership.epoch
        cluster = await remembered(
            self._store, settings, started, lambda: reconciler.wake(), book.revision, epoch=epoch
        )
        router = RouterWorkers(Path(self._config.state_dir), self._config.router, self._config.log)
        keys = KeyBook(
            self._store.keys,
            router,
            Path(self._config.state_dir) / COUNTS_FOLDER,
            time.time,
            lambda: cluster.settings.keys,
        )
        await keys.load()
        router.serve_keys(keys)
        cluster.full = router.fill
        jobs = Jobs(
            self._store, cluster.epoch, lambda: cluster.settings, cluster.nodes,
            lambda node, commands: agents.dispatch(node, commands), time.time,
        )  # fmt: skip
        await jobs.load()
        identities: Identities | None = None
        if control_plane and self._config.link is not None:
            identities = Identities(
                self._config.link,
                self._identity_store,
                time.time,
                lambda: agents.look_again(),
                lambda node: agents.connected(node),
            )
            await identities.load()
        doctors = Doctors(
            cluster.epoch, cluster.nodes, cluster.linked, lambda node, commands: agents.dispatch(node, commands),
            time.time, lambda: (c for m in cluster.settings.models for p in m.profiles for c in p.device_class),
        )  # fmt: skip
        agents = Agents(cluster, self._store, time.time, jobs, identities, doctors)
        reconciler = Reconciler(cluster, self._store, agents, router.push, time.time, metrics, int(started))
        status = Status(
            cluster, self._store, router, metrics, lambda: book.revision, __version__, time.time, keys, leadership
        )
        listener = listen_admin(self._config.admin.listen)
        admin = self._config.admin
        tls = None if admin.tls is None else AdminTlsContext(admin.tls)
        self._admin_tls = tls
        access = Access(
            token_of(Path(self._config.state_dir)),
            self._store.people,
            time.time,
            trust_domain(self._config),
            lambda chain: None if identities is None else identities.kept_out(chain),
        )
        watch = Watch(status, jobs, access)
        loads = Loads(leadership, lambda load: cluster.loaded(load, time.time()))

        async with trio.open_nursery() as root:
            await root.start(self._signals)
            if not control_plane:
                self._route(cluster, router)
            async with trio.open_nursery() as services:
                # The router starts before the link: an adopted one gets its table from what the store remembers.
                router.on_load(loads.own)
                await services.start(router.run)
                people = None if identities is None else IdentityAdmin(identities, cluster, agents, time.time)
                operations = Operations(cluster, self._store, time.time, agents) if control_plane else None
                history = self._store, Path(self._config.state_dir)
                made = app(
                    status, access, jobs, people, keys, history, doctors, operations, book, self._store.people, watch
                )
                await services.start(partial(serve_admin, made, listener, tls))
                services.start_soon(watch.run)
                self._warn_if_plain()
                services.start_soon(keys.run)
                self._warn_if_open(settings)
                async with trio.open_nursery() as control:
                    if leadership is not None:
                        control.start_soon(keys.follow)
                        control.start_soon(loads.run)
                    if leadership is not None and not leadership.leads:

                        async def again() -> None:
                            await book.refresh()
                            await jobs.load()
                            if identities is not None:
                                await identities.reload()

                        follower = Follower(
                            self._store, cluster, lambda: leadership.known, router.push, time.time, again
                        )
                        control.start_soon(follower.run)
                        if self._config.link is not None and identities is not None:
                            control.start_soon(identities.run)  # whom people's certificates keep out, and our own
                            gate = evolve(identities.gate(), join=None, renew=None, grace_s=0.0)
                            await control.start(partial(serve_link, self._config.link, follower.turn_away, gate=gate))
                    elif control_plane:
                        assert self._config.link is not None
                        assert identities is not None
                        control.start_soon(identities.run)
                        gate = identities.gate()
                        await control.start(partial(serve_link, self._config.link, agents.serve, gate=gate))
                        # Only from here on: a start that takes its time is nobody's silence.
                        cluster.listens(time.time())
                        control.start_soon(reconciler.run)
                    book.use = partial(self._use, cluster, router)
                    control.start_soon(self._start_anew, book)
                    leads = leadership is None or leadership.leads
                    control.start_soon(self._reloads, book if leads else None, identities)
                    self._log.info(
                        "ready",
                        version=__version__,
                        cluster=cluster.id,
                        epoch=cluster.epoch,
                        role=_role(leadership, control_plane),
                        router=str(self._config.router.listen),
                        admin=str(self._config.admin.listen),
                        link=str(self._config.link.listen) if control_plane and self._config.link else None,
                    )
                    await self._stopping.wait()
                    control.cancel_scope.cancel(reason=self._signal)
                if leadership is not None and leadership.leads and not self.hands_over:
                    await leadership.release()
                if not self.hands_over:
                    with self._step("router drained"):
                        with trio.move_on_after(self._config.router.drain_s + _KILL_MARGIN_S):
                            await router.drain(self._config.router.drain_s)
                services.cancel_scope.cancel(reason=self._signal)
            root.cancel_scope.cancel(reason=self._signal)
        self._log.info("stopped", signal=self._signal)

    async def _leadership(self, book: SettingsBook) -> Leadership | None:
        """This control plane's part among several, taken up: it leads, or follows. ``None`` where it is alone."""
        if not self._store.database.shared or self._config.link is None:
            return None
        if not (await book.peek()).needs_control_plane:
            return None
        link, admin = self._config.link, self._config.admin
        me = Leader(
            await trio.to_thread.run_sync(instance_of, Path(self._config.state_dir)),
            str(link.advertise or link.listen),
            str(admin.advertise or admin.listen),
        )
        leadership = Leadership(Leases(self._store.database), me)
        if await leadership.take():
            self._store.lead(leadership.epoch)
        elif leadership.known is not None:
            leadership.epoch = leadership.known.epoch
        return leadership

    def _part_over(self, reason: str) -> None:
        """Begin anew, in the other part: the lease is lost or free. The router's workers go on meanwhile."""
        self._signal, self.hands_over = reason, True
        self._stopping.set()

    def _route(self, cluster: Cluster, router: RouterWorkers) -> None:
        """Without profiles there is no reconcile pass, and what is routed is what the settings say."""
        state = cluster.state(time.time())
        self._table = table(cluster.settings, state, {}, int(cluster.started), self._table)
        router.push(self._table)

    def _warn_if_open(self, settings: Settings) -> None:
        if settings.router.auth is Auth.OPEN:
            self._log.warning(
                "the router is open: whoever reaches it may use every model",
                listen=str(self._config.router.listen),
                remedy="make keys with llmgw ctl keys create, then set router.auth: keys in the settings",
            )

    def _warn_if_plain(self) -> None:
        admin = self._config.admin
        if admin.tls is None and not is_loopback(admin.listen.host):
            self._log.warning(
                "the admin API is open to the network without TLS: whoever listens in has its tokens",
                listen=str(admin.listen),
                remedy="set admin.tls in server.yaml, or listen on 127.0.0.1",
            )

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        began = trio.current_time()
        yield
        self._log.info(name, seconds=round(trio.current_time() - began, 3))

    async def _signals(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2) as received:
            task_status.started()
            async for number in received:
                if number == signal.SIGHUP:
                    self._reload.set()
                elif self._stopping.is_set():
                    self._log.warning("second signal: ending at once")
                    os._exit(1)
                else:
                    self._signal = signal.Signals(number).name
                    self.hands_over = number == signal.SIGUSR2
                    self._log.info("starting anew" if self.hands_over else "stopping", signal=self._signal)
                    self._stopping.set()

    def _use(self, cluster: Cluster, router: RouterWorkers, settings: Settings, revision: int) -> None:
        """These settings hold from now on, wherever they came from."""
        cluster.use_settings(settings, revision)
        if not settings.needs_control_plane:
            self._route(cluster, router)
        self._warn_if_open(settings)

    async def _reloads(self, book: SettingsBook | None, identities: Identities | None) -> None:
        """At SIGHUP: certificates, and where it leads the settings' file."""
        while True:
            await self._reload.wait()
            self._reload = trio.Event()
            if identities is not None:
                identities.wake()
            if self._admin_tls is not None:
                try:
                    self._admin_tls.load()
                except OperatorError as wrong:
                    self._log.error("admin certificates refused; the old ones stay", error=str(wrong))
            try:
                if book is not None:
                    await book.reread()
            except OperatorError as wrong:
                self._log.error("settings refused; the old ones stay", error=str(wrong))

    async def _start_anew(self, book: SettingsBook) -> None:
        """A router became a control plane or the other way round: what runs in this process is another then."""
        await book.anew.wait()
        await trio.sleep(_ANSWER_S)  # whoever changed them gets an answer first
        if not self._stopping.is_set():
            self._signal, self.hands_over = "other settings", True
            self._log.info("starting anew", signal=self._signal)
            self._stopping.set()


def _role(leadership: Leadership | None, control_plane: bool) -> str:
    if not control_plane:
        return "router only"
    if leadership is None:
        return "control plane"
    return "leader" if leadership.leads else "follower"
