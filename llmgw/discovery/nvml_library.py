"""NVIDIA's own library behind :class:`llmgw.discovery.nvml.Library`: the only module that knows ``pynvml``."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pynvml

from llmgw.discovery.nvml import Handle, NvmlError

NOT_SUPPORTED = 3


def _call(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except pynvml.NVMLError as failed:
        raise NvmlError(int(failed.value), str(failed)) from failed
    except (AttributeError, ValueError, OSError) as failed:
        # A library older than the binding: it lacks the function, or has another size for a structure.
        raise NvmlError(NOT_SUPPORTED, str(failed)) from failed


def _text(value: Any) -> str:
    """Bindings before 11.515 give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class PynvmlLibrary:
    """NVML of this machine, between :func:`loaded`'s two ends."""

    def driver_version(self) -> str:
        return _text(_call(pynvml.nvmlSystemGetDriverVersion))

    def cuda_version(self) -> str:
        number = int(_call(pynvml.nvmlSystemGetCudaDriverVersion))
        return f"{number // 1000}.{number % 1000 // 10}"

    def count(self) -> int:
        return int(_call(pynvml.nvmlDeviceGetCount))

    def card(self, index: int) -> Handle:
        return _call(pynvml.nvmlDeviceGetHandleByIndex, index)

    def uuid(self, handle: Handle) -> str:
        return _text(_call(pynvml.nvmlDeviceGetUUID, handle))

    def name(self, handle: Handle) -> str:
        return _text(_call(pynvml.nvmlDeviceGetName, handle))

    def pci_bus_id(self, handle: Handle) -> str:
        return _text(_call(pynvml.nvmlDeviceGetPciInfo, handle).busId)

    def memory(self, handle: Handle) -> tuple[int, int]:
        try:
            found = _call(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
        except NvmlError as failed:
            if failed.code not in (2, NOT_SUPPORTED, 13, 25):
                raise
            # Drivers before R510 have the first version only, and reserve outside of it.
            found = _call(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return int(found.total), int(found.used)

    def capability(self, handle: Handle) -> tuple[int, int]:
        major, minor = _call(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        return int(major), int(minor)

    def mig_mode(self, handle: Handle) -> tuple[int, int]:
        current, pending = _call(pynvml.nvmlDeviceGetMigMode, handle)
        return int(current), int(pending)

    def mig_slots(self, handle: Handle) -> int:
        return int(_call(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle))

    def mig(self, handle: Handle, index: int) -> Handle:
        return _call(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)

    def gpu_instance(self, mig: Handle) -> int:
        return int(_call(pynvml.nvmlDeviceGetGpuInstanceId, mig))

    def compute_instance(self, mig: Handle) -> int:
        return int(_call(pynvml.nvmlDeviceGetComputeInstanceId, mig))

    def uncorrected(self, handle: Handle, *, lifetime: bool) -> int:
        counter = pynvml.NVML_AGGREGATE_ECC if lifetime else pynvml.NVML_VOLATILE_ECC
        kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return int(_call(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, counter))

    def sram_uncorrected(self, mig: Handle) -> int:
        kind, counter = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        where = pynvml.NVML_MEMORY_LOCATION_SRAM
        return int(_call(pynvml.nvmlDeviceGetMemoryErrorCounter, mig, kind, counter, where))

    def remapped_rows(self, handle: Handle) -> tuple[int, int, bool, bool]:
        correctable, uncorrectable, pending, failed = _call(pynvml.nvmlDeviceGetRemappedRows, handle)
        return int(correctable), int(uncorrectable), bool(pending), bool(failed)

    def retirement_pending(self, handle: Handle) -> bool:
        return bool(_call(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle))

    def repair_pending(self, handle: Handle) -> bool:
        status = _call(pynvml.nvmlDeviceGetRepairStatus, handle)
        return bool(status.bChannelRepairPending) or bool(status.bTpcRepairPending)

    def sram_threshold(self, handle: Handle) -> bool:
        status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
        _call(pynvml.nvmlDeviceGetSramEccErrorStatus, handle, pynvml.byref(status))
        return bool(status.bThresholdExceeded)

    def unrepairable(self, handle: Handle) -> bool:
        return bool(_call(pynvml.nvmlDeviceGetUnrepairableMemoryFlag_v1, handle).unrepairableMemory)

    def compute_mode(self, handle: Handle) -> int:
        return int(_call(pynvml.nvmlDeviceGetComputeMode, handle))

    def recovery(self, handle: Handle) -> int:
        return self._field(handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)

    def reset_required(self, handle: Handle) -> bool:
        return bool(self._field(handle, pynvml.NVML_FI_DEV_RESET_STATUS))

    def _field(self, handle: Handle, number: int) -> int:
        (value,) = _call(pynvml.nvmlDeviceGetFieldValues, handle, [number])
        if value.nvmlReturn:
            raise NvmlError(int(value.nvmlReturn), f"field {number}")
        return int(value.value.uiVal)

    def fabric(self, handle: Handle) -> tuple[int, int, int, int, str]:
        info = pynvml.c_nvmlGpuFabricInfo_v3_t()
        try:
            _call(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, pynvml.byref(info))
            health = int(info.healthSummary)
        except NvmlError as failed:
            if failed.code not in (2, NOT_SUPPORTED, 13, 25):
                raise
            info = pynvml.c_nvmlGpuFabricInfo_t()
            _call(pynvml.nvmlDeviceGetGpuFabricInfo, handle, pynvml.byref(info))
            health = 0
        cluster = str(uuid.UUID(bytes=bytes(info.clusterUuid)))
        return int(info.state), int(info.status), health, int(info.cliqueId), cluster

    def temperature_c(self, handle: Handle) -> int:
        return int(_call(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU))

    def power_mw(self, handle: Handle) -> int:
        return int(_call(pynvml.nvmlDeviceGetPowerUsage, handle))

    def utilization(self, handle: Handle) -> int:
        return int(_call(pynvml.nvmlDeviceGetUtilizationRates, handle).gpu)

    def processes(self, handle: Handle) -> Sequence[tuple[int, int | None, int | None, int | None]]:
        found: list[Any] = []
        failed: list[NvmlError] = []
        for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
            try:
                found += _call(ask, handle)
            except NvmlError as wrong:
                failed.append(wrong)  # a card in MIG mode has no graphics
        if len(failed) == 2:
            raise failed[0]
        return [
            (
                int(p.pid),
                None if p.usedGpuMemory is None else int(p.usedGpuMemory),
                getattr(p, "gpuInstanceId", None),
                getattr(p, "computeInstanceId", None),
            )
            for p in found
        ]

    def process_name(self, pid: int) -> str:
        return _text(_call(pynvml.nvmlSystemGetProcessName, pid))

    def nvlink_active(self, handle: Handle, link: int) -> bool:
        return bool(_call(pynvml.nvmlDeviceGetNvLinkState, handle, link))

    def nvlink_remote(self, handle: Handle, link: int) -> tuple[int, str]:
        kind = int(_call(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link))
        try:
            return kind, _text(_call(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link).busId)
        except NvmlError:
            return kind, ""  # that it is a switch is known all the same

    def p2p_nvlink(self, a: Handle, b: Handle) -> bool:
        status = int(_call(pynvml.nvmlDeviceGetP2PStatus, a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK))
        if status == int(pynvml.NVML_P2P_STATUS_UNKNOWN):
            raise NvmlError(NOT_SUPPORTED, "P2P status unknown")  # which is not "none"
        return status == int(pynvml.NVML_P2P_STATUS_OK)

    def ancestor(self, a: Handle, b: Handle) -> int:
        return int(_call(pynvml.nvmlDeviceGetTopologyCommonAncestor, a, b))


@contextmanager
def loaded() -> Iterator[PynvmlLibrary]:
    """The library, initialised. Raises :class:`NvmlError` when it cannot be."""
    _call(pynvml.nvmlInit)
    try:
        yield PynvmlLibrary()
    finally:
        pynvml.nvmlShutdown()
