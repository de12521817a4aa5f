"""``python -m fakes.machines NAME DIR``."""

from __future__ import annotations

import sys
from pathlib import Path

from . import MACHINES, render

if len(sys.argv) != 3 or sys.argv[1] not in MACHINES:
    sys.exit(f"usage: python -m fakes.machines {{{','.join(MACHINES)}}} DIR")
render(MACHINES[sys.argv[1]], Path(sys.argv[2]))
