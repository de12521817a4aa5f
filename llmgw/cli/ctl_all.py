"""All of ``llmgw ctl``: each module adds its commands to the group."""

from __future__ import annotations

from llmgw.cli import ctl_config, ctl_context, ctl_identity, ctl_jobs, ctl_node, ctl_people, ctl_replica
from llmgw.cli.ctl import command
from llmgw.cli.ctl_audit import audit
from llmgw.cli.ctl_doctor import doctor

command.add_command(audit)
command.add_command(doctor)

__all__ = [
    "command",
    "ctl_config",
    "ctl_context",
    "ctl_identity",
    "ctl_jobs",
    "ctl_node",
    "ctl_people",
    "ctl_replica",
]
