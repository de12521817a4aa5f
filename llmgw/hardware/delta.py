"""What changed between two readings of a node, so that a heartbeat need not carry all of it."""

from __future__ import annotations

from attrs import evolve, fields, frozen

from llmgw.hardware.inventory import Adapter, Device, Inventory, Load, Wear


@frozen
class InventoryDelta:
    """The fields that changed, and their new values.

    Of ``devices`` and ``adapters`` only those that changed or are new stand in ``values``; ``numbers`` and ``names``
    are all that there are, in order. Fields that are not in ``changed`` have no meaning in ``values``.
    """

    changed: tuple[str, ...]
    values: Inventory
    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


def diff(old: Inventory, new: Inventory) -> InventoryDelta | None:
    """What makes ``new`` of ``old``; ``None`` when nothing changed."""
    changed = tuple(f.name for f in fields(Inventory) if getattr(old, f.name) != getattr(new, f.name))
    if not changed:
        return None
    values = Inventory(new.host, new.source, **{name: getattr(new, name) for name in changed if name not in _FIRST})
    before = {d.number: d for d in old.devices}
    adapters = {a.name: a for a in old.adapters}
    return InventoryDelta(
        changed=changed,
        values=evolve(
            values,
            devices=tuple(d for d in values.devices if before.get(d.number) != d),
            adapters=tuple(a for a in values.adapters if adapters.get(a.name) != a),
        ),
        numbers=tuple(d.number for d in values.devices),
        names=tuple(a.name for a in values.adapters),
    )


_FIRST = ("host", "source")


def apply(old: Inventory, delta: InventoryDelta) -> Inventory:
    """``new`` again. Names of fields that this version does not know are left out, as is a device that never came."""
    known = {f.name for f in fields(Inventory)}
    made = evolve(old, **{name: getattr(delta.values, name) for name in delta.changed if name in known})
    if "devices" in delta.changed:
        devices: dict[int, Device] = {d.number: d for d in (*old.devices, *delta.values.devices)}
        made = evolve(made, devices=tuple(devices[n] for n in delta.numbers if n in devices))
    if "adapters" in delta.changed:
        adapters: dict[str, Adapter] = {a.name: a for a in (*old.adapters, *delta.values.adapters)}
        made = evolve(made, adapters=tuple(adapters[n] for n in delta.names if n in adapters))
    return made


def without_load(inventory: Inventory) -> Inventory:
    """The inventory without what changes from one moment to the next: heat, power, utilisation, memory in use."""
    return evolve(
        inventory,
        devices=tuple(evolve(d, load=Load(), wear=Wear(), used_mib=None, processes=()) for d in inventory.devices),
    )
