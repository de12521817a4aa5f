"""A store in memory: what it holds outlives the control planes that use it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

import trio

from llmgw.errors import OperatorError
from llmgw.scheduler.explain import Unplaced
from llmgw.scheduler.memory import Learned
from llmgw.scheduler.orders import Drained, Order
from llmgw.scheduler.scale import Scale
from llmgw.scheduler.state import Replica
from llmgw.store.api import JobRow, NodeRow, PassRecord, SettingsRevision, StoredDecision
from llmgw.store.audit import Act


class Disk:
    """What is stored. ``trouble`` is why nothing can be written, if so; ``watched`` sees each pass before it is."""

    def __init__(self) -> None:
        self.epoch = 0
        self.nodes: Mapping[str, NodeRow] = {}
        self.replicas: tuple[Replica, ...] = ()
        self.next_serial = 1
        self.unplaced: tuple[Unplaced, ...] = ()
        self.passes = 0
        self.decisions = 0
        self.trouble = ""
        self.learned: tuple[Learned, ...] = ()
        self.brake_released = 0.0
        self.scales: Mapping[str, Scale] = {}
        self.drains: Mapping[str, Drained] = {}
        self.orders: Mapping[str, Order] = {}
        self.watched: Callable[[tuple[Replica, ...], PassRecord], None] = lambda _before, _record: None


class MemoryStore:
    """One control plane's :class:`llmgw.store.api.Store` on a disk. Once ``dead`` it writes and answers nothing.

    A write takes a moment on either side of its commit, so that a crash can fall before and after it.
    """

    def __init__(self, disk: Disk, source: random.Random) -> None:
        self._disk = disk
        self._source = source
        self._turn = trio.Lock()
        self.dead = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def _moment(self, often: float = 0.2) -> None:
        if self._source.random() < often:
            await trio.sleep(self._source.choice((0.001, 0.02, 0.3)))
        else:
            await trio.lowlevel.checkpoint()
        if self.dead:
            await trio.sleep_forever()

    def _check_writable(self) -> None:
        if self._disk.trouble:
            raise OperatorError("the store", self._disk.trouble, "free some space")

    async def cluster(self) -> str:
        await self._moment()
        return "c1"

    async def new_epoch(self) -> int:
        await self._moment()
        self._disk.epoch += 1
        return self._disk.epoch

    async def settings(self) -> SettingsRevision | None:
        await self._moment()
        return None

    async def add_settings(self, text: str, author: str, reason: str, at: float) -> SettingsRevision:
        await self._moment()
        return SettingsRevision(1, text, "", author, reason, at)

    async def nodes(self) -> tuple[NodeRow, ...]:
        await self._moment()
        return tuple(row for _, row in sorted(self._disk.nodes.items()))

    async def save_node(self, row: NodeRow) -> None:
        async with self._turn:
            await self._moment(0.05)
            self._check_writable()
            self._disk.nodes = {**self._disk.nodes, row.id: row}
            await self._moment(0.05)

    async def learned(self) -> tuple[Learned, ...]:
        await self._moment()
        return self._disk.learned

    async def save_learned(self, rows: Iterable[Learned]) -> None:
        async with self._turn:
            await self._moment(0.05)
            self._check_writable()
            self._disk.learned = tuple(rows)

    async def replicas(self) -> tuple[tuple[Replica, ...], int]:
        await self._moment()
        return self._disk.replicas, self._disk.next_serial

    async def save_pass(self, record: PassRecord) -> int:
        async with self._turn:
            await self._moment()
            self._check_writable()
            disk = self._disk
            if disk.epoch != record.epoch:
                raise OperatorError(
                    "the store",
                    f"epoch {disk.epoch} was taken since, this control plane has {record.epoch}",
                    "only one control plane decides; stop this one",
                )
            disk.watched(disk.replicas, record)
            disk.replicas, disk.next_serial, disk.unplaced = record.replicas, record.next_serial, record.unplaced
            disk.scales = record.scales
            disk.orders = {name: o for name, o in disk.orders.items() if o not in record.over}
            disk.passes += 1
            disk.decisions += len(record.decisions)
            await self._moment()
            return disk.passes

    async def scales(self) -> dict[str, Scale]:
        await self._moment()
        return dict(self._disk.scales)

    async def brake_released(self) -> float:
        await self._moment()
        return self._disk.brake_released

    async def release_brake(
        self, epoch: int, at: float, by: str, silent_since: float, nodes: tuple[str, ...] = ()
    ) -> int:
        async with self._turn:
            await self._moment()
            self._disk.brake_released = silent_since
            return self._disk.passes

    async def drains(self) -> dict[str, Drained]:
        await self._moment()
        return dict(self._disk.drains)

    async def save_drain(self, epoch: int, node: str, drained: Drained | None, act: Act) -> None:
        async with self._turn:
            await self._moment()
            self._check_writable()
            others = {name: d for name, d in self._disk.drains.items() if name != node}
            self._disk.drains = others if drained is None else {**others, node: drained}
            await self._moment()

    async def orders(self) -> dict[str, Order]:
        await self._moment()
        return dict(self._disk.orders)

    async def save_order(self, epoch: int, model: str, order: Order, act: Act) -> None:
        async with self._turn:
            await self._moment()
            self._check_writable()
            self._disk.orders = {**self._disk.orders, order.replica: order}
            await self._moment()

    async def jobs(self) -> tuple[JobRow, ...]:
        await self._moment()
        return ()

    async def save_job(self, row: JobRow, act: Act | None = None) -> None:
        raise AssertionError(f"nobody begins jobs here, but {row.report.id}")

    async def unplaced(self) -> tuple[Unplaced, ...]:
        await self._moment()
        return self._disk.unplaced

    async def decisions(self, limit: int, about: str | None = None) -> tuple[StoredDecision, ...]:
        await self._moment()
        return ()
