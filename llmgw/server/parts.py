"""What a control plane is made of, put together: each part finds what the store remembers, and none of them runs."""

from __future__ import annotations

import time
from pathlib import Path

from attrs import frozen
from starlette.types import ASGIApp

from llmgw import __version__
from llmgw.router.counts import COUNTS_FOLDER
from llmgw.router.workers import RouterWorkers
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster, remembered
from llmgw.server.doctors import Doctors
from llmgw.server.identities import Identities
from llmgw.server.identity_admin import IdentityAdmin
from llmgw.server.jobs import Jobs
from llmgw.server.keys import KeyBook
from llmgw.server.leader import Leadership
from llmgw.server.loads import Loads
from llmgw.server.operations import Operations
from llmgw.server.reconcile import Reconciler
from llmgw.server.settings_book import SettingsBook
from llmgw.server.status import Status
from llmgw.settings.daemon import ServerConfig
from llmgw.store.sql import SqlStore
from llmgw.telemetry.metrics import ControlPlaneMetrics
from llmgw.web.access import Access
from llmgw.web.admin_tls import AdminTlsContext, trust_domain
from llmgw.web.api import app
from llmgw.web.auth import token_of
from llmgw.web.watch import Watch


@frozen
class Parts:
    """The parts that run. ``control_plane`` says whether any model is placed; else it is a router alone.

    ``identities`` are there where agents may connect.
    """

    control_plane: bool
    cluster: Cluster
    router: RouterWorkers
    keys: KeyBook
    jobs: Jobs
    identities: Identities | None
    agents: Agents
    reconciler: Reconciler
    loads: Loads
    watch: Watch
    admin: ASGIApp
    admin_tls: AdminTlsContext | None


async def put_together(
    config: ServerConfig, store: SqlStore, book: SettingsBook, leadership: Leadership | None
) -> Parts:
    """The parts of one run on settings that have been found. Raises :class:`llmgw.errors.OperatorError`."""
    started, folder = time.time(), Path(config.state_dir)
    control_plane = book.settings.needs_control_plane
    metrics = ControlPlaneMetrics()
    epoch = None if leadership is None else leadership.epoch
    cluster = await remembered(store, book.settings, started, lambda: reconciler.wake(), book.revision, epoch=epoch)
    router = RouterWorkers(folder, config.router, config.log)
    keys = KeyBook(store.keys, router, folder / COUNTS_FOLDER, time.time, lambda: cluster.settings.keys)
    await keys.load()
    router.serve_keys(keys)
    cluster.full = router.fill
    jobs = Jobs(
        store, cluster.epoch, lambda: cluster.settings, cluster.nodes,
        lambda node, commands: agents.dispatch(node, commands), time.time,
    )  # fmt: skip
    await jobs.load()
    identities: Identities | None = None
    if control_plane and config.link is not None:
        identities = Identities(
            config.link,
            store.identities,
            time.time,
            lambda: agents.look_again(),
            lambda node: agents.connected(node),
        )
        await identities.load()
    doctors = Doctors(
        cluster.epoch, cluster.nodes, cluster.linked, lambda node, commands: agents.dispatch(node, commands),
        time.time, lambda: (c for m in cluster.settings.models for p in m.profiles for c in p.device_class),
    )  # fmt: skip
    agents = Agents(cluster, store, time.time, jobs, identities, doctors)
    reconciler = Reconciler(cluster, store, agents, router.push, time.time, metrics, int(started))
    status = Status(cluster, store, router, metrics, lambda: book.revision, __version__, time.time, keys, leadership)
    access = Access(
        token_of(folder),
        store.people,
        time.time,
        trust_domain(config),
        lambda chain: None if identities is None else identities.kept_out(chain),
    )
    watch = Watch(status, jobs, access)
    loads = Loads(leadership, lambda load: cluster.loaded(load, time.time()))
    # The router starts before the link: an adopted one gets its table from what the store remembers.
    router.on_load(loads.own)
    nodes = None if identities is None else IdentityAdmin(identities, cluster, agents, time.time)
    operations = Operations(cluster, store, time.time, agents) if control_plane else None
    history = store, folder
    admin = app(status, access, jobs, nodes, keys, history, doctors, operations, book, store.people, watch)
    tls = None if config.admin.tls is None else AdminTlsContext(config.admin.tls)
    return Parts(
        control_plane, cluster, router, keys, jobs, identities, agents, reconciler, loads, watch, admin, tls
    )  # fmt: skip
