"""The processes that an engine started, as their subreaper sees them: found, signalled, reaped."""

import binascii
import contextlib
import os
import signal

from llmgw.agent.shim.cgroup import Cgroup

_TRACKER = b"multiprocessing.resource_tracker"


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat: clock ticks from boot to the start of this process."""
    return stat_field(pid, 19)


def boot_id() -> str:
    """The kernel's id of this boot: pid and start time tell a process only within one."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def digest(cmdline: bytes) -> str:
    """A command line's fingerprint, of what /proc/<pid>/cmdline has.

    A checksum: it is held against chance, beside what is hardly met by chance, and hashlib would cost each shim 3 MB.
    """
    return f"{binascii.crc32(cmdline):08x}"


def fingerprint() -> str:
    """Our own; an engine's would be good for nothing, as engines give themselves other titles. Empty if unreadable."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return digest(file.read())
    except OSError:
        return ""


def children() -> list[int]:
    """Everything whose parent is this process: the engine, and whatever lost its own parent."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent(pid) == os.getpid()]


def parent(pid: int) -> int | None:
    """Field 4 of /proc/<pid>/stat, for kernels without the list of children."""
    return stat_field(pid, 1)


def stat_field(pid: int, number: int) -> int | None:
    """A number from /proc/<pid>/stat, counted from the process's state, which is field 3 of all."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[number])
    except (OSError, ValueError, IndexError):
        return None


def signal_all(engine: int, number: int, *, everything: bool, cgroup: Cgroup) -> None:
    """Signal the engine's group and, for the last resort, every child that left it.

    The engine is not reaped before all else is gone, so its number cannot have become somebody else's.
    """
    if everything and number == signal.SIGKILL:
        cgroup.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(engine, number)
    if everything:
        for pid in children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def kill_all_but_trackers(engine: int) -> None:
    """Kill the engine's group and every child that left it, but for those that clean up after the others."""
    own = set(children())
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                # Looked at after the handle was taken, so that no other process can be meant.
                if (stat_field(pid, 2) == engine or pid in own) and not is_tracker(pid):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def is_tracker(pid: int) -> bool:
    """Whether this is a resource tracker of Python's multiprocessing, which ends by itself with those it is for."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _TRACKER in file.read()
    except OSError:
        return False


def reap_others(engine: int) -> bool:
    """Reap every ended child but the engine; whether any of them is still alive.

    Who has no living parent is our child, so as long as anything that the engine started lives, one of ours does.
    """
    alive = False
    for pid in children():
        if pid != engine:
            with contextlib.suppress(ChildProcessError):
                alive |= os.waitpid(pid, os.WNOHANG) == (0, 0)
    return alive
