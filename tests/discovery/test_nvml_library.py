"""NVIDIA's binding as we use it, as far as a machine without a GPU can tell."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from llmgw.discovery import nvml, nvml_library
from llmgw.discovery.nvml import Library, NvmlError
from llmgw.discovery.nvml_library import PynvmlLibrary, loaded


def test_the_binding_has_all_that_is_used_of_it() -> None:
    used = set(re.findall(r"pynvml\.(\w+)", inspect.getsource(nvml_library)))
    assert len(used) > 30
    assert [name for name in sorted(used) if not hasattr(pynvml, name)] == []


def test_the_structures_have_the_fields_that_are_used() -> None:
    def fields(structure: type) -> set[str]:
        return {name for name, *_ in structure._fields_}  # type: ignore[attr-defined]

    assert "bThresholdExceeded" in fields(pynvml.c_nvmlEccSramErrorStatus_v1_t)
    assert "unrepairableMemory" in fields(pynvml.c_nvmlUnrepairableMemory_v1_t)
    assert {"bChannelRepairPending", "bTpcRepairPending"} <= fields(pynvml.c_nvmlRepairStatus_t)
    assert {"clusterUuid", "status", "cliqueId", "state", "healthSummary"} <= fields(pynvml.c_nvmlGpuFabricInfo_v3_t)
    assert {"clusterUuid", "status", "cliqueId", "state"} <= fields(pynvml.c_nvmlGpuFabricInfo_t)


def test_every_method_of_the_interface_is_there_with_the_same_arguments() -> None:
    for name, method in vars(Library).items():
        if callable(method) and not name.startswith("_"):
            ours = getattr(PynvmlLibrary, name)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(method).parameters), name


def test_codes_are_nvml_s() -> None:
    assert nvml_library.NOT_SUPPORTED == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert (nvml.NO_PERMISSION, nvml.LOST, nvml.RESET_REQUIRED, nvml.UNKNOWN) == (
        pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_UNKNOWN,
    )  # fmt: skip
    assert nvml.PROHIBITED == pynvml.NVML_COMPUTEMODE_PROHIBITED
    assert nvml.MAX_LINKS == pynvml.NVML_NVLINK_MAX_LINKS


def driver(versions: int) -> SimpleNamespace:
    """NVML's C functions as the binding calls them, of one card; ``versions`` are those of the memory structure."""

    def memory(_handle: object, to: Any) -> int:
        to._obj.total, to._obj.used = 81559 << 20, (482 if versions > 1 else 5) << 20
        return 0

    def memory_v2(_handle: object, to: Any) -> int:
        if versions < 2:
            return int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        assert to._obj.version == pynvml.nvmlMemory_v2
        to._obj.total, to._obj.reserved, to._obj.used = 81559 << 20, 477 << 20, 5 << 20
        return 0

    def compute(_handle: object, count: Any, found: Any) -> int:
        if found is None:
            count._obj.value = 1
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        count._obj.value, found[0].pid, found[0].usedGpuMemory = 1, 4711, 9 << 20
        found[0].gpuInstanceId, found[0].computeInstanceId = 2, 0
        return 0

    return SimpleNamespace(
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetMemoryInfo_v2=memory_v2,
        nvmlDeviceGetComputeRunningProcesses_v3=compute,
        nvmlDeviceGetGraphicsRunningProcesses_v3=lambda *_: int(pynvml.NVML_ERROR_NOT_SUPPORTED),
    )


@pytest.mark.parametrize("versions", [1, 2])
def test_what_the_driver_reserves_is_not_used(versions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", driver(versions))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    library = PynvmlLibrary()
    assert library.memory(None) == (81559 << 20, 5 << 20)
    assert library.processes(None) == [(4711, 9 << 20, 2, 0)]


def has_nvml() -> bool:
    try:
        with loaded():
            return True
    except NvmlError:
        return False


@pytest.mark.skipif(has_nvml(), reason="this machine has NVML")
def test_without_the_library_its_own_code_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "llmgw.discovery.nvml_child"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f'"code": {pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}' in done.stdout
