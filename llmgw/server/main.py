"""The control plane's daemon: what runs in it, in which order it starts, and in which it stops.

Order of start: state folder and store, router, admin listener, then the link and the reconcile loop. Order of
stop: the reverse, each step bounded and named, so that the log says which one was slow.
"""

from __future__ import annotations

import os
import signal
import socket
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
from llmgw.router.workers import stop_left
from llmgw.server.follower import Follower
from llmgw.server.leader import Leadership
from llmgw.server.parts import Parts, put_together
from llmgw.server.registry import table
from llmgw.server.settings_book import SettingsBook
from llmgw.server.signals import After, Signals
from llmgw.settings.daemon import ServerConfig
from llmgw.settings.document import Auth, Settings
from llmgw.store.database import LostLeadError, StoreAwayError
from llmgw.store.folder import held, instance_of
from llmgw.store.lease import Leader, Leases
from llmgw.store.opening import FILE, store_of
from llmgw.store.sql import SqlStore
from llmgw.telemetry.collector import spare_what_is_loaded
from llmgw.telemetry.logging import configure, logger
from llmgw.telemetry.open_files import as_many_as_allowed
from llmgw.web.admin_tls import is_loopback
from llmgw.web.serve import listen as listen_admin
from llmgw.web.serve import serve as serve_admin

_KILL_MARGIN_S = 2.0
_AGAIN_S = 2.0
_ANSWER_S = 0.5


def run(config: ServerConfig) -> None:
    """Run until a signal ends it. Raises :class:`OperatorError` when it cannot start."""
    configure(config.log, "server")
    spare_what_is_loaded()
    as_many_as_allowed()
    if trio.run(partial(_main, config), strict_exception_groups=True) is After.PROGRAM:
        # The same process, so that whoever started it keeps it in sight; what is on the disk by now is what runs. A
        # signal that comes before that listens for signals must not end it.
        for number in (signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606


async def _main(config: ServerConfig) -> After:
    """What is to come once this program is over."""
    with held(Path(config.state_dir), "server"), first_error():
        _not_lost(config)
        async with trio.open_nursery() as nursery:
            signals = Signals()
            await nursery.start(signals.listen)
            after = await _runs(config, signals)
            nursery.cancel_scope.cancel(reason=signals.name)
    return after


async def _runs(config: ServerConfig, signals: Signals) -> After:
    """One run of the daemon after the other, as it comes to lead or to follow, until one is the last."""
    log = logger("server")
    while not signals.stopping.is_set():
        try:
            with first_error():
                async with store_of(config.store, Path(config.state_dir)) as store:
                    server = Server(config, store, signals)
                    await server.run()
            if server.after is not After.PART:
                return server.after
            continue
        except LostLeadError as lost:
            log.error("no longer the leader", reason=str(lost))
        except StoreAwayError as away:
            # Others use it too: it comes back without us, and so may we. The router's workers go on meanwhile.
            log.error("the store cannot be used; trying again", error=str(away))
        with trio.move_on_after(_AGAIN_S):
            await signals.stopping.wait()
    if signals.after is After.END:
        await stop_left(Path(config.state_dir), config.router.drain_s)  # of the run before, if there was one
    return signals.after


def _not_lost(config: ServerConfig) -> None:
    """A new store in a folder that had one knows no key, and may not even know that keys are wanted: everybody would be
    let in. Raises :class:`OperatorError`."""
    folder = Path(config.state_dir)
    if config.store is None and (folder / COUNTS_FOLDER).exists() and not (folder / FILE).exists():
        raise OperatorError(
            str(folder / FILE),
            "is missing, though a server ran on this folder: keys and settings are not known",
            f"put it back, or a backup with llmgw server restore; to begin with nothing move {folder} away",
        )


class Server:
    """One run of the daemon over an open store. ``after`` says what is to come when it is over."""

    def __init__(self, config: ServerConfig, store: SqlStore, signals: Signals) -> None:
        self._config = config
        self._store = store
        self._signals = signals
        self._log = logger("server")
        self._over = trio.Event()
        self._reason = ""
        self._table = Table()
        self.after = After.END

    async def run(self) -> None:
        """Start everything, serve until a signal or until its part among others is another, then stop everything.

        The router's workers are left as they are unless this is the end.
        """
        book = SettingsBook(self._store, Path(self._config.settings), time.time, link=self._config.link is not None)
        leadership = await self._leadership(book)
        # From here on: what follows may take longer than a lease lasts.
        async with nullcontext() if leadership is None else leadership.kept(self._part_over):
            await self._serve(book, leadership)

    async def _serve(self, book: SettingsBook, leadership: Leadership | None) -> None:
        await book.start(records=leadership is None or leadership.leads)
        parts = await put_together(self._config, self._store, book, leadership)
        with listen_admin(self._config.admin.listen) as listener:
            await self._serve_parts(parts, listener, book, leadership)
        self._log.info("stopped", signal=self._reason)

    async def _serve_parts(
        self, parts: Parts, listener: socket.socket, book: SettingsBook, leadership: Leadership | None
    ) -> None:
        async with trio.open_nursery() as services:
            services.start_soon(self._stops)
            if not parts.control_plane:
                self._route(parts)
            await self._start_services(services, parts, listener)
            async with trio.open_nursery() as control:
                await self._start_part(control, parts, book, leadership)
                self._say_ready(parts, leadership)
                await self._over.wait()
                control.cancel_scope.cancel(reason=self._reason)
            if leadership is not None and leadership.leads and self.after is After.END:
                await leadership.release()
            if self.after is After.END:
                with self._step("router drained"):
                    with trio.move_on_after(self._config.router.drain_s + _KILL_MARGIN_S):
                        await parts.router.drain(self._config.router.drain_s)
            services.cancel_scope.cancel(reason=self._reason)

    async def _start_services(self, services: trio.Nursery, parts: Parts, listener: socket.socket) -> None:
        """Start what any control plane does, whether it leads or not: routing, and the admin side."""
        await services.start(parts.router.run)
        await services.start(partial(serve_admin, parts.admin, listener, parts.admin_tls))
        services.start_soon(parts.watch.run)
        self._warn_if_plain()
        services.start_soon(parts.keys.run)
        self._warn_if_open(parts.cluster.settings)

    async def _start_part(
        self, control: trio.Nursery, parts: Parts, book: SettingsBook, leadership: Leadership | None
    ) -> None:
        """Start what it does as leader, as follower, or as neither."""
        if leadership is not None:
            control.start_soon(parts.keys.follow)
            control.start_soon(parts.loads.run)
        leads = leadership is None or leadership.leads
        if leadership is not None and not leads:
            await self._start_following(control, parts, book, leadership)
        elif parts.control_plane:
            await self._start_leading(control, parts)
        book.use = partial(self._use, parts)
        control.start_soon(self._start_anew, book)
        control.start_soon(self._reloads, parts, book if leads else None)

    async def _start_following(
        self, control: trio.Nursery, parts: Parts, book: SettingsBook, leadership: Leadership
    ) -> None:
        async def again() -> None:
            await book.refresh()
            await parts.jobs.load()
            if parts.identities is not None:
                await parts.identities.reload()

        follower = Follower(self._store, parts.cluster, lambda: leadership.known, parts.router.push, time.time, again)
        control.start_soon(follower.run)
        if self._config.link is not None and parts.identities is not None:
            control.start_soon(parts.identities.run)  # whom people's certificates keep out, and our own
            gate = evolve(parts.identities.gate(), join=None, renew=None, grace_s=0.0)
            await control.start(partial(serve_link, self._config.link, follower.turn_away, gate=gate))

    async def _start_leading(self, control: trio.Nursery, parts: Parts) -> None:
        assert self._config.link is not None
        assert parts.identities is not None
        control.start_soon(parts.identities.run)
        gate = parts.identities.gate()
        await control.start(partial(serve_link, self._config.link, parts.agents.serve, gate=gate))
        # Only from here on: a start that takes its time is nobody's silence.
        parts.cluster.listens(time.time())
        control.start_soon(parts.reconciler.run)

    def _say_ready(self, parts: Parts, leadership: Leadership | None) -> None:
        self._log.info(
            "ready",
            version=__version__,
            cluster=parts.cluster.id,
            epoch=parts.cluster.epoch,
            role=_role(leadership, parts.control_plane),
            router=str(self._config.router.listen),
            admin=str(self._config.admin.listen),
            link=str(self._config.link.listen) if parts.control_plane and self._config.link else None,
        )

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
        self._end(reason, After.PART)

    async def _stops(self) -> None:
        await self._signals.stopping.wait()
        self._end(self._signals.name, self._signals.after)

    def _end(self, reason: str, after: After) -> None:
        """This run is over, whatever else would end it later."""
        if not self._over.is_set():
            self._reason, self.after = reason, after
            self._over.set()

    def _route(self, parts: Parts) -> None:
        """Without profiles there is no reconcile pass, and what is routed is what the settings say."""
        cluster = parts.cluster
        state = cluster.state(time.time())
        self._table = table(cluster.settings, state, {}, int(cluster.started), self._table)
        parts.router.push(self._table)

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

    def _use(self, parts: Parts, settings: Settings, revision: int) -> None:
        """These settings hold from now on, wherever they came from."""
        parts.cluster.use_settings(settings, revision)
        if not settings.needs_control_plane:
            self._route(parts)
        self._warn_if_open(settings)

    async def _reloads(self, parts: Parts, book: SettingsBook | None) -> None:
        """At SIGHUP: certificates, and where it leads the settings' file."""
        while True:
            await self._signals.reload.wait()
            self._signals.reload = trio.Event()
            if parts.identities is not None:
                parts.identities.wake()
            if parts.admin_tls is not None:
                try:
                    parts.admin_tls.load()
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
        if not self._over.is_set():
            self._log.info("starting anew", signal="other settings")
            self._end("other settings", After.PART)


def _role(leadership: Leadership | None, control_plane: bool) -> str:
    if not control_plane:
        return "router only"
    if leadership is None:
        return "control plane"
    return "leader" if leadership.leads else "follower"
