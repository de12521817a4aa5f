"""The cards that a node is known to have, and what is different now: a card that is missing, a class that changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import frozen

from llmgw.hardware.inventory import Device, Fault, Inventory


@frozen
class KnownCard:
    """One card as the node was known to have it. ``device_class`` is empty while it is cut into MIG instances."""

    pci_address: str
    uuid: str
    name: str
    device_class: str
    driver: str


def known_cards(inventory: Inventory) -> tuple[KnownCard, ...]:
    """The cards of an inventory. One that could not be identified is not remembered."""
    driver = inventory.driver.version if inventory.driver is not None else ""
    made: dict[str, KnownCard] = {}
    for device in inventory.devices:
        if not device.pci_address or not device.name or device.name == "unknown GPU":
            continue
        whole = device.mig is None
        name = device.name if whole else device.name.partition(" MIG ")[0]
        sure = whole and device.total_mib is not None and not device.unified
        made[device.pci_address] = KnownCard(
            device.pci_address, device.uuid if whole else "", name, device.device_class if sure else "", driver
        )
    return tuple(made.values())


def merged(known: Iterable[KnownCard], found: Iterable[KnownCard]) -> tuple[KnownCard, ...]:
    """What is known from now on: cards stay as they were first known until an operator accepts what is there."""
    cards = {card.pci_address: card for card in found}
    for card in known:
        now = cards.get(card.pci_address)
        if now is None or card.device_class or not now.device_class:
            cards[card.pci_address] = card
    return tuple(cards[address] for address in sorted(cards))


def differences(known: Iterable[KnownCard], inventory: Inventory) -> tuple[Fault, ...]:
    """What is not as it was. An inventory that could not be read at all says nothing about its cards."""
    if inventory.source == "none":
        return ()
    return tuple(_differences(known, inventory))


def _differences(known: Iterable[KnownCard], inventory: Inventory) -> Iterator[Fault]:
    driver = inventory.driver.version if inventory.driver is not None else ""
    by_address: dict[str, Device] = {d.pci_address: d for d in inventory.devices}
    uuids = {d.uuid for d in inventory.devices if d.uuid}
    accept = "run llmgw agent inventory --accept when that is as it shall be"
    for card in known:
        now = by_address.get(card.pci_address)
        if now is None:
            if card.uuid and card.uuid in uuids:
                continue  # it was put into another slot
            yield Fault(
                "gpu-missing",
                f"{card.name} at {card.pci_address} was here and is missing",
                f"look for 'fallen off the bus' in the kernel log, reseat it; {accept}",
            )
            continue
        changed = card.device_class and now.mig is None and now.total_mib is not None
        if changed and not now.unified and now.device_class != card.device_class:
            same_card = not card.uuid or now.uuid == card.uuid
            why = "another card" if not same_card else f"driver {card.driver} then, {driver} now"
            if same_card and card.driver == driver:
                why = "ECC was switched, or its memory was changed"
            yield Fault(
                "class-changed",
                f"{now.label} is of class {now.device_class}, it was {card.device_class} ({why})",
                f"name both classes in the profiles that shall use it; {accept}",
            )
