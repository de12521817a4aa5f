"""All shards of this node: their supervisors, the ports and devices that they have, and what was left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import trio
from attrs import evolve

from llmgw.agent import attempts, cgroup, logs, process, proctree, records
from llmgw.agent.ending import remaining
from llmgw.agent.fetching import Fetching
from llmgw.agent.hardware import Hardware
from llmgw.agent.jobs.cache import Repository
from llmgw.agent.jobs.runner import Jobs
from llmgw.agent.proctree import PROC
from llmgw.agent.records import Record
from llmgw.agent.shard import Shard, adopted, begin
from llmgw.agent.supervisor import DIAGNOSED_LINES, Supervisor
from llmgw.discovery.host import boot_id
from llmgw.discovery.interfaces import interface_of
from llmgw.engines.base import Launch, ShardSpec
from llmgw.engines.diagnosis import Diagnosis, diagnose
from llmgw.engines.registry import build
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Device, Fabric, Inventory
from llmgw.link.messages import StartShard
from llmgw.scheduler.jobs import Fetch
from llmgw.scheduler.scale import EngineLoad
from llmgw.scheduler.state import Exit, ShardReport, ShardState
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import Address, AgentConfig, EngineInstall
from llmgw.settings.sources import HubSource, allowed, hub_source
from llmgw.telemetry.logging import logger

_KEY_BYTES = 24
_NOT_YET = "/not/fetched/yet"
"""What stands for weights in a launch that is only checked."""

_MARK_BYTES = 16
_FIRST_LOOK_S = 1.0
_SETTLE_S = 5.0
_AGAIN_S = 1.0
_SHIM_END_LOOKS = 100
_SHIM_END_LOOK_S = 0.05


class Shards:
    """The shards that run here or ended and are not forgotten. ``changed`` is called with each one that changes.

    With ``jobs`` weights that are not here are fetched first. With ``hardware`` the memory of the devices is watched,
    and with ``delegation``, a cgroup of ours, each engine gets one below it.
    """

    def __init__(
        self,
        config: AgentConfig,
        changed: Callable[[ShardReport], None],
        clock: Callable[[], float],
        *,
        hardware: Hardware | None = None,
        delegation: Path | None = None,
        proc: Path = PROC,
        jobs: Jobs | None = None,
        engines: Callable[[EngineKind], EngineInstall | None] | None = None,
    ) -> None:
        self._config = config
        self._engines = engines or config.engine
        self._jobs = jobs
        self._folder = Path(config.state_dir) / "shards"
        self._logs = Path(config.state_dir) / "logs"
        self._hardware = hardware
        self._delegation = delegation
        self._proc = proc
        self._changed = changed
        self._clock = clock
        self._known: dict[tuple[str, int], Supervisor | Fetching] = {}
        self._nursery: trio.Nursery | None = None
        self._log = logger("shards")

    def reports(self) -> tuple[ShardReport, ...]:
        """What to say of every shard, by name."""
        return tuple(s.report() for _, s in sorted(self._known.items()))

    def loads(self) -> tuple[EngineLoad, ...]:
        """What the engines that serve said last of their work, by shard."""
        serving = (ShardState.READY, ShardState.DRAINING)
        engines = (s for _, s in sorted(self._known.items()) if isinstance(s, Supervisor) and s.shard.state in serving)
        return tuple(engine.load for engine in engines if engine.load is not None)

    def find(self, shard: str, generation: int) -> Supervisor | Fetching | None:
        """The supervisor of this start of this shard."""
        return self._known.get((shard, generation))

    def alive(self) -> Iterable[Supervisor | Fetching]:
        """Those whose engine has not ended, or is to be started once its weights are here."""
        return [s for s in self._known.values() if not s.shard.state.ended]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own every supervisor until cancelled. Started once everything that was left behind is adopted."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await self._adopt()
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def _adopt(self) -> None:
        """Take over what was left behind. Raises :class:`OperatorError`: rather no agent than one that does not see."""
        try:
            await trio.to_thread.run_sync(self._make_folder)
            for folder in await trio.to_thread.run_sync(records.folders, self._folder):
                await self._take_over(folder)
        except OSError as failed:
            where = failed.filename or self._folder
            raise OperatorError(
                str(where), f"cannot be used: {failed.strerror}", "check the disk and the limit of open files"
            ) from failed

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.is_symlink():
            raise OperatorError(str(self._folder), "is a symbolic link", "move what it names here")

    async def _take_over(self, folder: Path) -> None:
        """Adopt what runs, report what has ended, and drop what never was."""
        if not await trio.to_thread.run_sync((folder / "record.json").exists):
            # It was being moved to the logs when the last agent died.
            with suppress(OSError):
                await trio.to_thread.run_sync(attempts.retire, folder, self._logs)
            return
        try:
            record = await trio.to_thread.run_sync(records.read, folder)
        except OperatorError as wrong:
            self._log.error("a launch record cannot be read; nothing is signalled", error=str(wrong))
            return
        now = self._clock()
        end = await trio.to_thread.run_sync(records.end, folder)
        if end is None and await trio.to_thread.run_sync(_lives, folder, record):
            since = record.since or record.started
            shard = adopted(record.state, record.model, record.profile.limits, now, since, record.rank)
            supervisor = self._add(folder, record, shard, adopted=True)
            if shard.state in (ShardState.STARTING, ShardState.LOADING):
                # It may have become ready in the very moment in which the last agent died.
                await supervisor.look(_FIRST_LOOK_S)
            supervisor.attach()
            state = supervisor.shard.state
            self._log.info("adopted", shard=record.shard, generation=record.generation, state=state.value)
            assert self._nursery is not None
            self._nursery.start_soon(self._supervise, supervisor)
            return
        if end is None and await trio.to_thread.run_sync(records.pids, folder) is None:
            self._log.info("a launch that never came about is dropped", shard=record.shard)
            await trio.to_thread.run_sync(records.remove, folder)
            return
        lines = await trio.to_thread.run_sync(logs.tail, folder, DIAGNOSED_LINES)
        shard = _past(record, end, diagnose(lines), now)
        supervisor = self._add(folder, record, shard, adopted=True)
        supervisor.log_tail = lines[-logs.TAIL_LINES :]
        if await trio.to_thread.run_sync(supervisor.tracking.left):
            self._log.warning("an engine has ended and left processes behind", shard=record.shard, reason=shard.reason)
            supervisor.shard = remaining(shard, now)
            supervisor.tracking.became(ShardState.STOPPING)
            assert self._nursery is not None
            self._nursery.start_soon(self._supervise, supervisor)
            return
        supervisor.done.set()
        supervisor.settled.set()
        self._log.warning("an engine has ended", shard=record.shard, reason=shard.reason)

    def _add(self, folder: Path, record: Record, shard: Shard, *, adopted: bool) -> Supervisor:
        supervisor = Supervisor(
            folder, record, shard, self._on_change, self._clock,
            adopted=adopted, hardware=self._hardware, proc=self._proc,
        )  # fmt: skip
        self._known[supervisor.key] = supervisor
        return supervisor

    def _on_change(self, supervisor: Supervisor) -> None:
        self._changed(supervisor.report())

    async def _supervise(self, supervisor: Supervisor) -> None:
        """Run a supervisor; a fault in it is a fault of its shard and ends no other, and is tried again."""
        try:
            while not supervisor.done.is_set():
                try:
                    await self._attend(supervisor)
                except* OSError as failed:
                    said = ", ".join(sorted({str(one) for one in _single(failed)}))
                    self._log.error("supervision failed; the engine goes on", shard=supervisor.record.shard, error=said)
                    await trio.sleep(_AGAIN_S)
        finally:
            supervisor.settled.set()

    async def _attend(self, supervisor: Supervisor) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._remember, supervisor)
            await supervisor.run()
            nursery.cancel_scope.cancel(reason="the shard has ended")
        await self._write_down(supervisor)

    async def _remember(self, supervisor: Supervisor) -> None:
        """Write the shard's state down as it changes, so that an adopted engine is known to be ready."""
        while True:
            await supervisor.moved.wait()
            supervisor.moved = trio.Event()
            await self._write_down(supervisor)
            supervisor.written()

    async def _write_down(self, supervisor: Supervisor) -> None:
        try:
            await trio.to_thread.run_sync(records.write, supervisor.folder, supervisor.record)
        except OSError as failed:
            self._log.error("the record cannot be written", shard=supervisor.record.shard, error=str(failed))

    async def start(self, command: StartShard, inventory: Inventory) -> None:
        """Launch an engine. Raises :class:`OperatorError` with the reason when it cannot be started here."""
        if self._nursery is None:
            raise OperatorError(command.shard, "the agent is stopping")
        config = self._config
        install = self._engines(command.profile.engine)
        if install is None:
            raise OperatorError(
                f"engine {command.profile.engine.value}",
                f"is not installed on {config.id}",
                f"add engines.{command.profile.engine.value} to agent.yaml, or install one with llmgw ctl install",
            )
        devices = self._devices(command, inventory)
        self._refuse_held(devices, inventory)
        source = hub_source(command.profile.weights)
        if source is not None and not allowed(source, command.weights.sources):
            raise OperatorError(str(source), "is not in weights.sources of the settings", "add it there")
        local = await self._local(source)
        port = self._port()
        rendezvous = command.rendezvous
        fabric, interface = None, ""
        if command.profile.nodes > 1:
            fabric = _fabric(command.fabric, inventory, config.id)
            interface = await self._interface()
            if command.rank == 0:
                rendezvous = Address(config.address, self._port(besides=port))
        spec = ShardSpec(
            model=command.model,
            profile=command.profile,
            devices=devices,
            install=install,
            host=config.address,
            port=port,
            weights_dir=config.weights_dir,
            rank=command.rank,
            api_key=f"sk-llmgw-{secrets.token_urlsafe(_KEY_BYTES)}",
            rendezvous=rendezvous,
            interface=interface,
            fabric=fabric,
            addresses=command.addresses,
            fetched=None if source is None else local or _NOT_YET,
        )
        launch = build(spec)
        record = self._record(command, spec, launch)
        if source is not None and local is None:
            await self._fetch(command, source, spec, record)
        else:
            await self._launch(record, launch)

    def _record(self, command: StartShard, spec: ShardSpec, launch: Launch) -> Record:
        now = self._clock()
        mark = secrets.token_hex(_MARK_BYTES)
        return Record(
            cluster=command.cluster,
            replica=command.replica,
            shard=command.shard,
            generation=command.generation,
            rank=command.rank,
            model=command.model,
            profile=command.profile,
            profile_digest=command.profile_digest,
            devices=tuple(d.number for d in spec.devices),
            uuids=tuple(d.uuid for d in spec.devices),
            argv=launch.argv,
            host=launch.host,
            port=launch.port,
            ready_name=launch.ready_name,
            health_path=launch.health_path,
            models_path=launch.models_path,
            probe_timeout_s=launch.probe_timeout_s,
            boot_id=boot_id(),
            started=now,
            api_key=launch.api_key,
            since=now,
            rendezvous=spec.rendezvous if command.rank == 0 else None,
            launch=mark,
            cgroup=cgroup.path_for(self._delegation, command.shard, command.generation, mark),
        )

    async def _local(self, source: HubSource | None) -> str | None:
        """Where weights of a hub are on this node, if they are here whole."""
        if source is None:
            return None
        repository = Repository(Path(self._config.weights_cache), source.repository)
        path = await trio.to_thread.run_sync(repository.complete, source.revision, source.file)
        return None if path is None else str(path)

    async def _fetch(self, command: StartShard, source: HubSource, spec: ShardSpec, record: Record) -> None:
        """Let the shard wait for its weights; devices and ports are its own meanwhile."""
        if self._jobs is None or self._nursery is None:
            raise OperatorError(str(source), "is not on this node, and this agent fetches nothing")
        rules = command.weights
        job = await self._jobs.fetch(Fetch(str(source), rules.mirror, rules.offline), command.shard)
        fetching = Fetching(record, job, lambda it: self._changed(it.report()), self._clock)
        self._known[fetching.key] = fetching
        self._changed(fetching.report())
        self._nursery.start_soon(self._when_fetched, fetching, spec)

    async def _when_fetched(self, fetching: Fetching, spec: ShardSpec) -> None:
        assert self._jobs is not None
        record, job = fetching.record, fetching.job
        try:
            fetched = await fetching.wait()
        finally:
            if fetching.shard.state.ended:
                self._jobs.leave(job, record.shard)
        if not fetched:
            return
        try:
            launch = build(evolve(spec, fetched=job.report.result["path"]))
            now = self._clock()
            supervisor = await self._launch(evolve(record, argv=launch.argv, started=now, since=now), launch)
            if fetching.stop_asked is not None:
                supervisor.stop(*fetching.stop_asked)
        except OperatorError as refused:
            fetching.fail(f"{refused.thing}: {refused.reason}", refused.remedy)

    async def _launch(self, record: Record, launch: Launch) -> Supervisor:
        """Start the engine; from then on the shard has a supervisor. Raises :class:`OperatorError`."""
        folder = records.folder_of(self._folder, record.shard, record.generation)
        shard = begin(record.model, record.profile.limits, record.started, record.rank)
        before = self._known.get((record.shard, record.generation))
        supervisor = self._add(folder, record, shard, adopted=False)
        try:
            await self._spawn(supervisor, launch)
        except trio.Cancelled:
            # Only before anything was started: the launch itself is shielded.
            self._put_back(supervisor, before)
            raise
        except OperatorError as failed:
            if _given_up(folder):
                self._put_back(supervisor, before)
                raise
            self._log.warning("its shim takes long, and is waited for", shard=record.shard, reason=failed.reason)
        self._changed(supervisor.report())
        self._watch(supervisor)
        return supervisor

    def _watch(self, supervisor: Supervisor) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._supervise, supervisor)
        else:
            supervisor.let_go()  # the agent has stopped meanwhile

    def _put_back(self, supervisor: Supervisor, before: Supervisor | Fetching | None) -> None:
        if before is None:
            del self._known[supervisor.key]
        else:
            self._known[supervisor.key] = before

    async def _spawn(self, supervisor: Supervisor, launch: Launch) -> None:
        """Write the record, then start the shim. Raises :class:`OperatorError`."""
        folder, record = supervisor.folder, supervisor.record
        marks = proctree.marks(record.shard, record.generation, record.launch)
        env = process.environment(os.environ, launch.env, launch.secrets, marks)
        try:
            await trio.to_thread.run_sync(records.write, folder, record)
            await trio.to_thread.run_sync(records.write_files, folder, launch.files)
        except OSError as failed:
            raise OperatorError(str(folder), f"cannot be written: {failed.strerror}", "check the disk") from failed
        await process.spawn(folder, record.argv, env, record.cgroup, orderly=launch.orderly)
        supervisor.attach()
        if record.cgroup_path is not None and not record.cgroup_path.exists():
            self._log.warning("its cgroup could not be made; it runs in ours", shard=record.shard, path=record.cgroup)

    def _devices(self, command: StartShard, inventory: Inventory) -> tuple[Device, ...]:
        """The devices that are meant. Raises :class:`OperatorError` for one that is not there."""
        devices = []
        for position, number in enumerate(command.devices):
            uuid = command.uuids[position] if len(command.uuids) == len(command.devices) else None
            device = inventory.device(number) if uuid is None else inventory.by_uuid(uuid)
            if device is None:
                where = f"device {number}" if uuid is None else f"device {uuid}"
                raise OperatorError(where, f"is not on {self._config.id}", "wait for the next registration")
            devices.append(device)
        return tuple(devices)

    def _refuse_held(self, devices: tuple[Device, ...], inventory: Inventory) -> None:
        """One engine a device, and one a memory: two that measure what is free mislead each other.

        Raises :class:`OperatorError` naming the shard that has it.
        """
        for other in self.alive():
            theirs = [d for uuid in other.record.uuids if (d := inventory.by_uuid(uuid)) is not None]
            for device in devices:
                if device.uuid in other.record.uuids:
                    raise OperatorError(device.label, f"is held by shard {other.record.shard}", "stop that one first")
                for held in theirs:
                    if device.shares_memory(held):
                        reason = f"shares its memory with {held.label}, which shard {other.record.shard} has"
                        raise OperatorError(device.label, reason, "stop that one first")

    async def _interface(self) -> str:
        """The network interface that carries this node's address, over which the ranks meet.

        Raises :class:`OperatorError` where none does: NCCL would pick one by itself, and wait there for ever.
        """
        address = self._config.address
        found = await interface_of(address)
        if found is None:
            raise OperatorError(
                f"address {address}",
                f"is on no network interface of {self._config.id}",
                "set `address` in agent.yaml to this node's own address",
            )
        return found

    async def forget(self, shard: str, generation: int) -> None:
        """Drop an ended shard's record and keep its log among the last ones (:mod:`llmgw.agent.attempts`).

        Raises :class:`OperatorError` while it has not ended.
        """
        supervisor = self._known.get((shard, generation))
        if supervisor is None:
            return
        if not supervisor.shard.state.ended:
            raise OperatorError(f"shard {shard}", f"is {supervisor.shard.state.value}", "stop it first")
        if isinstance(supervisor, Fetching):
            del self._known[shard, generation]
            return
        with trio.move_on_after(_SETTLE_S):
            await supervisor.settled.wait()
        # Its shim ends right after it wrote down how the engine ended.
        for _ in range(_SHIM_END_LOOKS):
            try:
                gone = await trio.to_thread.run_sync(self._retire, supervisor)
            except OSError as failed:
                raise OperatorError(str(supervisor.folder), f"cannot be moved: {failed.strerror}", "") from failed
            if gone:
                self._known.pop((shard, generation), None)
                return
            await trio.sleep(_SHIM_END_LOOK_S)
        raise OperatorError(str(supervisor.folder), "its shim has not ended", "look for the process that holds `lock`")

    def _retire(self, supervisor: Supervisor) -> bool:
        if (supervisor.folder / "record.json").exists():
            attempts.summarize(supervisor.folder, supervisor.record, supervisor.shard)
        return not supervisor.folder.exists() or attempts.retire(supervisor.folder, self._logs)

    def _port(self, besides: int | None = None) -> int:
        """A port that no shard of ours has and that can be bound right now."""
        taken = {s.record.port for s in self.alive()} | {besides}
        taken |= {s.record.rendezvous.port for s in self.alive() if s.record.rendezvous is not None}
        family = socket.AF_INET6 if ":" in self._config.address else socket.AF_INET
        for port in range(self._config.port_first, self._config.port_last + 1):
            if port in taken:
                continue
            try:
                with socket.socket(family, socket.SOCK_STREAM) as trial:
                    trial.bind((self._config.address, port))
            except OSError as failed:
                proctree.must_be_seen(failed)
                continue
            return port
        raise OperatorError(
            f"ports {self._config.port_first}-{self._config.port_last}",
            f"none is free on {self._config.address}",
            "widen `ports` in agent.yaml, and check that `address` is this node's",
        )


def _fabric(label: str | None, inventory: Inventory, node: str) -> Fabric:
    """The fabric of a replica over several nodes. Raises :class:`OperatorError` where this node is not wholly on it."""
    found = next((f for f in inventory.fabrics if f.label == label), None)
    if found is None:
        raise OperatorError(f"fabric {label}", f"is not declared on {node}", f"add fabrics.{label} to its agent.yaml")
    if found.faults:
        raise OperatorError(f"fabric {label}", found.faults[0].reason, found.faults[0].remedy)
    return found


def _past(record: Record, end: records.End | None, found: Diagnosis | None, now: float) -> Shard:
    """A shard whose engine ended before this agent started."""
    code = end.exit if end is not None else Exit()
    if record.state in (ShardState.STOPPED, ShardState.STOPPING):
        return Shard(ShardState.STOPPED, record.since or now, "stopped before this agent started", "", exit=code)
    if end is not None:
        reason = end.error or f"the engine ended without being asked while no agent ran: {end.exit}"
    elif record.boot_id == boot_id():
        reason = "the engine ended while neither agent nor shim ran"
    else:
        reason = "the machine was restarted"
    if found is not None:
        reason = f"{found.cause}; {reason}"
    return Shard(ShardState.FAILED, end.at if end is not None else now, reason, "", exit=code, diagnosis=found)


def _single(failed: BaseExceptionGroup[OSError]) -> Iterator[OSError]:
    for one in failed.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _single(one)
        else:
            yield one


def _given_up(folder: Path) -> bool:
    """Drop a launch that failed, unless its shim lives. A few small files, and no checkpoint that could lose why."""
    try:
        if (folder / "lock").exists():
            return records.remove(folder)
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)  # no shim came as far as its lock
    return True


def _lives(folder: Path, record: Record) -> bool:
    """Whether a shim holds the folder, or the engine itself is still the process that was started."""
    with records.lock(folder) as free:
        if not free:
            return True
        pids = records.pids(folder)
        if pids is None or pids.engine is None or record.boot_id != boot_id():
            return False
        return process.start_time(pids.engine) == pids.engine_start
