"""Who runs this process, as far as the machine knows."""

from __future__ import annotations

import getpass
import os


def account() -> str:
    """The account's name; ``uid N`` for one without a name, as containers have that run as any number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
