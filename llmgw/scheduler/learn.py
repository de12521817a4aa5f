"""What a shard that serves teaches of its profile's memory."""

from __future__ import annotations

from llmgw.hardware.inventory import Inventory
from llmgw.scheduler.memory import Learned
from llmgw.scheduler.state import ShardReport, ShardState, placed_on


def lesson(report: ShardReport, inventory: Inventory, now: float) -> Learned | None:
    """What this report says, or ``None`` where it does not serve, is not measured, or is on devices that are gone.

    Measured while it loaded counts as well: an engine that reads its weights through a second copy needs room for both.
    """
    if report.state not in (ShardState.READY, ShardState.DRAINING):
        return None
    peaks = (*(report.load_mib or ()), *(report.serving_mib or ()))
    devices = [inventory.device(n) for n in placed_on(inventory, report.devices, report.uuids)]
    classes = {device.device_class for device in devices if device is not None}
    if not peaks or max(peaks) <= 0 or len(classes) != 1 or None in devices:
        return None
    return Learned(report.profile_digest, classes.pop(), max(peaks), now)
