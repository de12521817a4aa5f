"""The host: clock, disks, certificates, memory, limits, and the way to the control plane."""

from __future__ import annotations

from llmgw.doctor.checks.engines import numbers
from llmgw.doctor.checks.gpu import NO_GPU, has_gpus, some
from llmgw.doctor.facts import Facts
from llmgw.doctor.node_facts import Disk
from llmgw.doctor.verdict import Check, Finding, Severity

_DAY_S = 86400.0
_SOON_S = 7 * _DAY_S
_CLOCK_S = 5.0
_FEW_PERCENT = 10.0
_FULL_MIB = 1024
_FILES = 65536
_STACK_FIX = (2, 28)


def _time(facts: Facts) -> Finding | None:
    early = [c.path for c in facts.certificates if not c.trouble and c.not_before > facts.now]
    if early:
        return Finding(
            f"By this clock certificates are not valid yet: {some(early)}. The control plane will refuse the agent."
        )
    ahead = facts.plane_ahead_s
    if abs(ahead) > _CLOCK_S:
        how = "ahead of" if ahead > 0 else "behind"
        return Finding(f"The control plane's clock is at least {abs(ahead):.0f} s {how} this one.")
    return None if facts.clock.synchronized else Finding("Nothing keeps this machine's clock right.")


def _disk(facts: Facts) -> Finding | None:
    full = [d for d in facts.disks if d.free_mib < _FULL_MIB or not d.writable]
    tight = [d for d in facts.disks if d not in full and _tight(d)]
    if not full and not tight:
        return None
    said = some([_disk_line(d) for d in (*full, *tight)])
    return Finding(f"Folders that fill up: {said}.", severity=Severity.FAIL if full else Severity.WARN)


def _tight(disk: Disk) -> bool:
    inodes = disk.inodes_free_percent
    few = disk.total_mib > 0 and 100 * disk.free_mib / disk.total_mib < _FEW_PERCENT
    return few or (inodes is not None and inodes < _FEW_PERCENT)


def _disk_line(disk: Disk) -> str:
    if not disk.writable:
        return f"{disk.path} ({disk.purpose}) cannot be written"
    inodes = disk.inodes_free_percent
    if inodes is not None and inodes < _FEW_PERCENT:
        return f"{disk.path} ({disk.purpose}) has {inodes:.0f} % of its inodes left"
    return f"{disk.path} ({disk.purpose}) has {disk.free_mib / 1024:.1f} GiB left"


def _certificates(facts: Facts) -> Finding | None:
    said = []
    for c in facts.certificates:
        if c.trouble:
            said.append(f"{c.path} {c.trouble}")
        elif c.not_after - facts.now < _SOON_S:
            days = (c.not_after - facts.now) / _DAY_S
            said.append(f"{c.path} ended {-days:.0f} days ago" if days < 0 else f"{c.path} ends in {days:.1f} days")
    return Finding(f"Certificates of the agent: {some(said)}.") if said else None


def _memory(facts: Facts) -> Finding | None:
    m = facts.memory
    if m.total_mib and m.reserved_mib * 4 > m.total_mib:
        return Finding(f"{m.reserved_mib / 1024:.0f} of {m.total_mib / 1024:.0f} GiB are set aside as huge pages.")
    if m.total_mib and m.available_mib * 20 < m.total_mib:
        return Finding(
            f"{m.available_mib / 1024:.1f} of {m.total_mib / 1024:.0f} GiB of the host's memory are available."
        )
    return None


def _files(facts: Facts) -> Finding | None:
    files = facts.limits.files
    return (
        None
        if files is None or files >= _FILES
        else Finding(f"The running agent may open {files} files, and so may its engines.")
    )


def _balancing(facts: Facts) -> Finding | None:
    if not facts.numa_balancing or facts.sockets < 2:
        return None
    return Finding("The kernel moves memory between NUMA nodes by itself, which stops GPU traffic for milliseconds.")


def _stack(facts: Facts) -> Finding | None:
    old = [e for e in facts.engines if e.nccl and numbers(e.nccl) < _STACK_FIX]
    if facts.limits.stack_bytes is not None or not old:
        return None
    return Finding(f"The agent's stack is unlimited, and NCCL {old[0].nccl} then gives its threads 2 MB.")


def _ipc(facts: Facts) -> Finding | None:
    return Finding("logind removes shared memory of users who log out, NCCL's among it.") if facts.remove_ipc else None


def _reach(facts: Facts) -> Finding | None:
    bad = [f"{r.address} ({r.trouble})" for r in facts.reach if r.trouble]
    if not bad:
        return None
    some_work = len(bad) < len(facts.reach)
    return Finding(
        f"Control planes that cannot be reached: {some(bad)}.", severity=Severity.WARN if some_work else None
    )


CHECKS = (
    Check("time.sync", Severity.FAIL, ("clock",), _time,
          "systemctl enable --now chronyd (or systemd-timesyncd), and look at the hardware clock.",
          "A clock that is wrong makes certificates invalid; in a container the host keeps it.", NO_GPU),
    Check("disk.model-cache", Severity.FAIL, ("disks",), _disk,
          "Free space, or move the cache (weights.cache in agent.yaml) to a larger disk.",
          "A folder that is filled has less than 1 GiB left, cannot be written, or has less than a tenth of its space or "
          "inodes."),
    Check("link.unreachable", Severity.FAIL, ("reach",), _reach,
          "Check the address in agent.yaml, DNS, routes and firewalls, and that llmgw server runs there.",
          "The agent dials out to the control plane, and nothing accepts there."),
    Check("cert.expiry", Severity.WARN, ("certificates",), _certificates,
          "Make a new one: llmgw ca",
          "A certificate of the agent cannot be read, has ended, or ends within a week."),
    Check("mem.host", Severity.WARN, ("memory",), _memory,
          "Lower vm.nr_hugepages, or stop what holds the memory.",
          "Weights are read and caches are kept in the host's memory."),
    Check("limits.nofile", Severity.WARN, ("limits",), _files,
          "LimitNOFILE=1048576 in the agent's unit; systemctl daemon-reload; restart it.",
          "NCCL opens many connections; fewer than 65536 files are not enough on many nodes.", NO_GPU,
          applies=lambda facts: facts.unit.pid > 0, gate=("unit",)),
    Check("kernel.numa-balancing", Severity.WARN, ("numa_balancing",), _balancing,
          "sysctl -w kernel.numa_balancing=0, and into /etc/sysctl.d",
          "Automatic NUMA balancing is on, on a machine with GPUs and several sockets.", NO_GPU, applies=has_gpus, gate=("pci_gpus",)),
    Check("limits.stack", Severity.INFO, ("limits",), _stack,
          "LimitSTACK=8M in the agent's unit.",
          "Old versions of NCCL misread an unlimited stack.", NO_GPU, applies=lambda facts: facts.unit.pid > 0, gate=("unit",)),
    Check("ipc.removeipc", Severity.INFO, ("remove_ipc",), _ipc,
          "RemoveIPC=no in /etc/systemd/logind.conf, where engines run as a user who also logs in.",
          "It concerns users who log in, not a service's own.", NO_GPU,
          applies=lambda facts: has_gpus(facts) and facts.unit.load != "loaded", gate=("pci_gpus",)),
)  # fmt: skip
