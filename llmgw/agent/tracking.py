"""A shard's processes seen from outside, for its supervisor: who they are, what they read, hold and listen on.

Feeds what it sees to :mod:`llmgw.agent.lifecycle`, as the supervisor does with what the engine says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import trio

from llmgw.agent import cgroup, listeners, memory, proctree, records, stacks
from llmgw.agent.ending import STACKS_S
from llmgw.agent.events import Crippled, Ended, Exposed, Observation, Read, Remains, StacksKept
from llmgw.agent.hardware import Hardware
from llmgw.agent.proctree import PROC, Member
from llmgw.agent.records import Record
from llmgw.hardware.inventory import Inventory
from llmgw.scheduler.state import ShardState
from llmgw.telemetry.logging import logger

READ_EVERY_S = 2.0
FRESH_S = 10.0
"""While a shard loads, the hardware is read this often: all shards that load share the readings."""

LISTEN_EVERY_S = 300.0
WORKERS_EVERY_S = 2.0
_STAYED_S = 1.0
"""What was killed all at once is gone by then, and told by its first process's end."""

_WORKER = "VLLM::Worker"
"""How vLLM's workers call themselves (0.11 to 0.33), such as ``VLLM::Worker_TP1``."""

_LOADS = (ShardState.STARTING, ShardState.LOADING)
_SERVES = (ShardState.READY, ShardState.DRAINING)
_REMEDY = "look for --host in the profile's args, or for a proxy in the engine's image"
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 1.0
_PATIENCE_S = 3.0
"""A killed process that is still there after this is looked for on the devices: it may hang in the driver."""

_READ_AGAIN_S = 2.0


class Tracking:
    """``observe`` is given what is seen; ``told`` is called when the peaks or the warnings are other ones."""

    def __init__(
        self,
        folder: Path,
        record: Record,
        state: ShardState,
        observe: Callable[[Observation], None],
        told: Callable[[], None],
        *,
        hardware: Hardware | None = None,
        proc: Path = PROC,
    ) -> None:
        self.load_mib: memory.Peaks = None
        self.serving_mib: memory.Peaks = None
        self.warnings: tuple[str, ...] = ()
        self._folder = folder
        self._record = record
        self._observe = observe
        self._told = told
        self._hardware = hardware if record.uuids else None
        self._proc = proc
        self._state = state
        self._seen: dict[int, Member] = {}
        self._serves = trio.Event()
        self._stuck = trio.Event()
        self._killing = False
        self._log = logger("shard").bind(shard=record.shard, generation=record.generation)
        self.became(state)

    def became(self, state: ShardState) -> None:
        """The shard is in another state."""
        self._state = state
        if state in _SERVES and not self._serves.is_set():
            self._serves.set()
            if self._hardware is not None:
                self._hardware.look_again()

    def keep_stacks(self) -> None:
        """Write down where the engine stands; ``StacksKept`` is observed when that is done."""
        self._stuck.set()

    def kill_all(self) -> None:
        """SIGKILL every process of this launch that can be found. Blocking, for milliseconds."""
        try:
            kill_left(self._record, self.left())
        except OSError as failed:
            self._log.error("its processes cannot be looked at", error=str(failed))

    def kill_remains(self) -> None:
        """Kill what was found after the engine's end."""
        self._killing = True

    async def run(self) -> None:
        """Watch until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_reading)
            nursery.start_soon(self._watch_listeners)
            nursery.start_soon(self._watch_stuck)
            nursery.start_soon(self._watch_workers)
            if self._hardware is not None:
                nursery.start_soon(self._watch_memory, self._hardware)
                nursery.start_soon(self._keep_fresh, self._hardware)

    def members(self) -> tuple[Member, ...]:
        """The engine's living processes, all of them. Blocking."""
        above, shim = None, None
        pids = records.pids(self._folder)
        if pids is not None and pids.here:
            if self._is(pids.shim, pids.shim_start):
                above = shim = pids.shim
            elif pids.engine is not None and self._is(pids.engine, pids.engine_start):
                above = pids.engine
        found = proctree.members(
            self._record.launch,
            below=above,
            cgroup=self._record.cgroup_path,
            but=() if shim is None else (shim,),
            proc=self._proc,
        )
        self._seen.update({member.pid: member for member in found})
        return found

    def _is(self, pid: int, start: int | None) -> bool:
        found = proctree.stat(pid, self._proc)
        return found is not None and found.start == start

    async def _watch_reading(self) -> None:
        while self._state in _LOADS:
            await trio.sleep(READ_EVERY_S)
            found = await trio.to_thread.run_sync(self.members)
            self._observe(Read(await trio.to_thread.run_sync(partial(proctree.read_bytes, found, self._proc))))

    async def _keep_fresh(self, hardware: Hardware) -> None:
        while self._state in _LOADS:
            hardware.no_older_than(FRESH_S)
            await trio.sleep(1.0)

    async def _watch_memory(self, hardware: Hardware) -> None:
        while True:
            inventory = await hardware.next()
            loads, serves = self._state in _LOADS, self._state in _SERVES
            ours = await trio.to_thread.run_sync(self._ours_on, inventory)
            held = memory.held(inventory, self._record.uuids, ours)
            before = self.load_mib, self.serving_mib
            if loads:
                self.load_mib = memory.higher(self.load_mib, held)
            elif serves:
                self.serving_mib = memory.higher(self.serving_mib, held)
            if before != (self.load_mib, self.serving_mib):
                self._told()

    def _ours_on(self, inventory: Inventory) -> frozenset[int]:
        return frozenset(pid for pid in memory.pids(inventory, self._record.uuids) if self._is_ours(pid))

    def _is_ours(self, pid: int) -> bool:
        """Whether a process that the driver lists is this shard's; it may list one that is gone but not yet freed."""
        now = proctree.stat(pid, self._proc)
        before = self._seen.get(pid)
        if before is not None and (now is None or now.start == before.start):
            return True
        if now is None or not proctree.carries(pid, self._record.launch, self._proc):
            return False
        self._seen[pid] = Member(pid, now.start, now.name)
        return True

    async def _watch_listeners(self) -> None:
        while True:
            await self._serves.wait()
            verdict = await trio.to_thread.run_sync(self._judge)
            if verdict.warnings != self.warnings:
                self.warnings = verdict.warnings
                for warning in self.warnings:
                    self._log.warning(warning)
                self._told()
            if verdict.exposed:
                self._observe(Exposed(verdict.exposed, _REMEDY))
            await trio.sleep(LISTEN_EVERY_S)

    def _judge(self) -> listeners.Verdict:
        record = self._record
        found = listeners.listening((member.pid for member in self.members()), self._proc)
        return listeners.judge(found, record.host, record.port, serves=record.rank == 0)

    async def _watch_workers(self) -> None:
        """vLLM's launcher of a rank above 0 outlives its workers, and rank 0 notices with the next request only."""
        if self._record.rank == 0:
            return
        await self._serves.wait()
        known: dict[int, Member] = {}
        while True:
            found = {m.pid: m for m in await trio.to_thread.run_sync(self.members) if m.command.startswith(_WORKER)}
            gone = next((worker for pid, worker in known.items() if pid not in found), None)
            if gone is not None:
                await trio.sleep(_STAYED_S)
                if self._state in _SERVES:
                    self._observe(Crippled(f"{gone} ended without being asked, and the rest of the rank stayed"))
                return
            known = found
            await trio.sleep(WORKERS_EVERY_S)

    async def _watch_stuck(self) -> None:
        await self._stuck.wait()
        try:
            with trio.move_on_after(STACKS_S):
                found = await trio.to_thread.run_sync(self.members)
                await stacks.keep(self._folder, found, self._record.argv, self._proc)
        except OSError as failed:
            self._log.warning("the engine's stacks cannot be written down", error=str(failed))
        self._observe(StacksKept())

    async def clear(self, end: Ended) -> None:
        """Return when nothing of an ended engine lives or holds memory of its devices; until then say what does.

        :mod:`llmgw.agent.ending` bounds it: the caller is cancelled when that gives up.
        """
        wait_s, began = _FIRST_LOOK_S, trio.current_time()
        read_at = None
        holds: tuple[str, ...] = ()
        while True:
            left = await trio.to_thread.run_sync(self.left)
            now = trio.current_time()
            due = read_at is None or now - read_at >= _READ_AGAIN_S
            if self._hardware is not None and due and (not left or now - began >= _PATIENCE_S):
                self._observe(Remains(end, tuple(map(str, left)), holds))
                holds = await self._holders(self._hardware)
                read_at = trio.current_time()
            if not left and not holds:
                break
            self._observe(Remains(end, tuple(map(str, left)), holds))
            if self._killing:
                self._killing = False
                await trio.to_thread.run_sync(kill_left, self._record, left)
            await trio.sleep(wait_s)
            wait_s = min(_LAST_LOOK_S, 2 * wait_s)
        if self._record.cgroup_path is not None:
            await trio.to_thread.run_sync(cgroup.remove, self._record.cgroup_path)

    async def _holders(self, hardware: Hardware) -> tuple[str, ...]:
        inventory = await hardware.anew()
        ours = await trio.to_thread.run_sync(self._ours_on, inventory)
        return memory.holders(inventory, self._record.uuids, ours)

    def left(self) -> tuple[Member, ...]:
        """What lives of an engine whose shim is gone: by its mark, its cgroup, or seen as its own before. Blocking."""
        found = {member.pid: member for member in self.members()}
        for member in self._seen.values():
            if member.pid not in found and proctree.alive(member, self._proc):
                found[member.pid] = member
        return tuple(found.values())


def kill_left(record: Record, left: Sequence[Member]) -> None:
    """SIGKILL what is left of an engine, all at once where it has a cgroup. Blocking, for a moment."""
    if record.cgroup_path is not None:
        cgroup.kill(record.cgroup_path)
    proctree.kill(left, record.launch, cgroup=record.cgroup_path)
