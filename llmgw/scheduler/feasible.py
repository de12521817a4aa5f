"""Whether a profile can run on a node: named filters, each with its reasons and what would have to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import field, frozen

from llmgw.hardware.gpu import compute_capability
from llmgw.hardware.health import stranger
from llmgw.hardware.inventory import Device
from llmgw.scheduler.explain import Refusal
from llmgw.scheduler.state import Node, NodeState
from llmgw.settings.catalog import Profile
from llmgw.settings.profile_rules import fp8, is_mig


@frozen
class NodeView:
    """A node with what is taken on it: placement number → the shard that has the device (or had, until it ended)."""

    node: Node
    taken: Mapping[int, str] = field(hash=False)


@frozen
class Choice:
    """Devices that would do: one class, and in one NVLink domain where that matters."""

    device_class: str
    devices: tuple[int, ...]


def _state(_profile: Profile, view: NodeView) -> Refusal | None:
    node = view.node
    if node.state is NodeState.CONNECTED:
        return None
    return Refusal("node-state", f"{node.id} is {node.state.value}: its agent is not heard", "bring its agent back")


def _engine(profile: Profile, view: NodeView) -> Refusal | None:
    if profile.engine in view.node.engines:
        return None
    has = ", ".join(e.value for e in view.node.engines) or "none"
    return Refusal(
        "engine",
        f"needs engine {profile.engine.value}, {view.node.id} has {has}",
        f"add engines.{profile.engine.value} to its agent.yaml",
    )


def _device_class(profile: Profile, view: NodeView) -> Refusal | None:
    there = [d.device_class for d in view.node.inventory.devices]
    if any(name in there for name in profile.device_class):
        return None
    has = ", ".join(f"{there.count(name)} x {name}" for name in dict.fromkeys(there)) or "no device"
    wanted = " or ".join(profile.device_class)
    return Refusal("device-class", f"class {wanted} wanted, node has {has}", "add a profile for a class that it has")


FILTERS: Sequence[Callable[[Profile, NodeView], Refusal | None]] = (_state, _engine, _device_class)
"""What can be said of the node as a whole, in the order in which it is asked."""


def node_refusals(profile: Profile, view: NodeView) -> tuple[Refusal, ...]:
    """Everything that speaks against the node as a whole."""
    return tuple(r for f in FILTERS if (r := f(profile, view)) is not None)


def _against(profile: Profile, device: Device, view: NodeView) -> str | None:
    """Why this one device cannot be given out, or ``None``."""
    if device.faults:
        return f"{device.label} {device.faults[0].reason}"
    if (holder := view.taken.get(device.number)) is not None:
        return f"{device.label} runs {holder}"
    for other in view.node.inventory.devices:
        # An engine sizes itself for all the memory that it sees, and these two see the same.
        if other.number != device.number and other.number in view.taken and device.shares_memory(other):
            return f"{device.label} shares its memory with {other.label}, which runs {view.taken[other.number]}"
    if (held := stranger(device, ours=False)) is not None:
        return held.reason
    if profile.memory_gib is not None and device.total_mib is not None and device.total_mib < profile.memory_gib * 1024:
        return f"{device.label} has {device.total_mib / 1024:.1f} GiB, {profile.memory_gib:g} GiB are needed"
    capability = device.compute_capability or compute_capability(device.device_class)
    for _path, problem, _hint in fp8(profile, {device.label: capability}):
        return problem
    return None


def _remedy(profile: Profile, reasons: Sequence[str]) -> str:
    if any(" runs " in r for r in reasons):
        return "wait for a device, lower the replicas of what runs there, or add a node"
    if any(" holds " in r for r in reasons):
        return "stop the process that holds the memory"
    if any("compute capability" in r for r in reasons):
        return f"drop quantization {profile.quantization}, or use newer devices"
    return "repair the device (see llmgw agent inventory), or add a node"


def devices_of(profile: Profile, name: str, view: NodeView) -> Choice | Refusal:
    """Devices of one class for one shard, or why there are not enough.

    A tensor-parallel group stays within one NVLink domain where the node has domains. Of several domains the
    smallest that is big enough is taken, so that large ones stay whole.
    """
    of_class = [d for d in view.node.inventory.devices if d.device_class == name]
    against = {d.number: why for d in of_class if (why := _against(profile, d, view)) is not None}
    good = [d.number for d in of_class if d.number not in against]
    need = 1 if is_mig(name) else profile.gpus
    if len(good) < need:
        short = need - len(good)
        missing = len(of_class) - need
        reasons = list(against.values())
        if missing < 0:
            there = f"node has {len(of_class)} of class {name}"
            reasons.insert(0, there)
        text = f"{short} of {need} devices short: {', '.join(reasons)}"
        remedy = "add devices, or use a smaller profile" if missing < 0 else _remedy(profile, list(against.values()))
        return Refusal("devices", text, remedy)
    if profile.tp > 1 and view.node.inventory.nvlink_domains:
        fitting = []
        for domain in view.node.inventory.nvlink_domains:
            inside = [n for n in good if n in domain]
            if len(inside) >= need:
                fitting.append(inside)
        if not fitting:
            sizes = ", ".join(
                f"{sum(n in good for n in domain)} free of {len(domain)}"
                for domain in view.node.inventory.nvlink_domains
            )
            return Refusal(
                "nvlink",
                f"{need} devices of one NVLink domain needed, domains have {sizes}",
                "free devices of one domain, or lower tp",
            )
        good = min(fitting, key=len)
    return Choice(name, tuple(good[:need]))
