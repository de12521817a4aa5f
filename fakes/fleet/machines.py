"""The machines of a simulated fleet: light inventories of the kinds that fakes.machines renders in full."""

from __future__ import annotations

import random
from collections.abc import Mapping

from attrs import evolve, frozen

from llmgw.hardware.gpu import mig_number
from llmgw.hardware.inventory import (
    AdapterKind,
    Device,
    DeviceProcess,
    Fabric,
    FabricPort,
    Fault,
    Host,
    Inventory,
    MigInstance,
)

_LAYOUTS = ((("3g.40gb", 40192),) * 2, (("2g.20gb", 19968),) * 3, (("1g.10gb", 9728),) * 4, (("4g.40gb", 40192),))


@frozen
class Kind:
    """A kind of machine: its cards, and whether they are one NVLink domain and have adapters beside them."""

    name: str
    device_class: str
    cards: int
    total_mib: int
    nvlink: bool = False
    ports: int = 0
    mig: bool = False


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("hgx-h100", "h100-80g", 8, 81559, nvlink=True, ports=8),
        Kind("a100-4", "a100-80g", 4, 81920, nvlink=True, ports=4),
        Kind("l40s-2", "l40s-45g", 2, 46068),
        Kind("rtx-4090-4", "geforce-rtx-4090-24g", 4, 24564),
        Kind("gb10", "gb10-121g", 1, 124610, ports=2),
        Kind("t4-vm", "tesla-t4-15g", 1, 15360),
        Kind("a100-mig", "a100-80g", 2, 81920, mig=True),
    )
}


class Hardware:
    """One node's cards as they are: faults, how they are carved, and what foreign processes hold."""

    def __init__(self, kind: Kind, node: str, fabric: str | None, source: random.Random) -> None:
        self.kind = kind
        self.node = node
        self.fabric = fabric
        self.fabric_down = False
        self.faults: dict[str, str] = {}
        self.held: set[str] = set()
        self._source = source
        self._carved = 0
        self._devices: list[Device] = []
        for card in range(kind.cards):
            self._devices += self._carve(card) if kind.mig else [self._whole(card)]

    def _whole(self, card: int) -> Device:
        kind = self.kind
        return Device(card, f"GPU-{self.node}-{card}", kind.device_class, kind.device_class, kind.total_mib)

    def _carve(self, card: int) -> list[Device]:
        layout = self._source.choice(_LAYOUTS)
        made: list[Device] = []
        for index, (profile, total) in enumerate(layout):
            self._carved += 1
            # Now and then two compute instances share one GPU instance, and so its memory.
            shared = index > 0 and index % 2 == 1 and self._source.random() < 0.3
            instance = made[-1].mig.gpu_instance if shared and made and made[-1].mig is not None else self._carved
            made.append(
                Device(
                    number=mig_number(card, index),
                    uuid=f"MIG-{self.node}-{self._carved}",
                    name=f"{self.kind.device_class} MIG {profile}",
                    device_class=f"{self.kind.device_class}-mig-{profile}",
                    total_mib=total,
                    mig=MigInstance(card, index, profile, instance, int(shared)),
                )
            )
        return made

    def carve_again(self, card: int) -> tuple[str, ...]:
        """Give a card's memory out anew; returns the UUIDs of what was there before."""
        old = tuple(d.uuid for d in self._devices if d.mig is not None and d.mig.card == card)
        kept = [d for d in self._devices if d.uuid not in old]
        self._devices = sorted([*kept, *self._carve(card)], key=lambda d: d.number)
        for uuid in old:
            self.faults.pop(uuid, None)
            self.held.discard(uuid)
        return old

    @property
    def devices(self) -> tuple[Device, ...]:
        """What there is, without what changes."""
        return tuple(self._devices)

    def inventory(self, boot: int, busy: Mapping[str, int]) -> Inventory:
        """A reading; ``busy`` has the pid of the engine on each device that runs one."""
        kind = self.kind
        fabrics: tuple[Fabric, ...] = ()
        if self.fabric is not None and kind.ports:
            ports = tuple(FabricPort(f"mlx5_{n}", 1) for n in range(kind.ports))
            down = (Fault("port-down", "mlx5_0/1 is down", "look at the cable"),) if self.fabric_down else ()
            kinds = AdapterKind.ROCE if kind.name == "gb10" else AdapterKind.INFINIBAND
            fabrics = (Fabric(self.fabric, kinds, ports, down),)
        domains = (tuple(range(kind.cards)),) if kind.nvlink else ()
        return Inventory(
            Host(self.node, f"boot-{boot}"),
            "nvml",
            tuple(self._read(d, busy) for d in self._devices),
            fabrics=fabrics,
            nvlink_domains=domains,
            simulated=kind.name,
        )

    def _read(self, device: Device, busy: Mapping[str, int]) -> Device:
        used = 1
        processes: tuple[DeviceProcess, ...] = ()
        pid = busy.get(device.uuid)
        if pid is not None or device.uuid in self.held:
            used = (device.total_mib or 0) * 7 // 10
            processes = (DeviceProcess(pid or 999, "engine" if pid else "python", used),)
        said = self.faults.get(device.uuid)
        faults = (Fault("failed", said, "replace the GPU"),) if said else ()
        return evolve(device, used_mib=None if self.kind.name == "gb10" else used, processes=processes, faults=faults)
