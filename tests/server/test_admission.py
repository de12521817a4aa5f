from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.link.attempts import Attempts
from llmgw.server.admission import Presence, admit

presences = st.builds(
    Presence, st.sampled_from(["10.0.0.1:5", "10.0.0.2:5"]), st.sampled_from(["a", "b"]), st.sampled_from(["", "x", "y"]), st.just(1.8e9)
)  # fmt: skip


@given(presences, presences)
def test_nobody_but_the_same_agent_takes_a_session_over(there: Presence, new: Presence) -> None:
    refused = admit("n1", there, new, "subject CN=n1")
    if there.boot_id != new.boot_id:
        assert refused is not None
    elif there.installation and new.installation:
        assert (refused is None) == (there.installation == new.installation)
    else:
        assert refused is None, "an agent that does not say is told by its machine"
    if refused is not None:
        assert there.address in refused.found
        assert f"boot id {there.boot_id}" in refused.found
        assert refused.certificate == "subject CN=n1"


@given(presences)
def test_where_nobody_is_anybody_gets_in(new: Presence) -> None:
    assert admit("n1", None, new, "") is None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 20)), max_size=60))
def test_attempts_are_bounded_by_address_in_any_window(tries: list[tuple[str, float]]) -> None:
    attempts, now = Attempts(most=3, window_s=10), 0.0
    heard: dict[str, list[float]] = {"a": [], "b": []}
    for address, wait in tries:
        now += wait
        if attempts.wait_s(address, now) == 0:
            attempts.failed(address, now)
            heard[address].append(now)
        else:
            assert now + attempts.wait_s(address, now) <= heard[address][-3] + 10 + 1e-6
    for times in heard.values():
        assert all(fourth - first >= 10 - 1e-6 for first, fourth in zip(times, times[3:], strict=False))


def test_many_addresses_cost_little() -> None:
    attempts = Attempts()
    for number in range(10_000):
        attempts.failed(str(number), 0.0)
    assert len(attempts._failed) <= 4096
