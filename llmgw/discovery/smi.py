"""GPUs through `nvidia-smi`: what is run, and how its answers become devices."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import evolve, frozen

from llmgw.discovery.command import Ran, run
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.smi_text import (
    ListedMig,
    SmiGpu,
    SmiMig,
    parse_capabilities,
    parse_list,
    parse_xml,
)
from llmgw.hardware.gpu import compute_capability, device_class, mig_class, mig_number
from llmgw.hardware.inventory import Device, DeviceProcess, Driver, Fault, MigInstance

_EXIT: Mapping[int, tuple[str, str, str]] = {
    9: ("driver-missing", "the NVIDIA driver is not loaded", "install it, or run: modprobe nvidia"),
    12: ("driver-missing", "the NVML library is missing", "install the driver's user-space packages"),
    15: ("gpu-lost", "a GPU fell off the bus", "reboot the node"),
    18: ("driver-mismatch", "the driver was upgraded under the loaded module", "reboot, or unload and load nvidia"),
}
"""Exit codes (nvidia-smi's manual page, RETURN VALUE)."""


@frozen
class Gpus:
    """What nvidia-smi knows: the driver, every device, and what could not be read."""

    driver: Driver
    devices: tuple[Device, ...]
    warnings: tuple[Fault, ...]


async def read(program: str, timeout_s: float) -> Gpus:
    """Ask nvidia-smi for everything; ``timeout_s`` bounds each of its three runs, which go on at the same time.

    Raises :class:`DiscoveryError` when nothing can be read at all.
    """
    ran: dict[str, Ran] = {}
    failed: OSError | None = None

    async def ask(name: str, *args: str) -> None:
        nonlocal failed
        try:
            ran[name] = await run((program, *args), timeout_s)
        except OSError as cause:
            failed = cause

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "xml", "-q", "-x")
        nursery.start_soon(ask, "list", "-L")
        nursery.start_soon(ask, "capability", "--query-gpu=uuid,compute_cap", "--format=csv,noheader")
    if failed is not None:
        raise DiscoveryError(
            "driver-missing", program, f"cannot be run: {failed.strerror}", "check discovery.nvidia_smi"
        ) from failed
    xml = ran["xml"]
    if "<nvidia_smi_log" not in xml.stdout:
        raise _failure(xml, timeout_s)
    log = parse_xml(xml.stdout)
    warnings = []
    if xml.code != 0:
        warnings.append(_failure(xml, timeout_s).as_fault())
    if log.attached is not None and log.attached != len(log.gpus):
        warnings.append(
            Fault("gpu-lost", f"nvidia-smi counts {log.attached} GPUs and shows {len(log.gpus)}", "reboot the node")
        )
    listed = parse_list(ran["list"].stdout)
    capabilities = parse_capabilities(ran["capability"].stdout)
    devices = tuple(device for gpu in log.gpus for device in _devices(gpu, listed, capabilities))
    return Gpus(Driver(log.driver_version, log.cuda_version), devices, tuple(warnings))


def _failure(ran: Ran, timeout_s: float) -> DiscoveryError:
    if ran.code is None:
        return DiscoveryError(
            "timeout",
            "nvidia-smi",
            f"did not answer within {timeout_s:g} s",
            "the driver hangs, often in a GPU's GSP; look for Xid lines in the kernel log, then reboot",
        )
    if "version mismatch" in f"{ran.stdout}{ran.stderr}":
        code, reason, remedy = _EXIT[18]
    else:
        code, reason, remedy = _EXIT.get(ran.code, ("failed", f"ended with exit code {ran.code}", "run it by hand"))
    return DiscoveryError(code, "nvidia-smi", f"{reason} ({ran.said})", remedy)


def _devices(gpu: SmiGpu, listed: tuple[ListedMig, ...], capabilities: Mapping[str, int]) -> list[Device]:
    whole = _whole(gpu, capabilities)
    if (gpu.mig_mode or "").lower() != "enabled":
        return [whole]
    if not gpu.migs:
        empty = Fault(
            "mig-empty", "is in MIG mode and has no instance", "carve it (nvidia-smi mig -cgi …), or end MIG mode"
        )
        return [_with(whole, empty)]
    names = {item.index: item for item in listed if item.card == gpu.index}
    return [_instance(gpu, mig, names.get(mig.index), whole) for mig in gpu.migs]


def _with(device: Device, *faults: Fault) -> Device:
    return evolve(device, faults=(*device.faults, *faults))


def _whole(gpu: SmiGpu, capabilities: Mapping[str, int]) -> Device:
    faults = list(gpu.faults)
    if gpu.total_mib is None and not faults:
        faults.append(
            Fault("unreadable", "its memory is not reported", "unified-memory machines and some guests do not say it")
        )
    if gpu.mig_pending is not None and gpu.mig_mode is not None and gpu.mig_pending != gpu.mig_mode:
        faults.append(
            Fault("not-ready", f"MIG mode is {gpu.mig_mode}, {gpu.mig_pending} is pending", "reset the GPU, or reboot")
        )
    name = device_class(gpu.name, gpu.total_mib)
    return Device(
        number=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        device_class=name,
        total_mib=gpu.total_mib,
        used_mib=gpu.used_mib,
        pci_address=gpu.pci_address,
        compute_capability=capabilities.get(gpu.uuid, compute_capability(name)),
        processes=_merged(gpu, None, None),
        faults=tuple(faults),
    )


def _merged(gpu: SmiGpu, instance: int | None, compute: int | None) -> tuple[DeviceProcess, ...]:
    """The processes of the whole card, or of one of its instances."""
    if instance is None:
        return tuple(process for process, _, _ in gpu.processes)
    return tuple(p for p, gi, ci in gpu.processes if gi == instance and (compute is None or ci in (None, compute)))


def _instance(gpu: SmiGpu, mig: SmiMig, listed: ListedMig | None, whole: Device) -> Device:
    faults = list(whole.faults)
    if listed is None and mig.uuid is None:
        faults.append(
            Fault(
                "unreadable", "nvidia-smi -L does not name this MIG instance", "run nvidia-smi -L as the agent's user"
            )
        )
    if gpu.total_mib is None:
        faults.append(
            Fault(
                "unreadable",
                "the whole card's memory is not reported, so its class is unknown",
                "run the agent on the host",
            )
        )
    if mig.uncorrected:
        faults.append(Fault("ecc-uncorrected", f"has {mig.uncorrected} uncorrected ECC errors", "reset the GPU"))
    profile = listed.profile if listed is not None else "unknown"
    return Device(
        number=mig_number(gpu.index, max(mig.index, 0)),
        uuid=listed.uuid if listed is not None else mig.uuid or "",
        name=f"{gpu.name} MIG {profile}",
        device_class=mig_class(whole.device_class, profile),
        total_mib=mig.total_mib,
        used_mib=mig.used_mib,
        pci_address=gpu.pci_address,
        compute_capability=whole.compute_capability,
        processes=_merged(gpu, mig.gpu_instance, mig.compute_instance) if mig.gpu_instance is not None else (),
        faults=tuple(faults),
        mig=MigInstance(
            card=gpu.index,
            index=max(mig.index, 0),
            profile=profile,
            gpu_instance=-1 if mig.gpu_instance is None else mig.gpu_instance,
            compute_instance=-1 if mig.compute_instance is None else mig.compute_instance,
        ),
    )
