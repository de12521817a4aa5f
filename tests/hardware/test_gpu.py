from __future__ import annotations

import pytest

from llmgw.hardware.gpu import compute_capability, device_class, mig_class, mig_number, same_but_for_size
from llmgw.hardware.health import stranger
from llmgw.hardware.inventory import Device, DeviceProcess
from llmgw.settings.profile_rules import DEVICE_CLASS

CARDS = [
    ("Tesla T4", 15360, "t4-15g", 75),
    ("Tesla T4", 15109, "t4-15g", 75),
    ("NVIDIA L4", 23034, "l4-22g", 89),
    ("NVIDIA A2", 15356, "a2-15g", 86),
    ("NVIDIA A10", 23028, "a10-22g", 86),
    ("NVIDIA A10G", 23028, "a10g-22g", 86),
    ("NVIDIA A30", 24576, "a30-24g", 80),
    ("NVIDIA L40S", 46068, "l40s-45g", 89),
    ("NVIDIA L40", 46068, "l40-45g", 89),
    ("NVIDIA A40", 46068, "a40-45g", 86),
    ("NVIDIA A100-SXM4-40GB", 40960, "a100-40g", 80),
    ("NVIDIA A100-PCIE-40GB", 40536, "a100-40g", 80),
    ("NVIDIA A100 80GB PCIe", 81920, "a100-80g", 80),
    ("NVIDIA A800-SXM4-80GB", 81920, "a800-80g", 80),
    ("NVIDIA H100 80GB HBM3", 81559, "h100-80g", 90),
    ("NVIDIA H100 PCIe", 81559, "h100-80g", 90),
    ("NVIDIA H100 NVL", 95830, "h100-nvl-94g", 90),
    ("NVIDIA H20", 97871, "h20-96g", 90),
    ("NVIDIA GH200 480GB", 97871, "gh200-96g", 90),
    ("NVIDIA GH200 144G HBM3e", 146831, "gh200-143g", 90),
    ("NVIDIA H200", 143771, "h200-140g", 90),
    ("NVIDIA B200", 183359, "b200-179g", 100),
    ("NVIDIA GB200", 189471, "gb200-185g", 100),
    ("NVIDIA B300", 275040, "b300-269g", 103),
    ("NVIDIA GB300", 284208, "gb300-278g", 103),
    ("Tesla P100-PCIE-16GB", 16384, "p100-16g", 60),
    ("Tesla V100-SXM2-16GB", 16160, "v100-16g", 70),
    ("Tesla V100-SXM2-32GB", 32510, "v100-32g", 70),
    ("Tesla P40", 23040, "p40-23g", 61),
    ("Tesla K80", 11441, "k80-11g", None),
    ("NVIDIA RTX A4000", 16376, "rtx-a4000-16g", 86),
    ("NVIDIA RTX A5000", 24564, "rtx-a5000-24g", 86),
    ("NVIDIA RTX A6000", 49140, "rtx-a6000-48g", 86),
    ("NVIDIA RTX A6000", 46068, "rtx-a6000-45g", 86),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada-48g", 89),
    ("NVIDIA RTX 4000 SFF Ada Generation", 20475, "rtx-4000-sff-ada-20g", 89),
    ("NVIDIA RTX PRO 5000 Blackwell", 48935, "rtx-pro-5000-48g", 120),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx-pro-6000-96g", 120),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "rtx-pro-6000-96g", 120),
    ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090-32g", 120),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090-24g", 89),
    ("NVIDIA GeForce RTX 4080 SUPER", 16376, "rtx-4080-super-16g", 89),
    ("NVIDIA GeForce RTX 3090", 24576, "rtx-3090-24g", 86),
    ("NVIDIA GeForce RTX 2080 Ti", 10989, "rtx-2080-ti-11g", 75),
    ("NVIDIA GeForce GTX 1080", 8119, "gtx-1080-8g", 61),
    ("GRID H100L-2-24C", 24576, "h100l-2-24c-24g", None),
    ("NVIDIA L20", 46068, "l20-45g", 89),
    ("NVIDIA A16", 15356, "a16-15g", 86),
    ("NVIDIA H800", 81559, "h800-80g", 90),
    ("NVIDIA H200 NVL", 143771, "h200-nvl-140g", 90),
    ("NVIDIA H20-3e", 143771, "h20-3e-140g", 90),
    ("NVIDIA GH200 120GB", 97871, "gh200-96g", 90),
    ("Tesla V100-SXM2-16GB", 16384, "v100-16g", 70),
    ("Tesla V100-PCIE-32GB", 32768, "v100-32g", 70),
    ("Tesla P40", 24576, "p40-24g", 61),
    ("NVIDIA RTX A5000", 23028, "rtx-a5000-22g", 86),
    ("NVIDIA RTX PRO 4500 Blackwell", 32623, "rtx-pro-4500-32g", 120),
    ("NVIDIA GeForce RTX 4090", 49140, "rtx-4090-48g", 89),
    ("NVIDIA GeForce RTX 3080", 10240, "rtx-3080-10g", 86),
    ("NVIDIA GeForce RTX 3060", 12288, "rtx-3060-12g", 86),
    ("NVIDIA GeForce RTX 2080 SUPER", 8192, "rtx-2080-super-8g", 75),
    ("NVIDIA GeForce RTX 2080 Ti", 11264, "rtx-2080-ti-11g", 75),
    ("GeForce GTX 1080", 8116, "gtx-1080-8g", 61),
    ("NVIDIA A100-SXM4-40GB", 40536, "a100-40g", 80),
]


@pytest.mark.parametrize(("product", "mib", "name", "capability"), CARDS)
def test_classes(product: str, mib: int, name: str, capability: int | None) -> None:
    assert device_class(product, mib) == name
    assert compute_capability(name) == capability
    assert DEVICE_CLASS.fullmatch(name)


def test_unknown_memory_has_no_size_and_fits_no_profile() -> None:
    assert device_class("NVIDIA GB10", None) == "gb10"
    assert not DEVICE_CLASS.fullmatch("gb10")


def test_mig() -> None:
    name = mig_class(device_class("NVIDIA H200", 143771), "1g.18gb")
    assert name == "h200-140g-mig-1g.18gb"
    assert DEVICE_CLASS.fullmatch(name)
    assert compute_capability(name) == 90
    assert mig_number(3, 6) == 1306


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("l4-24g", "l4-22g", True),
        ("l4-22g", "l4-22g", False),
        ("l4-22g", "l40s-45g", False),
        ("a10-24g", "a100-40g", False),
        ("h100-80g-mig-1g.10gb", "h100-94g-mig-1g.10gb", True),
        ("h100-80g-mig-1g.10gb", "h100-94g", False),
        ("gb10", "gb10-122g", False),
    ],
)
def test_sizes_that_are_marketing(a: str, b: str, same: bool) -> None:
    assert same_but_for_size(a, b) is same


def test_strangers() -> None:
    held = Device(3, "GPU-3", "x", "h100-80g", 81559, 11264, processes=(DeviceProcess(4711, "python", 11264),))
    fault = stranger(held, ours=False)
    assert fault is not None
    assert fault.reason == "gpu-3 holds 11 GiB by pid 4711 python"
    assert stranger(held, ours=True) is None
    nameless = stranger(Device(0, "", "x", "c", 81559, 700), ours=False)
    assert nameless is not None
    assert nameless.reason == "gpu-0 holds 700 MiB, by a process that the driver does not name"
    assert stranger(Device(0, "", "x", "c", 81559, 400), ours=False) is None
    assert stranger(Device(0, "", "x", "c", 81559, None), ours=False) is None
