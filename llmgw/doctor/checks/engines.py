"""Engines: whether they can run, with this driver, in their containers."""

from __future__ import annotations

import re

from llmgw.doctor.checks.gpu import DRIVER, NO_GPU, some
from llmgw.doctor.facts import Facts
from llmgw.doctor.node_facts import Engine
from llmgw.doctor.verdict import Check, Finding, Severity
from llmgw.hardware.inventory import AdapterKind

_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version and the least driver for it (NVIDIA's CUDA compatibility guide)."""

_GID_FIX = (2, 26, 2)
_GID_AUTO = (2, 21)
_SGLANG_LEAST = (2, 27, 7)
_GIB_MIB = 1024


def numbers(version: str) -> tuple[int, ...]:
    """``2.27.3`` as numbers to compare."""
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version)[:4])


def container(engine: Engine) -> bool:
    """Whether the engine's command starts a container."""
    return bool(engine.command) and engine.command[0].rsplit("/", 1)[-1] in ("docker", "podman", "nerdctl")


def _missing(facts: Facts) -> Finding | None:
    bad = [f"{e.kind} ({e.trouble})" for e in facts.engines if e.trouble]
    return Finding(f"Engines that agent.yaml declares cannot run: {some(bad)}.") if bad else None


def _cuda(facts: Facts) -> Finding | None:
    have = numbers(facts.driver.version or facts.module.version)
    for engine in facts.engines:
        wants = numbers(engine.cuda)
        least = _LEAST_DRIVER.get(wants[0]) if wants else None
        if have and least is not None and have[0] < least:
            stands_in = [version for version in facts.compat if numbers(version)[0] >= least]
            if stands_in:
                return Finding(
                    f"{engine.kind} is built for CUDA {engine.cuda}, this driver is older, and it runs only with the "
                    f"compatibility libraries of driver {stands_in[-1]} that are here.",
                    "Give the engine's env LD_LIBRARY_PATH=/usr/local/cuda/compat (data-centre cards only), or upgrade the "
                    "driver.",
                    Severity.WARN,
                )
            return Finding(
                f"{engine.kind} is built for CUDA {engine.cuda}, which needs a driver from {least} on; this is {facts.driver.version or facts.module.version}."
            )
    return None


def _container(facts: Facts) -> Finding | None:
    for engine in facts.engines:
        if not container(engine) or not any(f.ports for f in facts.fabrics):
            continue
        words = " ".join(engine.command)
        if "--privileged" in words:
            continue
        lacking = [
            name
            for name, pattern in (
                ("/dev/infiniband", r"/dev/infiniband"),
                ("unlimited memlock", r"memlock[=:]-1"),
                ("IPC_LOCK", r"IPC_LOCK"),
            )
            if not re.search(pattern, words)
        ]
        if lacking:
            return Finding(f"The container of {engine.kind} cannot use a fabric: it lacks {some(lacking)}.")
    return None


def _nccl(facts: Facts) -> Finding | None:
    said = []
    roce = any(f.kind is AdapterKind.ROCE and f.ports for f in facts.fabrics)
    for engine in facts.engines:
        version = numbers(engine.nccl)
        if not version:
            continue
        if roce and _GID_AUTO <= version < _GID_FIX and facts.gid_starts and any(s.index > 3 for s in facts.gid_starts):
            said.append(f"{engine.kind} has NCCL {engine.nccl}, which ends at GIDs of another namespace")
        if engine.kind == "sglang" and version < _SGLANG_LEAST:
            said.append(f"sglang has NCCL {engine.nccl}, with which disaggregated serving fails")
    versions = {engine.nccl for engine in facts.engines if engine.nccl}
    if not said and len(versions) > 1 and len({e.kind for e in facts.engines}) == 1:
        said.append(f"installs of one engine have NCCL {' and '.join(sorted(versions))}")
    return Finding(f"NCCL of an engine is known to fail here: {some(said)}.") if said else None


def _shm(facts: Facts) -> Finding | None:
    wanted = _GIB_MIB * max(1, len(facts.cards))
    sized = [
        e for e in facts.engines if container(e) and not re.search(r"--shm-size|--ipc[= ]host", " ".join(e.command))
    ]
    if sized:
        return Finding(
            f"The container of {some([e.kind for e in sized])} gets 64 MiB of /dev/shm; {len(facts.cards)} ranks need more."
        )
    if facts.shm_mib < wanted:
        return Finding(
            f"Shared memory (/dev/shm) has {facts.shm_mib} MiB; ranks on {len(facts.cards)} cards need about {wanted}."
        )
    return None


def _docker(facts: Facts) -> Finding | None:
    docker = facts.docker
    if docker.cgroup_driver != "systemd" or docker.cdi or docker.links:
        return None
    return Finding(
        "Docker's cgroups are systemd's and GPUs are not given by CDI: any daemon-reload takes them from running containers."
    )


CHECKS = (
    Check("engine.missing", Severity.FAIL, ("engines",), _missing,
          "Install it, correct its command in agent.yaml, or take it out.",
          "The program that starts a declared engine is not there or may not be run."),
    Check("engine.cuda-driver", Severity.FAIL, ("engines", "driver"), _cuda,
          "Upgrade the driver, or install the engine's build for an older CUDA.",
          "An engine is built for a CUDA that this driver is too old for.", DRIVER),
    Check("container.rdma", Severity.FAIL, ("engines", "fabrics"), _container,
          "--device /dev/infiniband --ulimit memlock=-1 --cap-add IPC_LOCK --ipc=host",
          "An engine in a container is not given what RDMA needs.", NO_GPU),
    Check("engine.nccl.version", Severity.WARN, ("engines",), _nccl,
          "Upgrade the nvidia-nccl package of the engine's environment.",
          "A version of NCCL has a fault that matters on this node.", NO_GPU),
    Check("engine.shm", Severity.WARN, ("shm_mib",), _shm,
          "--ipc=host or --shm-size=16g for a container; for a pod an emptyDir of medium Memory at /dev/shm.",
          "NCCL and the engines' queues share memory there, about 1 GiB for each card.", NO_GPU,
          applies=lambda facts: len(facts.cards) > 1),
    Check("container.gpus-lost", Severity.WARN, ("docker",), _docker,
          "Give containers their GPUs by CDI (nvidia-ctk cdi generate), or make the links in /dev/char.",
          "With systemd's cgroups a daemon-reload forgets devices that were given past them.", NO_GPU,
          applies=lambda facts: any(container(e) for e in facts.engines)),
)  # fmt: skip
