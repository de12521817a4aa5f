"""What is read of the agent, its settings and the host's services: parts of :class:`llmgw.doctor.facts.Facts`."""

from __future__ import annotations

from attrs import frozen


@frozen
class Unit:
    """The agent's systemd unit. Limits are systemd's words, ``infinity`` or a number."""

    name: str = ""
    load: str = ""
    memlock: str = ""
    stale: bool = False
    pid: int = 0


@frozen
class Limits:
    """Soft limits of the running agent; ``None`` is no limit. Bytes, but for ``files``."""

    memlock_bytes: int | None = None
    files: int | None = None
    stack_bytes: int | None = None


@frozen
class Variable:
    """A variable that NCCL, Gloo or an engine reads. ``source`` is a file, or ``environment``."""

    name: str
    value: str
    source: str


@frozen
class Firewall:
    """What happens to new connections from outside. ``allows`` are the rules that let some in."""

    program: str = ""
    drops: bool = False
    allows: tuple[str, ...] = ()


@frozen
class Disk:
    """A folder that is filled, and its disk. ``purpose`` says what for."""

    path: str
    purpose: str
    free_mib: int
    total_mib: int
    inodes_free_percent: float | None = None
    writable: bool = True


@frozen
class Memory:
    """The host's memory in MiB; ``reserved`` is what is set aside as huge pages."""

    total_mib: int = 0
    available_mib: int = 0
    reserved_mib: int = 0


@frozen
class Clock:
    """Whether something keeps the clock right."""

    synchronized: bool = True
    by: str = ""


@frozen
class Certificate:
    """One of the agent's certificates. Times are seconds since 1970."""

    path: str
    not_before: float = 0.0
    not_after: float = 0.0
    trouble: str = ""


@frozen
class Engine:
    """An engine that is declared. Versions are empty where its packages do not say."""

    kind: str
    command: tuple[str, ...]
    trouble: str = ""
    version: str = ""
    cuda: str = ""
    nccl: str = ""


@frozen
class Docker:
    """How containers get their GPUs."""

    cgroup_driver: str = ""
    cdi: bool = False
    links: bool = False


@frozen
class Stuck:
    """A process that holds a GPU and does not run: ``state`` is the kernel's letter."""

    pid: int
    name: str
    state: str


@frozen
class Reach:
    """An address that this node dials. ``trouble`` is why it could not be reached."""

    address: str
    trouble: str = ""
