"""A cgroup for each engine, where this agent was given a part of the cgroup v2 tree (systemd: ``Delegate=yes``).

No process leaves its cgroup by forking or by a session of its own, so who is in it is the engine's for certain, and
``cgroup.kill`` ends all of it at once. No controller is turned on, so the agent may stay in the group above. Without
delegation there is none of this, and a shard's processes are told by their environment. All functions block briefly.
"""

from __future__ import annotations

import os
from pathlib import Path

from llmgw.telemetry.logging import logger

ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""Where the v2 tree is mounted: alone, or beside v1."""

SYSTEMD = Path("/run/systemd/system")
"""There while systemd manages this machine, and with it all of the tree that it did not delegate."""

_DELEGATED = ("user.delegate", "trusted.delegate")  # systemd's cgroup-setup.c


def delegated(
    roots: tuple[Path, ...] = ROOTS, own: Path = Path("/proc/self/cgroup"), systemd: Path = SYSTEMD
) -> Path | None:
    """The cgroup in which this agent may make others, or ``None`` where it was given none."""
    try:
        path = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    if "/.." in path:  # outside of our cgroup namespace
        return None
    for root in roots:
        here = root / path.strip("/")
        if (root / "cgroup.controllers").exists() and (here / "cgroup.procs").exists():
            return here if _ours(here, systemd) else None
    return None


def _ours(here: Path, systemd: Path) -> bool:
    if not (os.access(here, os.W_OK | os.X_OK) and os.access(here / "cgroup.procs", os.W_OK)):
        return False
    # Root may write everywhere, but what systemd did not give away is systemd's alone.
    if systemd.exists() and here.stat().st_uid == 0:
        return any(_attribute(here, name) == b"1" for name in _DELEGATED)
    return True


def _attribute(path: Path, name: str) -> bytes:
    try:
        return os.getxattr(path, name)
    except OSError:
        return b""


def path_for(delegation: Path | None, shard: str, generation: int, launch: str) -> str:
    """Where this launch's cgroup is made, by its shim; empty without delegation.

    A part of the launch's random value is in the name: two agents may stand in one cgroup, and have equal shards.
    """
    return "" if delegation is None else str(delegation / f"llmgw-{shard}-g{generation}-{launch[:8]}")


def kill(cgroup: Path) -> bool:
    """SIGKILL everything in it; ``False`` when this kernel cannot (before 5.14), or it is gone."""
    try:
        (cgroup / "cgroup.kill").write_text("1")
    except OSError:
        return False
    return True


def remove(cgroup: Path) -> None:
    """Take it away; one that is gone already is no error, and one that is not empty stays and is said."""
    try:
        cgroup.rmdir()
    except FileNotFoundError:
        return
    except OSError as failed:
        logger("cgroup").warning("a cgroup stays", path=str(cgroup), reason=failed.strerror)
