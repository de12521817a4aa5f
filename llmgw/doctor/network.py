"""The network that a rank would be given on each fabric of this node, and what NCCL would make of it here. Pure.

The variables come from the code that launches engines. Files of NCCL add what the environment does not set: the
user's before the system's (NCCL's documentation, "Environment Variables").
"""

from __future__ import annotations

from attrs import frozen

from llmgw.doctor.facts import Facts
from llmgw.doctor.node_facts import Variable
from llmgw.engines.nccl import interfaces_selected, nccl_env, ports_selected
from llmgw.hardware.fabric import hca_list, natural

FROM_FILES_ALSO = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN")


@frozen
class Plan:
    """One fabric: the variables a rank gets, the ports that NCCL takes with them, and what a file changes.

    ``ports`` are written ``mlx5_0:1``; ``meant`` are those of the fabric; ``overridden`` is what a file of NCCL adds.
    """

    fabric: str
    variables: tuple[Variable, ...]
    ports: tuple[str, ...]
    meant: tuple[str, ...]
    interfaces: tuple[str, ...]
    overridden: tuple[Variable, ...]


def plans(facts: Facts) -> tuple[Plan, ...]:
    """The network of a rank on each declared fabric."""
    return tuple(_plan(facts, number) for number in range(len(facts.fabrics)))


def _plan(facts: Facts, number: int) -> Plan:
    fabric = facts.fabrics[number]
    env = nccl_env(fabric, facts.interface)
    added: dict[str, Variable] = {}
    for variable in facts.variables:
        if variable.source != "environment" and variable.name not in env:
            added.setdefault(variable.name, variable)
    everything = {**{name: v.value for name, v in added.items()}, **env}
    off = everything.get("NCCL_IB_DISABLE", "0").strip() not in ("", "0")
    taken = frozenset[tuple[str, int]]() if off else ports_selected(everything.get("NCCL_IB_HCA"), facts.adapters)
    return Plan(
        fabric=fabric.label,
        variables=tuple(Variable(name, value, "llmgw") for name, value in sorted(env.items())),
        ports=tuple(f"{name}:{port}" for name, port in sorted(taken, key=lambda p: (natural(p[0]), p[1]))),
        meant=hca_list(fabric),
        interfaces=interfaces_selected(everything.get("NCCL_SOCKET_IFNAME"), [n.name for n in facts.netdevs]),
        overridden=tuple(added[name] for name in sorted(added)),
    )
