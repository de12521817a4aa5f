"""One start of a shard: checked against this node, built, written down, and launched under its shim."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

import trio
from attrs import evolve, frozen

from llmgw.agent import cgroup, process, proctree, records
from llmgw.agent.jobs.cache import Repository
from llmgw.agent.records import Record
from llmgw.discovery.host import boot_id
from llmgw.discovery.interfaces import interface_of
from llmgw.engines.base import Launch, ShardSpec
from llmgw.engines.registry import build, ports_of
from llmgw.engines.weights import adapter_path
from llmgw.errors import ConflictError, OperatorError
from llmgw.hardware.inventory import Device, Fabric, Inventory
from llmgw.link.messages import StartShard
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import Address, AgentConfig, EngineInstall
from llmgw.settings.paths import below
from llmgw.settings.sources import HubSource, allowed, hub_source
from llmgw.telemetry.logging import logger

_KEY_BYTES = 24
_MARK_BYTES = 16
_NOT_YET = "/not/fetched/yet"
"""What stands for weights in a launch that is only checked."""


@frozen
class Prepared:
    """A start that nothing here speaks against; ``missing`` are weights that are to be fetched first."""

    record: Record
    spec: ShardSpec
    launch: Launch
    missing: HubSource | None

    def launched(self, path: str | None, now: float) -> Prepared:
        """The same as it is launched now, with weights that were fetched to ``path``. Raises :class:`OperatorError`."""
        spec = self.spec if path is None else evolve(self.spec, fetched=path)
        launch = build(spec)
        return Prepared(evolve(self.record, argv=launch.argv, started=now, since=now), spec, launch, None)


class Launches:
    """Prepares starts. ``taken`` has the records of all shards that have not ended: nobody is given what is theirs."""

    def __init__(
        self,
        config: AgentConfig,
        engines: Callable[[EngineKind], EngineInstall | None],
        clock: Callable[[], float],
        taken: Callable[[], Iterable[Record]],
        delegation: Path | None,
    ) -> None:
        self._config = config
        self._engines = engines
        self._clock = clock
        self._taken = taken
        self._delegation = delegation

    async def prepare(self, command: StartShard, inventory: Inventory) -> Prepared:
        """Check a start and build its command. Raises :class:`OperatorError` with what speaks against it."""
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
        local = None if source is None else await self._local(source)
        port = self._port(lambda port: ports_of(command.profile, port, None))
        fabric, interface = None, ""
        if command.profile.nodes > 1:
            fabric = _fabric(command.fabric, inventory, config.id)
            interface = await self._interface()
        rendezvous = command.rendezvous
        if command.profile.nodes > 1 and command.rank == 0:
            meets = self._port(lambda meeting: ports_of(command.profile, port, meeting) - {port}, besides=port)
            rendezvous = Address(config.address, meets)
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
        await trio.to_thread.run_sync(_refuse_links, spec)
        await trio.to_thread.run_sync(_refuse_odd_files, spec)
        return Prepared(self._record(command, spec, launch), spec, launch, source if local is None else None)

    async def _local(self, source: HubSource) -> str | None:
        """Where weights of a hub are on this node, if they are here whole."""
        repository = Repository(Path(self._config.weights_cache), source.repository)
        path = await trio.to_thread.run_sync(repository.complete, source.revision, source.file)
        return None if path is None else str(path)

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
        for other in self._taken():
            theirs = [d for uuid in other.uuids if (d := inventory.by_uuid(uuid)) is not None]
            for device in devices:
                if device.uuid in other.uuids:
                    raise OperatorError(device.label, f"is held by shard {other.shard}", "stop that one first")
                for held in theirs:
                    if device.shares_memory(held):
                        reason = f"shares its memory with {held.label}, which shard {other.shard} has"
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

    def _port(self, needs: Callable[[int], Collection[int]], besides: int | None = None) -> int:
        """A port with which everything that it ``needs`` is no shard's of ours, and can be bound right now."""
        taken = {besides}
        for record in self._taken():
            meeting = None if record.rendezvous is None else record.rendezvous.port
            taken |= ports_of(record.profile, record.port, meeting)
        for port in range(self._config.port_first, self._config.port_last + 1):
            if port not in taken and taken.isdisjoint(needed := needs(port)) and all(map(self._is_free, needed)):
                return port
        raise OperatorError(
            f"ports {self._config.port_first}-{self._config.port_last}",
            f"none is free on {self._config.address}",
            "widen `ports` in agent.yaml, and check that `address` is this node's",
        )

    def _is_free(self, port: int) -> bool:
        family = socket.AF_INET6 if ":" in self._config.address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.bind((self._config.address, port))
        except OverflowError:
            return False  # beyond the last port there is
        except OSError as failed:
            proctree.must_be_seen(failed)
            return False
        return True


async def launch(folder: Path, prepared: Prepared) -> None:
    """Write the record, then start the shim. Raises :class:`OperatorError`; see :func:`given_up` for what is left then.

    Where an engine runs in the folder already, whose record nobody could read, nothing is touched: ``ConflictError``.
    Cancelled, it leaves at most a record; once the shim is being started that is waited for.
    """
    record, made = prepared.record, prepared.launch
    marks = proctree.marks(record.shard, record.generation, record.launch)
    env = process.environment(os.environ, made.env, made.secrets, marks)
    try:
        await trio.to_thread.run_sync(_write_first, folder, record)
        await trio.to_thread.run_sync(records.write_files, folder, made.files)
    except OSError as failed:
        raise OperatorError(str(folder), f"cannot be written: {failed.strerror}", "check the disk") from failed
    apart = await process.spawn(folder, record.argv, env, record.cgroup, orderly=made.orderly)
    if record.cgroup and not apart:
        logger("launch").warning(
            "its cgroup could not be made; it runs in ours", shard=record.shard, path=record.cgroup
        )


def _write_first(folder: Path, record: Record) -> None:
    if folder.exists() and (records.is_held(folder) or records.engine_lives(folder)):
        raise ConflictError(
            str(folder),
            "an engine runs there, and what was written down of it cannot be read",
            "stop the agent, run llmgw agent stop-engines, and start it again",
        )
    records.write(folder, record)


def given_up(folder: Path) -> bool:
    """Drop a launch that failed, unless its shim lives. A few small files, and no checkpoint that could lose why."""
    try:
        if (folder / "lock").exists():
            return records.remove(folder)
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)  # no shim came as far as its lock
    return True


def _refuse_links(spec: ShardSpec) -> None:
    """Paths that are below ``weights_dir`` by their text must be so on the disk, links followed.

    Raises :class:`OperatorError`. What the agent fetched itself is in a cache of its own.
    """
    named = [adapter_path(path, spec.weights_dir) for path in spec.profile.lora.values()]
    if spec.fetched is None and spec.weights.local:
        named.append(spec.weights.name)
    for path in named:
        if below(os.path.realpath(path), os.path.realpath(spec.weights_dir)) is None:
            raise OperatorError(
                path, f"is a link that leads out of weights_dir ({spec.weights_dir})", "put the files below it"
            )


def _refuse_odd_files(spec: ShardSpec) -> None:
    """Among its weights an engine opens what it finds, and would wait for a pipe until its time to load is over.

    Raises :class:`OperatorError` naming what is neither file nor folder.
    """
    places = [adapter_path(path, spec.weights_dir) for path in spec.profile.lora.values()]
    if spec.weights.local and spec.fetched != _NOT_YET:
        places.append(spec.weights.name)
    for place in places:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # the engine says so better
            whole = [place]
            if os.path.isdir(place):
                with os.scandir(place) as entries:
                    whole += [entry.path for entry in entries]
            for path in whole:
                with suppress(FileNotFoundError):
                    mode = os.stat(path).st_mode
                    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                        raise OperatorError(path, "is neither a file nor a folder", "take it out of the weights")


def _fabric(label: str | None, inventory: Inventory, node: str) -> Fabric:
    """The fabric of a replica over several nodes. Raises :class:`OperatorError` where this node is not wholly on it."""
    found = next((f for f in inventory.fabrics if f.label == label), None)
    if found is None:
        raise OperatorError(f"fabric {label}", f"is not declared on {node}", f"add fabrics.{label} to its agent.yaml")
    if found.faults:
        raise OperatorError(f"fabric {label}", found.faults[0].reason, found.faults[0].remedy)
    return found
