from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.scheduler.liveness import next_change, node_state
from llmgw.scheduler.state import NodeState
from llmgw.settings.document import Liveness

L = Liveness(heartbeat_s=5, unreachable_s=15, lost_s=60)


def test_states_by_silence() -> None:
    assert node_state(1000, 1014.9, L).state is NodeState.CONNECTED
    away = node_state(1000, 1017, L)
    assert (away.state, away.since, away.reason) == (NodeState.UNREACHABLE, 1015, "no heartbeat for 17 s")
    assert away.next == "lost in 43 s unless it is heard; then its replicas are placed elsewhere"
    assert node_state(1000, 1060, L).state is NodeState.LOST


def test_a_clock_that_went_back_is_no_silence() -> None:
    assert node_state(1000, 500, L).state is NodeState.CONNECTED


@given(st.floats(0, 200))
def test_next_change_is_where_the_state_changes(silent: float) -> None:
    at = next_change(1000, 1000 + silent, L)
    now = node_state(1000, 1000 + silent, L).state
    if at is None:
        assert now is NodeState.LOST
    else:
        assert at > 1000 + silent
        assert node_state(1000, at, L).state is not now
