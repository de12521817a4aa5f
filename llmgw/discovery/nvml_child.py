"""The process that reads NVML: ``python -m llmgw.discovery.nvml_child`` prints one JSON object and ends.

It prints ``{"reading": …}``, or ``{"error": {"code": …, "said": …}}`` with NVML's own code and words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

from attrs import asdict

from llmgw.discovery.nvml import Library, NvmlError, read

NO_BINDING = -1
"""Stands in for NVML's code where the Python package ``nvidia-ml-py`` is missing or does not load."""


def main(load: Callable[[], AbstractContextManager[Library]]) -> int:
    """Read and print; the exit code is 0 whenever something was printed."""
    try:
        with load() as library:
            said: dict[str, object] = {"reading": asdict(read(library))}
    except NvmlError as failed:
        said = {"error": {"code": failed.code, "said": str(failed)}}
    json.dump(said, sys.stdout)
    return 0


def _real() -> AbstractContextManager[Library]:
    try:
        from llmgw.discovery.nvml_library import loaded
    except (ImportError, OSError) as failed:
        raise NvmlError(NO_BINDING, str(failed)) from failed
    return loaded()


if __name__ == "__main__":
    sys.exit(main(_real))
