"""The node's daemon: what runs in it, and how it ends without ending any engine."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import trio

from llmgw import __version__
from llmgw.agent import cgroup
from llmgw.agent.dispatch import Dispatch
from llmgw.agent.doctor import Doctor
from llmgw.agent.epoch import Epoch, EpochFile
from llmgw.agent.hardware import Hardware
from llmgw.agent.identity import NodeIdentity
from llmgw.agent.jobs.installs import Installs
from llmgw.agent.jobs.runner import Jobs
from llmgw.agent.jobs.works import NodeWorks
from llmgw.agent.kept import KeptFile
from llmgw.agent.link_file import LinkFile
from llmgw.agent.offers import Offers
from llmgw.agent.outbox import Outbox
from llmgw.agent.own_file import OwnFile
from llmgw.agent.session import Link
from llmgw.agent.shards import Shards
from llmgw.agent.systemd import notify
from llmgw.agent.tails import Tails
from llmgw.agent.turnover import Turnover
from llmgw.agent.weights import Weights
from llmgw.discovery.weights import hub_cache
from llmgw.errors import OperatorError, first_error
from llmgw.hardware.inventory import Inventory
from llmgw.link.client import Backoff, connect
from llmgw.link.own import OwnFiles
from llmgw.link.session import Session
from llmgw.scheduler.state import ShardReport
from llmgw.settings.daemon import Address, AgentConfig
from llmgw.settings.load_agent import agent_of
from llmgw.store.folder import held
from llmgw.telemetry.logging import configure, logger


def run(path: Path, step: Callable[[str], None] = lambda _: None) -> None:
    """Run the agent of this ``agent.yaml`` until a signal ends it.

    ``step`` is told what is done when it starts again. Raises :class:`llmgw.errors.OperatorError` when it cannot start.
    """
    own = OwnFile(path)
    written = own.read()
    config = agent_of(written.document, written.folder)
    configure(config.log, "agent")
    with held(Path(config.state_dir), "agent"), first_error():
        turnover = Turnover(own, KeptFile(Path(config.state_dir)), _life, usable, step)
        trio.run(_main, turnover, strict_exception_groups=True)
        turnover.stopped()
        logger("agent").info("stopped")


async def _main(turnover: Turnover) -> None:
    async with trio.open_nursery() as root:
        await root.start(_signals, root.cancel_scope, turnover.look_again)
        await turnover.run()


def usable(config: AgentConfig) -> None:
    """Raise :class:`OperatorError` when this machine lacks what only shows once the agent runs on it. Blocking."""
    root = Path(config.discovery.root)
    if not root.is_dir():
        raise OperatorError("discovery.root", f"{root} is not a folder on this node", "make it, or name another one")


async def _life(
    config: AgentConfig, offers: Offers, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """All that an agent is on one configuration, until it is cancelled. Started once it is up."""
    configure(config.log, "agent")
    log = logger("agent")
    epoch = Epoch(EpochFile(Path(config.state_dir)))
    outbox = Outbox()
    hardware = Hardware(config.discovery, config.fabrics, Path(config.state_dir), outbox.hardware)

    def shard_changed(report: ShardReport) -> None:
        outbox.report(report)
        if report.state.ended:
            # What killed it may have been a device, and its memory must be seen to be free before others get it.
            hardware.look_again()

    delegation = await trio.to_thread.run_sync(cgroup.delegated)
    installs = await trio.to_thread.run_sync(Installs, config)
    works = NodeWorks(config, installs, lambda: trio.from_thread.run_sync(outbox.engines))
    jobs = Jobs(Path(config.state_dir), works, outbox.job, time.time)
    shards = Shards(
        config, shard_changed, time.time, hardware=hardware, delegation=delegation, jobs=jobs, engines=installs.engine
    )

    def inventory() -> Inventory:
        return hardware.inventory

    doctor = Doctor(config, outbox.result)
    dispatch = Dispatch(shards, epoch, inventory, jobs, doctor)
    own = OwnFiles(config.tls, Path(config.state_dir))
    source = random.Random()  # noqa: S311 - jitter, not a secret
    identity = NodeIdentity(config.id, config.trust_domain, own, time.time, source)

    def dial(address: Address) -> AbstractAsyncContextManager[Session]:
        return connect(address, own.files(), config.trust_domain)

    backoff = Backoff(source)
    weights = Weights(config.weights_dir, hub_cache(os.environ), config.discovery.interval_s, outbox.weights)
    link = Link(
        config,
        dial,
        shards.reports,
        dispatch,
        inventory,
        epoch,
        outbox,
        backoff,
        time.time,
        shards.loads,
        weights,
        jobs=jobs.reports,
        installs=installs.listed,
        identity=identity,
        settings=offers,
        stands=LinkFile(Path(config.state_dir)).write,
        tails=lambda send: Tails(Path(config.state_dir), shards.secret, shards.writes, send),
    )
    try:
        async with trio.open_nursery() as root:
            await root.start(shards.run)
            await root.start(jobs.run)
            # After the engines are adopted: a driver that hangs must not keep anybody from them.
            found = await hardware.read()
            root.start_soon(hardware.run)
            root.start_soon(weights.run)
            root.start_soon(doctor.run)
            root.start_soon(link.run)
            log.info(
                "ready",
                version=__version__,
                node=config.id,
                settings=offers.revision,
                devices=len(found.devices),
                cgroup=None if delegation is None else str(delegation),
                adopted=sum(1 for _ in shards.alive()),
                control_planes=[str(a) for a in config.control_planes],
            )
            notify("READY=1")
            task_status.started()
    finally:
        log.info("engines are left serving", engines=sum(1 for _ in shards.alive()))


async def _signals(
    scope: trio.CancelScope,
    look_again: Callable[[], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    log = logger("agent")
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
        task_status.started()
        async for number in received:
            if number == signal.SIGHUP:
                look_again()
                continue
            name = signal.Signals(number).name
            log.info("stopping; engines go on", signal=name)
            notify("STOPPING=1")
            scope.cancel(reason=name)  # and with it this receiver: a second signal ends the process at once
