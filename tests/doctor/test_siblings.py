"""Machines that should be alike: what is otherwise, and which of them is the odd one."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.doctor.facts import Facts, KernelModule
from llmgw.doctor.node_facts import Engine
from llmgw.doctor.siblings import unequal
from llmgw.hardware.inventory import Driver
from tests.doctor.beds import examine, rendered


@pytest.fixture
async def machine(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    facts, _ = await examine(rendered("hgx-h100", tmp_path_factory), "hgx-h100")
    return facts


async def test_equal_machines_have_nothing_to_say(machine: Facts) -> None:
    assert unequal({}) == ()
    assert unequal({"a": machine}) == ()
    assert unequal({"a": machine, "b": machine, "c": machine}) == ()


async def test_the_odd_one_is_named(machine: Facts) -> None:
    other = evolve(machine, driver=Driver("999.1"))
    (found,) = unequal({"a": machine, "b": other, "c": machine})
    assert (found.thing, found.usual) == ("NVIDIA driver", machine.driver.version)
    assert dict(found.odd) == {"b": "999.1"}
    assert f"NVIDIA driver: b has 999.1, the others {machine.driver.version}. " in str(found)
    # Of two nobody can say which: both are named.
    (found,) = unequal({"a": machine, "b": other})
    assert (found.usual, sorted(found.odd)) == ("", ["a", "b"])
    # What one could not read is no difference.
    assert unequal({"a": machine, "b": evolve(machine, driver=Driver(""), module=KernelModule())}) == ()


async def test_firmware_mtu_rate_gid_and_nccl(machine: Facts) -> None:
    assert machine.fabrics, "the machine has a fabric to compare"
    assert machine.fabrics[0].ports
    label = machine.fabrics[0].label
    name = machine.fabrics[0].ports[0].adapter
    adapter = machine.adapter(name)
    assert adapter is not None
    port = adapter.ports[0]
    slow = evolve(adapter, firmware="20.0.1", ports=(evolve(port, rate_gbps=100.0), *adapter.ports[1:]))
    changed = evolve(
        machine,
        adapters=tuple(slow if a.name == name else a for a in machine.adapters),
        netdevs=tuple(evolve(n, mtu=1234) if n.name in adapter.netdevs else n for n in machine.netdevs),
        fabrics=(evolve(machine.fabrics[0], ports=machine.fabrics[0].ports[:-1]), *machine.fabrics[1:]),
        engines=(Engine("vllm", ("vllm",), nccl="2.1", version="1"),),
    )
    usual = evolve(machine, engines=(Engine("vllm", ("vllm",), nccl="2.2", version="1"),))
    things = {found.thing: found for found in unequal({"a": usual, "b": usual, "c": changed})}
    assert dict(things["NCCL of vllm"].odd) == {"c": "2.1"}
    assert dict(things[f"ports on fabric {label}"].odd) == {"c": str(len(machine.fabrics[0].ports) - 1)}
    assert "100" in things[f"rate on fabric {label}, Gb/s"].odd["c"]
    assert f"firmware of adapters {adapter.board}" in things
    assert "vllm" not in things


async def test_other_cards_are_no_siblings(machine: Facts) -> None:
    other = evolve(machine, driver=Driver("999.1"), cards=machine.cards[:2])
    assert unequal({"a": machine, "b": other}) == ()
