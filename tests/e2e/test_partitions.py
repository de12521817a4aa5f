"""The network between an agent and its control plane goes away for a while: engines serve on, and all is well soon after."""

from __future__ import annotations

import time

import pytest

from fakes.proxy import Proxy, in_thread
from llmgw.settings.daemon import Address
from tests.e2e.conftest import System

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CONVERGED_S = 5.0


@pytest.mark.parametrize("seconds", [1, *(pytest.param(s, marks=pytest.mark.soak) for s in (5, 15, 40, 120))])
def test_partition(prepared: System, seconds: float) -> None:
    system = prepared
    with in_thread(Address("127.0.0.1", system.demo.link_port)) as proxy:
        agent_yaml = system.demo.agent_yaml
        agent_yaml.write_text(
            agent_yaml.read_text().replace(f"127.0.0.1:{system.demo.link_port}", f"127.0.0.1:{proxy.address.port}")
        )
        system.run.start_server()
        system.run.start_agent()
        system.run.wait("every replica to be ready", 40, system.run.all_ready)
        engines = system.pids()
        proxy.do(Proxy.partition)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert system.whole(5), "requests do not go through the link"
            time.sleep(min(1.0, seconds / 2))
        began, carried = time.monotonic(), proxy.do(lambda p: p.carried)
        proxy.do(Proxy.heal)

        def converged() -> bool:
            answer = system.run.api("nodes")
            (node,) = answer["nodes"]
            heard = proxy.do(lambda p: p.carried) > carried + 100
            return heard and node["state"] == "connected" and system.run.all_ready()

        system.until("the node to be back", converged, 30)
        took = time.monotonic() - began
        print(f"\n{seconds} s of partition: converged {took:.2f} s after it")
        assert took < CONVERGED_S
        assert system.pids() == engines, "an engine was restarted"
        assert all(r["generation"] == 1 for r in system.run.replicas())
