"""Reading a machine once: every source at the same time, each bounded, nothing changed.

A source that fails, or does not answer in time, makes its facts unread with the reason; the others go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio
from attrs import evolve

from llmgw.discovery import nvml_process, smi
from llmgw.discovery.addresses import read_addresses
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.pci import read_gpus
from llmgw.discovery.probe import discover, simulated
from llmgw.discovery.sysfs import read_adapters
from llmgw.doctor import node, texts, tree
from llmgw.doctor.facts import Acs, Answer, Counter, Facts, Imex, Service
from llmgw.doctor.gather import Asker, Gathered
from llmgw.doctor.tree import Missing
from llmgw.hardware.fabric import resolve_all
from llmgw.hardware.inventory import Adapter
from llmgw.hardware.reading import GpuReading
from llmgw.settings.daemon import GpuSource

WHOLE_S = 18.0
"""After so long whatever has not been read is unread."""

_MANAGER_LOG = "var/log/fabricmanager.log"
_BIG = 8 * 1024 * 1024


async def collect(asker: Asker, whole_s: float = WHOLE_S) -> Facts:
    """Read the machine. Never fails; a cancelled call leaves no program running."""
    g = Gathered(asker)
    promised = {
        _gpus: ("smi", "nvml", "driver", "cards", "devices", "mig_instances"),
        _adapters: ("adapters", "fabrics", "counters", "gid_starts", "acs"),
        _interfaces: ("netdevs", "interface"),
        _files: tuple(tree.static(asker.machine)),
        _kernel: ("kernel_log",),
        _manager: ("fabric_manager", "fabric_manager_version", "fabric_manager_log", "imex"),
        node.unit: ("unit", "limits", "variables"),
        node.network: ("host_addresses", "firewall"),
        node.storage: ("disks", "shm_mib"),
        node.declared: ("clock", "certificates", "known_cards", "engines", "docker", "reach"),
    }  # fmt: skip
    if asker.peer is not None:
        promised[_peer] = ("peer", "peer_path")
    host = await g.thread(asker.machine.host)
    g.found["simulated"] = await g.thread(simulated, asker.machine) or ""
    with trio.move_on_after(whole_s):
        async with trio.open_nursery() as nursery:
            for source in promised:
                nursery.start_soon(source, g)
            nursery.start_soon(_holders, g)
    for fact in (*(name for names in promised.values() for name in names), "stuck"):
        if fact not in g.found and fact not in g.unread:
            g.miss(fact, f"was not read within {whole_s:g} s")
    rules = asker.rules
    known: dict[str, Any] = {k: v for k, v in dict(g.found).items() if k not in g.unread}
    return Facts(
        host=host, now=asker.wall(), rules=rules, address="" if asker.agent is None else asker.agent.address,
        unread=tuple(g.unread[name] for name in sorted(g.unread)), **known,
    )  # fmt: skip


async def _gpus(g: Gathered) -> None:
    """The cards, and the devices that are made of them."""
    on_bus = await _on_bus(g)
    await _cards(g, on_bus)
    g.cards_done.set()
    inventory = await discover(evolve(g.asker.config, source=_source(g)), g.asker.rules, g.machine)
    g.found |= {"devices": inventory.devices, "nvlink_domains": inventory.nvlink_domains}
    if not inventory.devices and on_bus:
        g.miss("devices", "the GPUs could not be read")


async def _on_bus(g: Gathered) -> list[str]:
    return [gpu.address for gpu in await g.thread(read_gpus, g.machine.root, g.machine.reader)]


async def _adapters(g: Gathered) -> None:
    """The adapters, and whatever is read for each; a driver of GPUs that hangs keeps none of it."""
    root, reader = g.machine.root, g.machine.reader
    addresses = await read_addresses(g.machine)
    adapters: tuple[Adapter, ...] = await g.thread(read_adapters, root, reader, addresses)
    g.found |= {"adapters": adapters, "fabrics": resolve_all(g.asker.rules, adapters)}
    if not adapters and not await g.thread(reader.names, root / "sys/class"):
        for fact in ("adapters", "fabrics", "counters", "gid_starts"):
            g.miss(fact, "/sys/class cannot be listed")
    functions = (*await _on_bus(g), *(a.pci_address for a in adapters if a.pci_address))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(g.read, "acs", lambda: _acs(g, functions))
        g.found["gid_starts"] = await g.thread(tree.gid_starts, g.machine, adapters)
        before: tuple[Counter, ...] = await g.thread(tree.counters, g.machine, adapters)
        began = trio.current_time()
        await trio.sleep(g.asker.gap_s)
        after: tuple[Counter, ...] = await g.thread(tree.counters, g.machine, adapters)
        first = {(c.adapter, c.port, c.name): c.after for c in before}
        g.found["counters"] = tuple(evolve(c, before=first.get((c.adapter, c.port, c.name), c.after)) for c in after)
        g.found["counted_s"] = round(trio.current_time() - began, 1)


async def _interfaces(g: Gathered) -> None:
    await g.read("netdevs", lambda: _netdevs(g))
    address = "" if g.asker.agent is None else g.asker.agent.address
    g.found["interface"] = node.interface(address, g.found.get("netdevs", ()))


async def _cards(g: Gathered, on_bus: list[str]) -> None:
    """Both sources at once: one tells more, the other answers where that one does not, and agents use it."""
    timeout_s = g.asker.config.timeout_s
    found: dict[str, GpuReading] = {}

    async def ask(name: str, how: Callable[[], Awaitable[GpuReading]]) -> None:
        try:
            found[name] = await how()
            g.found[name] = Answer()
        except DiscoveryError as failed:
            said = f"{failed.thing}: {failed.reason}"
            g.found[name] = Answer(failed.code, said, failed.remedy)
            if name == "nvml" and failed.code == "not-found":
                g.miss(name, said)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "smi", lambda: smi.read(g.machine, timeout_s, on_bus))
        if on_bus:
            nursery.start_soon(ask, "nvml", lambda: nvml_process.read(g.machine, timeout_s))
        else:
            g.found["nvml"] = Answer("not-asked")
    reading, xml = found.get("smi") or found.get("nvml"), ""
    if reading is None:
        for fact in ("driver", "cards", "mig_instances"):
            g.miss(fact, g.found["smi"].said)
        return
    try:
        if "smi" not in found:
            raise Missing(g.found["smi"].said)
        xml = await g.said("nvidia-smi", "-q", "-x", ok=(0, 14, 15))
    except Missing as missing:
        # NVML is asked for what an inventory needs; what only nvidia-smi was asked for must not look well for that.
        g.miss(texts.DETAILS, missing.why)
    g.found |= {"driver": reading.driver, "cards": texts.cards(reading.cards, xml)}
    g.found["mig_instances"] = ()
    if any(card.mig for card in reading.cards):
        await g.read("mig_instances", lambda: _instances(g))


def _source(g: Gathered) -> GpuSource:
    """Where the cards were read, so that the devices are made of the same."""
    only_nvml = bool(g.found["smi"].code) and not g.found["nvml"].code
    return GpuSource.NVML if only_nvml else GpuSource.NVIDIA_SMI


async def _instances(g: Gathered) -> Any:
    said = await g.said("nvidia-smi", "mig", "-lgi", ok=(0, 6))
    if "nsufficient" in said:
        raise Missing("GPU instances may not be listed by this user", root=True)
    return texts.gpu_instances(said)


async def _netdevs(g: Gathered) -> Any:
    found = texts.netdevs(await g.said("ip", "-j", "addr", "show"))
    if found is None:
        raise Missing("ip does not speak JSON")
    return found


async def _acs(g: Gathered, functions: tuple[str, ...]) -> tuple[Acs, ...]:
    above = await g.thread(tree.bridges_above, g.machine, functions)
    found = texts.acs(await g.said("lspci", "-D", "-vvv"), above)
    if found is None:
        raise Missing("lspci may not read the capabilities of PCI bridges", root=True)
    return found


async def _files(g: Gathered) -> None:
    def read() -> None:
        for fact, how in tree.static(g.machine).items():
            try:
                g.found[fact] = how()
            except Missing as missing:
                g.miss(fact, missing.why, root=missing.root)

    await g.thread(read)


async def _kernel(g: Gathered) -> None:
    async def read() -> tuple[str, ...]:
        try:
            return texts.kernel_lines(await g.said("dmesg"))
        except Missing as first:
            try:
                return texts.kernel_lines(await g.said("journalctl", "-k", "-b", "-o", "cat", "--no-pager"))
            except Missing:
                raise first from None

    await g.read("kernel_log", read)


async def _manager(g: Gathered) -> None:
    async def service() -> Service:
        said = texts.pairs(
            await g.said("systemctl", "show", "nvidia-fabricmanager", "-p", "LoadState,ActiveState,Result")
        )
        return Service(said.get("LoadState", ""), said.get("ActiveState", ""), said.get("Result", ""))

    async def version() -> str:
        said = await g.said("nv-fabricmanager", "--version")
        return next((w for w in said.split() if w[:1].isdigit() and "." in w), "")

    async def log() -> tuple[str, ...]:
        data = await g.thread(g.machine.reader.raw, g.machine.root / _MANAGER_LOG, _BIG)
        if not data:
            raise Missing(f"/{_MANAGER_LOG} cannot be read", root=True)
        stat = (await g.thread(g.machine.reader.raw, g.machine.root / "proc/stat", _BIG)).decode(errors="replace")
        booted = next((float(line.split()[1]) for line in stat.splitlines() if line.startswith("btime ")), None)
        return texts.manager_lines(data.decode(errors="replace"), booted)

    async def imex() -> Imex:
        folder = g.machine.root / "dev/nvidia-caps-imex-channels"
        channel = "channel0" in await g.thread(g.machine.reader.names, folder)
        return Imex(channel, (await g.said("nvidia-imex-ctl", "-q")).strip().partition("\n")[0])

    async with trio.open_nursery() as nursery:
        for fact, how in (
            ("fabric_manager", service), ("fabric_manager_version", version), ("fabric_manager_log", log),
            ("imex", imex),
        ):  # fmt: skip
            nursery.start_soon(g.read, fact, how)


async def _peer(g: Gathered) -> None:
    assert g.asker.peer is not None
    try:
        g.found["peer"], path = await g.asker.peer()
    except Missing as missing:
        g.miss("peer", missing.why)
        g.miss("peer_path", missing.why)
        return
    if path is None:
        g.miss("peer_path", g.found["peer"].trouble)
    else:
        g.found["peer_path"] = path


async def _holders(g: Gathered) -> None:
    """Processes that hold a card and were stuck at both readings."""
    await g.cards_done.wait()
    if "cards" in g.unread:
        g.miss("stuck", g.unread["cards"].why)
        return
    holders = {p.pid: p.name for card in g.found["cards"] for p in card.reading.processes}
    first = await g.thread(node.stuck, g.machine, holders)
    await trio.sleep(g.asker.gap_s)
    again = {s.pid for s in await g.thread(node.stuck, g.machine, holders)}
    g.found["stuck"] = tuple(s for s in first if s.pid in again)
