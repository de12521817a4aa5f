"""Whether a profile can run on a node: named filters, each with its reasons and what would have to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from attrs import field, frozen

from llmgw.hardware.gpu import compute_capability, same_but_for_size
from llmgw.hardware.health import stranger
from llmgw.hardware.inventory import Device
from llmgw.scheduler.explain import Refusal
from llmgw.scheduler.state import Node, NodeState
from llmgw.settings.catalog import EngineKind, PlacementRules, Profile
from llmgw.settings.profile_rules import is_mig, quantized


@frozen
class Need:
    """What one shard asks of a node: profiles with the same need have the same places.

    ``together`` says that the devices of a group should be of one NVLink domain, ``nodes`` how many nodes take part.
    ``least_mib`` is how much memory a device of a class must have, where not all of that class have as much.
    """

    engine: EngineKind
    classes: tuple[str, ...]
    gpus: int
    nodes: int
    together: bool
    memory_gib: float | None
    quantization: str | None
    labels: tuple[tuple[str, str], ...]
    tolerate: frozenset[str]
    least_mib: tuple[tuple[str, int], ...] = ()


def need_of(profile: Profile, rules: PlacementRules, least_mib: tuple[tuple[str, int], ...] = ()) -> Need:
    """The need of a profile's shards."""
    return Need(
        engine=profile.engine,
        classes=profile.device_class,
        gpus=profile.gpus,
        nodes=profile.nodes,
        together=profile.tp > 1 or (profile.dp > 1 and profile.expert_parallel),
        memory_gib=profile.memory_gib,
        quantization=profile.quantization,
        labels=tuple(sorted(rules.nodes.items())),
        tolerate=frozenset(rules.tolerate),
        least_mib=least_mib,
    )


@frozen
class NodeView:
    """A node with what is taken on it: placement number → the shard that has the device (or had, until it ended).

    ``leaving`` are the numbers of devices that count as free because a shard of ours is going to leave them: whatever
    memory of theirs is in use now is no stranger's.
    """

    node: Node
    taken: Mapping[int, str] = field(hash=False)
    leaving: frozenset[int] = frozenset()

    def given_up(self, device: Device) -> bool:
        """Whether a shard of ours is going to leave this device, or one that shares its memory."""
        if not self.leaving:
            return False
        others = (self.node.inventory.device(number) for number in self.leaving)
        return any(d is not None and (d.number == device.number or device.shares_memory(d)) for d in others)

    @cached_property
    def by_class(self) -> dict[str, list[Device]]:
        """Its devices by class, in the order of their numbers."""
        made: dict[str, list[Device]] = {}
        for device in self.node.inventory.devices:
            made.setdefault(device.device_class, []).append(device)
        return made

    @cached_property
    def shared(self) -> dict[tuple[int, int], Device]:
        """The taken compute instances by the card and GPU instance whose memory they have."""
        return {
            (d.mig.card, d.mig.gpu_instance): d
            for number in self.taken
            if (d := self.node.inventory.device(number)) is not None
            and d.mig is not None
            and d.mig.gpu_instance is not None
        }

    @cached_property
    def near(self) -> frozenset[str]:
        """The adapters of its sound fabrics."""
        return frozenset(p.adapter for f in self.node.inventory.fabrics if not f.faults for p in f.ports)

    @cached_property
    def domain_of(self) -> dict[int, int]:
        """Which NVLink domain a device is in, by its place in the list."""
        return {number: at for at, domain in enumerate(self.node.inventory.nvlink_domains) for number in domain}


@frozen
class Choice:
    """Devices that would do: of one class, and in one NVLink domain where that matters and can be.

    ``breaks`` says that they are part of a wholly free NVLink domain, ``after`` how many usable devices of the class
    the node has left then.
    """

    device_class: str
    devices: tuple[int, ...]
    breaks: bool
    after: int


def _state(_need: Need, view: NodeView) -> Refusal | None:
    node = view.node
    if node.state is NodeState.CONNECTED:
        return None
    return Refusal("node-state", f"{node.id} is {node.state.value}: its agent is not heard", "bring its agent back")


def _drained(_need: Need, view: NodeView) -> Refusal | None:
    node = view.node
    if node.drained is None:
        return None
    return Refusal("drained", f"{node.id} is {node.drained}", f"llmgw ctl node undrain {node.id}")


def _labels(need: Need, view: NodeView) -> Refusal | None:
    missing = [f"{k}={v}" for k, v in need.labels if view.node.labels.get(k) != v]
    if not missing:
        return None
    has = ", ".join(f"{k}={v}" for k, v in sorted(view.node.labels.items())) or "none"
    remedy = f"set nodes.{view.node.id}.labels in the settings, or the model's placement.nodes"
    return Refusal("labels", f"wants {', '.join(missing)}, {view.node.id} has {has}", remedy)


def _taints(need: Need, view: NodeView) -> Refusal | None:
    kept_out = [t for t in view.node.taints if t not in need.tolerate]
    if not kept_out:
        return None
    remedy = "add it to the model's placement.tolerate, or remove it from the node"
    return Refusal("taints", f"{view.node.id} has the taint {', '.join(kept_out)}", remedy)


def _engine(need: Need, view: NodeView) -> Refusal | None:
    if need.engine in view.node.engines:
        return None
    has = ", ".join(e.value for e in view.node.engines) or "none"
    return Refusal(
        "engine",
        f"needs engine {need.engine.value}, {view.node.id} has {has}",
        f"add engines.{need.engine.value} to its agent.yaml",
    )


def _device_class(need: Need, view: NodeView) -> Refusal | None:
    if any(name in view.by_class for name in need.classes):
        return None
    has = ", ".join(f"{len(some)} x {name}" for name, some in view.by_class.items()) or "no device"
    wanted = " or ".join(need.classes)
    meant = [name for name in view.by_class if any(same_but_for_size(name, asked) for asked in need.classes)]
    remedy = "add a profile for a class that it has"
    if meant:
        remedy = f"if {' or '.join(meant)} is meant, name that: classes count the memory that the driver reports"
    return Refusal("device-class", f"class {wanted} wanted, node has {has}", remedy)


FILTERS: Sequence[Callable[[Need, NodeView], Refusal | None]] = (
    _state,
    _drained,
    _labels,
    _taints,
    _engine,
    _device_class,
)
"""What can be said of the node as a whole, in the order in which it is asked."""


def node_refusals(need: Need, view: NodeView) -> tuple[Refusal, ...]:
    """Everything that speaks against the node as a whole."""
    return tuple(r for f in FILTERS if (r := f(need, view)) is not None)


def unusable(device: Device, view: NodeView) -> str | None:
    """Why nobody can be given this device now, or ``None``."""
    if device.faults:
        return f"{device.label} {device.faults[0].reason}"
    if (holder := view.taken.get(device.number)) is not None:
        return f"{device.label} runs {holder}"
    if device.mig is not None and device.mig.gpu_instance is not None and view.shared:
        # An engine sizes itself for all the memory that it sees, and these two see the same.
        other = view.shared.get((device.mig.card, device.mig.gpu_instance))
        if other is not None:
            return f"{device.label} shares its memory with {other.label}, which runs {view.taken[other.number]}"
    held = stranger(device, ours=view.given_up(device))
    return None if held is None else held.reason


def _against(need: Need, device: Device, view: NodeView) -> str | None:
    """Why this one device cannot be given out for this need, or ``None``."""
    if (why := unusable(device, view)) is not None:
        return why
    if need.memory_gib is not None and device.total_mib is not None and device.total_mib < need.memory_gib * 1024:
        return f"{device.label} has {device.total_mib / 1024:.1f} GiB, {need.memory_gib:g} GiB are needed"
    for name, least_mib in need.least_mib:
        if name == device.device_class and device.total_mib is not None and device.total_mib < least_mib:
            return f"{device.label} has {device.total_mib} MiB, {least_mib} are needed"
    if need.quantization is not None:
        capability = device.compute_capability or compute_capability(device.device_class)
        for _path, problem, _hint in quantized(need.engine, need.quantization, {device.label: capability}):
            return problem
    return None


def _remedy(need: Need, reasons: Sequence[str]) -> str:
    if any(" runs " in r for r in reasons):
        return "wait for a device, lower the replicas of what runs there, or add a node"
    if any(" holds " in r for r in reasons):
        return "stop the process that holds the memory"
    if any("compute capability" in r for r in reasons):
        return f"drop quantization {need.quantization}, or use newer devices"
    return "repair the device (see llmgw agent inventory), or add a node"


def devices_of(need: Need, name: str, view: NodeView) -> Choice | Refusal:
    """Devices of one class for one shard, or why there are not enough.

    A group that belongs together stays within one NVLink domain, unless no domain of the node is large enough even
    when all of it is free (cards bridged in pairs): then it takes whole domains first. Of several domains that would do
    the one with the least room is taken, so that others stay whole; on MIG, a card that is in use already.
    """
    of_class = view.by_class.get(name, [])
    against = {d.number: why for d in of_class if (why := _against(need, d, view)) is not None}
    good = [d for d in of_class if d.number not in against]
    wanted = 1 if is_mig(name) else need.gpus
    if len(good) < wanted:
        short = wanted - len(good)
        missing = len(of_class) - wanted
        reasons = list(against.values())
        if missing < 0:
            reasons.insert(0, f"node has {len(of_class)} of class {name}")
        text = f"{short} of {wanted} devices short: {', '.join(reasons)}"
        remedy = "add devices, or use a smaller profile" if missing < 0 else _remedy(need, list(against.values()))
        return Refusal("devices", text, remedy)
    after = len(good) - wanted
    if is_mig(name):
        return Choice(name, (_instance(good, view).number,), breaks=False, after=after)
    if need.nodes > 1:
        good.sort(key=lambda d: (not any(path.adapter in view.near for path in d.adapters), d.number))
    return _of_domains(need, name, view, good, wanted, after)


def _instance(good: Sequence[Device], view: NodeView) -> Device:
    """The instance on the card of which most is in use."""
    used: dict[int, int] = {}
    for number in view.taken:
        if (device := view.node.inventory.device(number)) is not None and device.mig is not None:
            used[device.mig.card] = used.get(device.mig.card, 0) + 1
    return min(good, key=lambda d: (-used.get(d.mig.card, 0) if d.mig is not None else 0, d.number))


def _of_domains(
    need: Need, name: str, view: NodeView, good: Sequence[Device], wanted: int, after: int
) -> Choice | Refusal:
    domains = view.node.inventory.nvlink_domains
    of_class = {d.number for d in view.by_class[name]}
    inside: dict[int | None, list[int]] = {}
    for device in good:
        inside.setdefault(view.domain_of.get(device.number), []).append(device.number)
    largest = max((sum(n in of_class for n in domain) for domain in domains), default=0)
    if need.together and wanted <= largest:
        fitting = [(len(some), at, some) for at, some in inside.items() if at is not None and len(some) >= wanted]
        if not fitting:
            sizes = ", ".join(f"{len(inside.get(at, ()))} free of {len(d)}" for at, d in enumerate(domains))
            return Refusal(
                "nvlink",
                f"{wanted} devices of one NVLink domain needed, domains have {sizes}",
                "free devices of one domain, or lower tp",
            )
        size, at, some = min(fitting)
        breaks = wanted < size == len(domains[at])
        return Choice(name, tuple(sorted(some[:wanted])), breaks, after)
    # Loose devices first, then the domains with the least room; for a group that no domain can hold, whole ones first.
    order = sorted(
        inside.items(),
        key=lambda item: (
            item[0] is not None,
            -len(item[1]) if need.together else len(item[1]),
            -1 if item[0] is None else item[0],
        ),
    )
    picked: list[int] = []
    breaks = False
    for where, some in order:
        take = some[: wanted - len(picked)]
        breaks |= where is not None and 0 < len(take) < len(some) == len(domains[where])
        picked += take
    return Choice(name, tuple(sorted(picked)), breaks, after)
