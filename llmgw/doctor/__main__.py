"""Writes the catalogue into docs/doctor.md: ``python -m llmgw.doctor docs/doctor.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from llmgw.doctor.checks import CHECKS
from llmgw.doctor.report import manual

MARK = "## The checks\n\n"

if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(f"{page.read_text().partition(MARK)[0]}{MARK}{manual(CHECKS)}")
