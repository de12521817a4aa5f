"""The number of replicas follows the load, to zero and back, with real daemons and a client that waits."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import System

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SETTINGS = """\
models:
  demo-small:
    profiles:
      - name: one-gpu
        engine: vllm
        weights: /demo/no-weights
        device_class: h100-80g
        env: {FAKE_ENGINE: '{"load_s": 0.3, "token_s": 0.05}'}
    scaling: {min: 0, max: 2, target: 2, idle_s: 1.5, up_s: 0.2, down_s: 0.5, cooldown_s: 0.1, hold_s: 20}
liveness: {heartbeat_s: 1, unreachable_s: 3, lost_s: 8}
"""


def test_to_zero_and_back_for_a_request_that_waits_for_it(prepared: System) -> None:
    (prepared.demo.folder / "settings.yaml").write_text(SETTINGS)
    prepared.run.start_server()
    prepared.run.start_agent()

    def ready() -> int:
        return sum(r["state"] == "ready" for r in prepared.run.replicas())

    def kinds() -> list[str]:
        return [d["kind"] for d in prepared.run.api("decisions")["decisions"]]

    prepared.until("the node", lambda: prepared.run.node_state() == "connected")
    prepared.until("nobody to have asked for it", lambda: "scale" in kinds())
    prepared.until("nothing to run", lambda: prepared.run.replicas() == [])
    first = prepared.stream(60)
    assert ready() == 1, "it was started for the request, which waited"
    more = [prepared.stream(60) for _ in range(4)]
    prepared.until("a second one", lambda: len(prepared.run.replicas()) == 2)
    assert len({first.result(), *(stream.result() for stream in more)}) == 1, "the same request, the same answer"
    prepared.until("everything to be idle again", lambda: prepared.run.replicas() == [], 40)
    assert kinds().count("scale") >= 4
