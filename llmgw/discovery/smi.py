"""GPUs through `nvidia-smi`: what is asked, and how its answers are put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import trio
from attrs import evolve

from llmgw.discovery.command import Ran
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.machine import Machine
from llmgw.discovery.smi_text import Listed, ListedMig, SmiLog, parse_capabilities, parse_list, parse_xml
from llmgw.discovery.smi_topo import NvlinkCard, Topo, parse_nvlink_status, parse_topo
from llmgw.hardware.inventory import AdapterPath, Fault
from llmgw.hardware.reading import CardHealth, CardReading, GpuReading, InstanceReading, PairReading
from llmgw.hardware.topology import nearest

_ASKED: Mapping[str, tuple[str, ...]] = {
    "xml": ("-q", "-x"),
    "list": ("-L",),
    "capability": ("--query-gpu=uuid,compute_cap", "--format=csv,noheader"),
    "topo": ("topo", "-m"),
    "nvlink": ("nvlink", "--status"),
}
_MISMATCH = (
    "driver-mismatch",
    "the driver was upgraded under the loaded module",
    "reboot, or unload the nvidia modules and load them again",
)
_BLOCKED = (
    "blocked",
    "the operating system blocks access to the GPU",
    "on WSL2 update the Windows driver and run wsl --shutdown",
)
_UNKNOWN = (
    "driver-failed",
    "NVML cannot be initialised",
    "in a container: start it anew, its devices were taken away; else look for Xid lines in the kernel log",
)
_SAID: Mapping[str, tuple[str, str, str]] = {
    "version mismatch": _MISMATCH,
    "blocked by the operating system": _BLOCKED,
    "Failed to initialize NVML: Unknown Error": _UNKNOWN,
    "No devices were found": ("no-gpu", "the driver finds no GPU", "check that it supports this card, and its log"),
}
_EXIT: Mapping[int, tuple[str, str, str]] = {
    4: ("no-permission", "the GPUs may not be read by this user", "let the agent's user open /dev/nvidia*"),
    9: ("driver-missing", "the NVIDIA driver is not loaded", "install it, or run: modprobe nvidia"),
    12: ("driver-missing", "the NVML library is missing", "install the driver's user-space packages"),
    14: ("inforom", "an infoROM is corrupt", "plan to replace the GPU"),
    15: ("gpu-lost", "a GPU fell off the bus", "reboot the node"),
    18: _MISMATCH,
}
"""Exit codes (nvidia-smi's manual page, RETURN VALUE)."""


async def read(machine: Machine, timeout_s: float, pci_gpus: Sequence[str]) -> GpuReading:
    """Ask nvidia-smi for everything; ``timeout_s`` is said in messages, the machine bounds each run.

    ``pci_gpus`` are the addresses of the NVIDIA GPUs on the bus, in order: where one lost card makes nvidia-smi fail
    as a whole, the others are asked one by one. Raises :class:`DiscoveryError` when nothing can be read at all.
    """
    ran: dict[str, Ran] = {}
    failed: DiscoveryError | None = None

    async def ask(name: str, args: tuple[str, ...]) -> None:
        nonlocal failed
        try:
            ran[name] = await machine.ask("nvidia-smi", *args)
        except DiscoveryError as cause:
            failed = cause

    async with trio.open_nursery() as nursery:
        for name, args in _ASKED.items():
            nursery.start_soon(ask, name, args)
    if failed is not None:
        raise failed
    xml = ran["xml"]
    faults: list[Fault] = []
    if "<nvidia_smi_log" in xml.stdout:
        log = parse_xml(xml.stdout)
        if xml.code != 0:
            faults.append(_failure(xml, timeout_s).as_fault())
    else:
        whole = _failure(xml, timeout_s)
        if xml.code is None or not pci_gpus or whole.code in ("driver-missing", "driver-mismatch", "no-gpu"):
            raise whole
        log = await _one_by_one(machine, pci_gpus, whole)
        faults.append(whole.as_fault())
    listed = parse_list(ran["list"].stdout)
    cards = _indexed(log, listed)
    if log.attached is not None and log.attached != len(cards):
        faults.append(
            Fault("gpu-lost", f"nvidia-smi counts {log.attached} GPUs and shows {len(cards)}", "reboot the node")
        )
    capabilities = parse_capabilities(ran["capability"].stdout)
    links = _nvlinks(ran["nvlink"], cards)
    unnamed = "" if ran["list"].code == 0 else _failure(ran["list"], timeout_s).reason
    cards = [_completed(card, listed, capabilities, links, unnamed) for card in cards]
    pairs: tuple[PairReading, ...] = ()
    try:
        topo = _topo(ran["topo"], timeout_s)
        pairs = _pairs(topo, cards)
        cards = [_near(card, topo) for card in cards]
    except DiscoveryError as wrong:
        if len(cards) > 1:
            faults.append(
                Fault("topology-unknown", f"{wrong.thing}: {wrong.reason}; NVLink is not known", wrong.remedy)
            )
    return GpuReading(log.driver, tuple(cards), pairs, tuple(faults))


async def _one_by_one(machine: Machine, pci_gpus: Sequence[str], whole: DiscoveryError) -> SmiLog:
    """Each card by itself. NVML counts in the order of the bus, so the position there is the index."""
    answers: dict[int, SmiLog] = {}
    said: dict[int, str] = {}

    async def ask(index: int, address: str) -> None:
        try:
            ran = await machine.ask("nvidia-smi", "-q", "-x", "-i", address)
            answers[index] = parse_xml(ran.stdout)
        except DiscoveryError as failed:
            said[index] = failed.reason

    async with trio.open_nursery() as nursery:
        for index, address in enumerate(pci_gpus):
            nursery.start_soon(ask, index, address)
    logs = [log for log in answers.values() if log.cards]
    if not logs:
        raise whole
    cards = []
    for index, address in enumerate(pci_gpus):
        answer = answers.get(index)
        if answer is not None and answer.cards:
            cards.append(evolve(answer.cards[0], index=index))
        else:
            cards.append(CardReading(index, "", "unknown GPU", address, health=CardHealth(lost=True)))
    return SmiLog(logs[0].driver, tuple(cards), None)


def _failure(ran: Ran, timeout_s: float) -> DiscoveryError:
    if ran.code is None:
        return DiscoveryError(
            "timeout",
            "nvidia-smi",
            f"did not answer within {timeout_s:g} s",
            "the driver hangs, often in a GPU's GSP; look for Xid lines in the kernel log, then reboot",
        )
    text = f"{ran.stdout[:4096]}{ran.stderr[:4096]}"
    known = next((what for words, what in _SAID.items() if words in text), None)
    if known is None and ("is lost" in text or "Unable to determine the device handle" in text):
        known = _EXIT[15]
    code, reason, remedy = known or _EXIT.get(
        ran.code, ("failed", f"ended with exit code {ran.code}", "run it by hand")
    )
    return DiscoveryError(code, "nvidia-smi", f"{reason} ({ran.said})", remedy)


def _indexed(log: SmiLog, listed: Listed) -> list[CardReading]:
    """The cards with the indices that `-L` gives them: a lost card leaves a gap there, and none in the XML."""
    made: list[CardReading] = []
    taken: set[int] = set()
    for card in log.cards:
        index = listed.cards.get(card.uuid, card.index) if card.uuid else card.index
        while index in taken:
            index += 1
        taken.add(index)
        made.append(evolve(card, index=index))
    return made


def _completed(
    card: CardReading,
    listed: Listed,
    capabilities: Mapping[str, int],
    links: Mapping[int, NvlinkCard],
    unnamed: str,
) -> CardReading:
    """A card with what only other answers say of it; ``unnamed`` is why `-L` names no MIG devices, if it failed."""
    names: dict[int | str, ListedMig] = {}
    for item in listed.migs:
        if item.card == card.index:
            names[item.index] = names[item.uuid] = item
    up = links.get(card.index)
    active = None if up is None or not up.links else sum(1 for speed in up.links if speed is not None)
    return evolve(
        card,
        capability=capabilities.get(card.uuid),
        # By UUID where the XML has it: positions are not identities.
        instances=tuple(_named(i, names.get(i.uuid or i.index)) for i in card.instances),
        instances_trouble=unnamed if card.instances else "",
        nvlinks=len(up.links) if up is not None and active else None,
        nvlinks_up=active or None,
    )


def _named(instance: InstanceReading, listed: ListedMig | None) -> InstanceReading:
    return instance if listed is None else evolve(instance, uuid=listed.uuid, profile=listed.profile)


def _nvlinks(ran: Ran, cards: Sequence[CardReading]) -> Mapping[int, NvlinkCard]:
    """What `nvlink --status` says by index; it explains and decides nothing, so it may fail."""
    known = {card.uuid: card.index for card in cards if card.uuid}
    try:
        return {known.get(found.uuid, found.index): found for found in parse_nvlink_status(ran.stdout)}
    except DiscoveryError:
        return {}


def _topo(ran: Ran, timeout_s: float) -> Topo:
    if ran.code is None:
        raise _failure(ran, timeout_s)
    return parse_topo(ran.stdout)


def _pairs(topo: Topo, cards: Sequence[CardReading]) -> tuple[PairReading, ...]:
    there = {card.index for card in cards if not card.health.lost}
    missing = sorted(there - {gpu.index for gpu in topo.gpus})
    if missing:
        raise DiscoveryError("malformed", "nvidia-smi topo -m", f"does not have GPU {missing[0]}", "run it by hand")
    return tuple(_each(topo, there))


def _near(card: CardReading, topo: Topo) -> CardReading:
    said = next((gpu for gpu in topo.gpus if gpu.index == card.index), None)
    if said is None:
        return card
    paths = (AdapterPath(name, how) for (gpu, name), how in topo.adapters.items() if gpu == card.index)
    return evolve(card, cpus=said.cpus, numa_node=said.numa_node, adapters=nearest(paths))


def _each(topo: Topo, there: set[int]) -> Iterator[PairReading]:
    for (a, b), link in sorted(topo.links.items()):
        if a < b and {a, b} <= there:
            yield PairReading(a, b, link.relation, link.nvlinks)
