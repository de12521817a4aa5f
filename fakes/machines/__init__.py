"""Fake machines: one description renders a fake nvidia-smi, a fake NVML and a sysfs tree.

python -m fakes.machines hgx-h100 DIR
"""

from .catalog import MACHINES
from .description import Card, Hca, Machine, Mig
from .render import render, write_state

__all__ = ["MACHINES", "Card", "Hca", "Machine", "Mig", "render", "write_state"]
