"""The catalogue: every check, the graver subjects first. Pure."""

from __future__ import annotations

from llmgw.doctor.checks import (
    access,
    engines,
    fabric,
    gpu,
    gpu_health,
    host,
    management,
    mig,
    nvlink,
    peer,
    placement,
    ports,
)
from llmgw.doctor.checks import environment as environment_checks
from llmgw.doctor.verdict import Check

CHECKS: tuple[Check, ...] = (
    *gpu.CHECKS,
    *nvlink.CHECKS,
    *gpu_health.CHECKS,
    *mig.CHECKS,
    *access.CHECKS,
    *fabric.CHECKS,
    *ports.CHECKS,
    *management.CHECKS,
    *peer.CHECKS,
    *placement.CHECKS,
    *environment_checks.CHECKS,
    *engines.CHECKS,
    *host.CHECKS,
)
