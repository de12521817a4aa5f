"""Names of device classes, and what follows from them.

A class is ``<card>-<GiB>g``: the card from the product name, the GiB from the memory that the driver reports, never
from the marketing size, because this number decides whether a model fits. For a MIG instance the profile follows:
``a100-80g-mig-3g.40gb``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MIG_BASE = 1000
"""Placement numbers of MIG instances begin here: 1000 + 100 * card + instance."""

_DROPPED_WORDS = frozenset(
    {
        "nvidia", "grid", "tesla", "quadro", "geforce", "graphics", "generation", "edition", "server", "workstation",
        "blackwell", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "pcie", "pci-e", "pg506", "hbm2", "hbm2e",
        "hbm3", "hbm3e", "superchip", "with", "display", "attached",
    }
)  # fmt: skip
"""Words of a product name that say form factor, memory kind or marketing, not which chip it is."""

_SIZE = re.compile(r"[0-9]+(?:gb|g)")
_CLASS = re.compile(r"(?P<card>.+?)-(?P<gib>[0-9]+)g(?:-mig-(?P<profile>.+))?")

_CAPABILITY: Mapping[str, int] = {
    "p100": 60, "p40": 61, "p4": 61, "gtx-1080": 61, "gtx-1080-ti": 61, "titan-xp": 61,
    "v100": 70, "v100s": 70, "titan-v": 70,
    "t4": 75, "t4g": 75, "rtx-2080": 75, "rtx-2080-ti": 75, "rtx-2080-super": 75, "rtx-2070": 75, "rtx-6000": 75,
    "rtx-8000": 75, "titan-rtx": 75,
    "a100": 80, "a800": 80, "a30": 80, "a100x": 80,
    "a2": 86, "a10": 86, "a10g": 86, "a16": 86, "a40": 86, "rtx-a2000": 86, "rtx-a4000": 86, "rtx-a4500": 86,
    "rtx-a5000": 86, "rtx-a5500": 86, "rtx-a6000": 86, "rtx-3060": 86, "rtx-3060-ti": 86, "rtx-3070": 86,
    "rtx-3080": 86, "rtx-3080-ti": 86, "rtx-3090": 86, "rtx-3090-ti": 86,
    "l2": 89, "l4": 89, "l20": 89, "l40": 89, "l40s": 89, "l40g": 89, "rtx-4000-sff-ada": 89, "rtx-4000-ada": 89,
    "rtx-4500-ada": 89, "rtx-5000-ada": 89, "rtx-6000-ada": 89, "rtx-4060": 89, "rtx-4060-ti": 89, "rtx-4070": 89,
    "rtx-4070-ti": 89, "rtx-4080": 89, "rtx-4080-super": 89, "rtx-4090": 89, "rtx-4090-d": 89,
    "h100": 90, "h100-nvl": 90, "h800": 90, "h200": 90, "h200-nvl": 90, "h20": 90, "h20-3e": 90, "gh200": 90,
    "b100": 100, "b200": 100, "gb200": 100, "b300": 103, "gb300": 103,
    "rtx-5070": 120, "rtx-5080": 120, "rtx-5090": 120, "rtx-pro-4000": 120, "rtx-pro-4500": 120, "rtx-pro-5000": 120,
    "rtx-pro-6000": 120, "gb10": 121,
}  # fmt: skip
"""Ten times the compute capability by card (https://developer.nvidia.com/cuda-gpus). Unknown cards are unknown."""


def card_name(product: str) -> str:
    """The card's slug: ``h100`` from the product name ``NVIDIA H100 80GB HBM3``, ``h100-nvl`` from ``NVIDIA H100 NVL``.

    Words that name the vendor, a form factor, a memory kind or a size are dropped; what is left is lower case, joined
    by hyphens. ``A100-SXM4-80GB`` is split at its hyphens, so that each part is judged alone.
    """
    words = re.sub(r"[^a-z0-9.+]+", " ", product.lower().replace("max-q", "")).split()
    kept = [w for w in words if w not in _DROPPED_WORDS and not _SIZE.fullmatch(w)]
    return "-".join(kept) or "gpu"


def gib_of(total_mib: int) -> int:
    """MiB as the driver reports them in whole GiB, rounded half up (22.50 is 23)."""
    return (total_mib + 512) // 1024


def device_class(product: str, total_mib: int | None) -> str:
    """The class of a whole card; without a size, and so fit for no profile, when its memory is not known."""
    return card_name(product) if total_mib is None else f"{card_name(product)}-{gib_of(total_mib)}g"


def mig_class(card_class: str, profile: str) -> str:
    """The class of a MIG instance; ``card_class`` is the whole card's, with the whole card's memory."""
    return f"{card_class}-mig-{profile}"


def compute_capability(name: str) -> int | None:
    """Ten times the compute capability of a device class, or ``None`` for a card that is not in the table."""
    match = _CLASS.fullmatch(name)
    return None if match is None else _CAPABILITY.get(match["card"])


def same_but_for_size(a: str, b: str) -> bool:
    """Whether two device classes are of one card, and of one MIG profile, and count its memory differently."""
    one, other = _CLASS.fullmatch(a), _CLASS.fullmatch(b)
    if one is None or other is None or one["gib"] == other["gib"]:
        return False
    return (one["card"], one["profile"]) == (other["card"], other["profile"])


def mig_number(card: int, instance: int) -> int:
    """The placement number of a MIG instance."""
    return MIG_BASE + 100 * card + instance
