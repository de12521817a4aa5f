"""Fake machines as the doctor meets them, examined in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import pytest
from attrs import evolve, field, frozen

from fakes.machines import MACHINES, Card, Hca, Machine, render
from fakes.patient import NOW, Laid, Patient, healthy
from llmgw.doctor.checks import CHECKS
from llmgw.doctor.collect import collect
from llmgw.doctor.facts import Facts
from llmgw.doctor.gather import Asker
from llmgw.doctor.peer_facts import Peer, PeerPath
from llmgw.doctor.tree import Missing
from llmgw.doctor.verdict import Verdict, judge
from llmgw.hardware.fabric import FabricRule, LinkLayer
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import Address, AgentConfig, Discovery, EngineInstall, TlsFiles

IB = FabricRule("ib", link_layer=LinkLayer.INFINIBAND)
ETH = FabricRule("eth", link_layer=LinkLayer.ETHERNET)
AGENT = AgentConfig(
    id="n1",
    control_planes=(Address("10.0.0.1", 8443),),
    tls=TlsFiles("/etc/llmgw/node.pem", "/etc/llmgw/node.key", "/etc/llmgw/ca.pem"),
    state_dir="/var/lib/llmgw-agent",
    address="10.1.0.5",
    engines=(EngineInstall(EngineKind.VLLM, ("/opt/vllm/bin/vllm", "serve")),),
)
_GB200 = Card("NVIDIA GB200", 189471, "10.0")
_H100 = MACHINES["hgx-h100"].cards[0]
TRAY = Machine(
    "tray of a GB200 rack",
    (_GB200,) * 4,
    tuple(Hca(f"mlx5_{n}", netdev=f"ib{n}") for n in range(4)),
    driver="580.105.08",
    cuda="13.0",
    nvswitch=18,
    cluster="c1234567-89ab-4cde-8f01-23456789abcd",
)
BASES: Mapping[str, tuple[Machine, tuple[FabricRule, ...]]] = {
    "hgx-h100": (MACHINES["hgx-h100"], (IB, ETH)),
    "hgx-b200": (MACHINES["hgx-b200"], (ETH,)),
    "dgx-a100": (MACHINES["dgx-a100"], (IB,)),
    "a100-mig": (MACHINES["a100-mig"], ()),
    "tray": (TRAY, (IB,)),
    "h100-7x1g": (MACHINES["h100-7x1g"], ()),
    "empty-mig": (Machine("MIG mode and nothing carved", (evolve(_H100, mig=()), _H100)), ()),
}


@frozen
class Change:
    """What is laid over a healthy machine. ``agent`` are fields of agent.yaml, ``dial`` is what dialling answers,
    ``peer`` another node that is tried, or why it cannot be."""

    files: Mapping[str, Laid] = field(factory=dict)
    said: Mapping[str, Any] = field(factory=dict)
    cards: Mapping[int, Mapping[str, Any]] = field(factory=dict)
    agent: Mapping[str, Any] = field(factory=dict)
    more: Mapping[str, Any] = field(factory=dict)
    dial: str | None = ""
    peer: tuple[Peer, PeerPath] | str | None = None


_ROOTS: dict[str, Patient] = {}


def rendered(name: str, folders: pytest.TempPathFactory) -> Patient:
    """A healthy machine; its folder is written once for all tests."""
    if name not in _ROOTS:
        folder = folders.mktemp(name)
        render(BASES[name][0], folder)
        _ROOTS[name] = healthy(folder)
    return _ROOTS[name]


@cache
def _agent(name: str) -> AgentConfig:
    return evolve(AGENT, fabrics=BASES[name][1])


async def facts_of(patient: Patient, name: str, *changes: Change) -> Facts:
    """What the doctor reads of it."""
    agent = _agent(name)
    dial: str | None = ""
    peer: tuple[Peer, PeerPath] | str | None = None
    for change in changes:
        patient = patient.with_(change.files, change.said, change.cards, **change.more)
        agent = evolve(agent, **change.agent)
        dial = change.dial
        peer = change.peer or peer
    asker = Asker(
        patient, Discovery(root=str(patient.root)), agent, agent.fabrics, {}, _dialler(dial), _peer(peer), lambda: NOW,
        gap_s=0,
    )  # fmt: skip
    return await collect(asker)


async def examine(patient: Patient, name: str, *changes: Change) -> tuple[Facts, tuple[Verdict, ...]]:
    """The facts and every verdict on them."""
    facts = await facts_of(patient, name, *changes)
    return facts, judge(facts, CHECKS)


def _peer(
    found: tuple[Peer, PeerPath] | str | None,
) -> Callable[[], Awaitable[tuple[Peer, PeerPath | None]]] | None:
    async def ask() -> tuple[Peer, PeerPath | None]:
        if isinstance(found, tuple):
            return found[0], None if found[0].trouble else found[1]
        raise Missing(str(found))

    return None if found is None else ask


def _dialler(answer: str | None) -> Callable[[str, int], Awaitable[str]] | None:
    async def dial(_host: str, _port: int) -> str:
        return answer or ""

    return None if answer is None else dial
