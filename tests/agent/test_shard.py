from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.agent.shard import (
    NEXT,
    DrainAsked,
    Ended,
    Kill,
    Observation,
    Probed,
    Progressed,
    StopAsked,
    Terminate,
    Tick,
    Worked,
    adopted,
    begin,
    step,
)
from llmgw.scheduler.state import Exit, ShardState
from llmgw.settings.catalog import Limits

LIMITS = Limits(start_s=10, load_s=100, hang_s=50, drain_s=5, stop_s=3)
UP = Probed(healthy=True, listed=False, said="")
LISTED = Probed(healthy=True, listed=True, said="")
DOWN = Probed(healthy=False, listed=False, said="nothing answers on port 1")


def play(*told: tuple[float, Observation]) -> tuple:
    shard, actions = begin("m", LIMITS, 0), ()
    for at, observation in told:
        shard, actions = step(shard, observation, "m", LIMITS, at)
    return shard, actions


def test_a_life() -> None:
    assert play((1, DOWN))[0].state is ShardState.STARTING
    loading, _ = play((1, Progressed("loading weights, file 1 of 4", 0.25)))
    assert (loading.state, loading.progress, loading.reason) == (
        ShardState.LOADING,
        0.25,
        "loading weights, file 1 of 4",
    )
    assert play((1, UP))[0].state is ShardState.LOADING, "health alone is not ready"
    ready, _ = play((1, UP), (2, LISTED))
    assert (ready.state, ready.since, ready.deadline) == (ShardState.READY, 2, None)
    draining, actions = play((1, LISTED), (2, DrainAsked("scaled down")))
    assert (draining.state, draining.reason, actions) == (ShardState.DRAINING, "scaled down", ())
    stopping, actions = play((1, LISTED), (2, DrainAsked("x")), (3, StopAsked("enough", 3)))
    assert (stopping.state, stopping.deadline, actions) == (ShardState.STOPPING, 6, (Terminate(),))
    stopped, _ = play((1, LISTED), (3, StopAsked("enough", 3)), (4, Ended(Exit(0))))
    assert (stopped.state, stopped.reason) == (ShardState.STOPPED, "enough; exit code 0")


def test_sigkill_after_the_grace_and_again_each_second() -> None:
    shard, actions = play((1, LISTED), (2, StopAsked("x", 3)), (4.9, Tick()))
    assert actions == ()
    shard, actions = step(shard, Tick(), "m", LIMITS, 5.0)
    assert actions == (Kill(),)
    assert step(shard, Tick(), "m", LIMITS, 5.5)[1] == ()
    assert step(shard, Tick(), "m", LIMITS, 6.0)[1] == (Kill(),)


def test_a_second_stop_can_only_hurry() -> None:
    shard, actions = play((1, LISTED), (2, StopAsked("x", 30)), (3, StopAsked("now", 1)))
    assert (shard.deadline, actions) == (4, ())
    assert step(shard, StopAsked("slowly", 60), "m", LIMITS, 3)[0].deadline == 4


def test_an_end_that_nobody_asked_for_is_a_failure_whatever_its_code() -> None:
    shard, _ = play((1, LISTED), (2, Ended(Exit(0))))
    assert shard.state is ShardState.FAILED
    assert shard.reason == "the engine ended without being asked while ready: exit code 0"
    assert play((1, Ended(Exit(signal=9))))[0].reason.endswith("while starting: killed by signal 9")
    told, _ = play((1, Ended(Exit(1), last="ValueError: no such model")))
    assert told.reason.endswith("exit code 1; its last line: ValueError: no such model")
    unseen, _ = play((1, Ended(Exit(), error="nope cannot be started: No such file or directory")))
    assert unseen.reason == "nope cannot be started: No such file or directory"


def test_limits_name_what_they_waited_for() -> None:
    shard, actions = play((10, Tick()))
    assert actions == (Terminate(),)
    failed, _ = step(shard, Ended(Exit(signal=15)), "m", LIMITS, 11)
    assert failed.state is ShardState.FAILED
    assert failed.reason.startswith("starting for 10 s, waited for an answer or a line of progress")
    late, _ = play((1, UP), (101, Tick()), (102, Ended(Exit(0))))
    assert late.reason == (
        "stood still for 100 s at: /health answers, the model is not listed yet (loading for 100 s, "
        "waited for the model to be listed)"
    )


def test_what_moves_is_not_ended_and_what_stands_still_is() -> None:
    files = [(n * 90.0, Progressed(f"loading weights, file {n} of 9", n / 9)) for n in range(1, 10)]
    shard, actions = play(*files, (900, Tick()))
    assert (shard.state, actions) == (ShardState.LOADING, ())
    more = [(900.0 + n * 90, Progressed("compiling", n / 10)) for n in range(4)]
    shard, actions = play(*files, *more, (1260, Tick()))
    assert (shard.state, actions) == (ShardState.LOADING, ())
    shard, actions = play(*files, *more, (1271, Tick()), (1272, Ended(Exit(0))))
    assert shard.reason == "stood still for 100 s at: compiling (loading for 1181 s, waited for the model to be listed)"


def test_the_same_line_again_is_standing_still() -> None:
    same = [(float(n * 10), Progressed("loading weights, file 3 of 9", 0.33)) for n in range(1, 10)]
    assert play(*same, (109, Tick()))[1] == ()
    assert play(*same, (110, Tick()))[1] == (Terminate(),)


def test_going_round_in_circles_is_standing_still() -> None:
    circle = [(float(n * 10), Progressed(("loading weights", "compiling")[n % 2], None)) for n in range(1, 40)]
    shard, now = begin("m", LIMITS, 0.0), 0.0
    for now, observation in circle:
        shard, _ = step(shard, observation, "m", LIMITS, now)
        shard, actions = step(shard, Tick(), "m", LIMITS, now)
        if actions:
            break
    assert (shard.state, now) == (ShardState.STOPPING, 120)
    assert shard.reason.startswith("stood still for 100 s at: ")


def test_a_ready_engine_with_requests_and_no_token_hangs_though_it_answers() -> None:
    story: list[tuple[float, Observation]] = [(1, LISTED), (2, Worked(3, 100.0)), (30, Worked(3, 140.0)), (31, LISTED)]
    alive, actions = play(*story, (60, Worked(3, 140.0)), (79.9, Worked(3, 140.0)))
    assert (alive.state, actions) == (ShardState.READY, ())
    hung, actions = play(*story, (60, Worked(3, 140.0)), (80, Worked(2, 140.0)))
    assert actions == (Terminate(),)
    assert (hung.state, hung.reason) == (ShardState.STOPPING, "hung: 2 requests run and no token came for 50 s")
    failed, _ = step(hung, Ended(Exit(0)), "m", LIMITS, 81)
    assert (failed.state, failed.reason) == (ShardState.FAILED, "hung: 2 requests run and no token came for 50 s")


def test_an_idle_engine_a_working_one_and_a_silent_one_do_not_hang() -> None:
    idle = [(float(t), Worked(0, 5.0)) for t in range(2, 500, 2)]
    working = [(float(t), Worked(1, float(t))) for t in range(2, 500, 2)]
    silent: list[tuple[float, Observation]] = [(2.0, Worked(1, 5.0)), (490.0, Tick())]
    restarted_counter = [(2.0, Worked(1, 900.0)), (40.0, Worked(1, 3.0)), (80.0, Worked(1, 3.0))]
    for story in (idle, working, silent, restarted_counter):
        assert play((1, LISTED), *story)[0].state is ShardState.READY
    burst = [(2.0, Worked(1, 5.0)), (40.0, Worked(0, 5.0)), (60.0, Worked(1, 5.0)), (100.0, Worked(1, 5.0))]
    assert play((1, LISTED), *burst)[0].state is ShardState.READY, "a request that just came is not the one from before"
    loading, _ = play((1, UP), (2, Worked(1, 5.0)), (90, Worked(1, 5.0)))
    assert loading.state is ShardState.LOADING


def test_what_an_engine_works_is_no_news() -> None:
    ready, _ = play((1, LISTED))
    assert step(ready, Worked(3, 100.0), "m", LIMITS, 2)[0] == ready


def test_what_cannot_be_killed_is_said() -> None:
    shard, _ = play((1, LISTED), (2, StopAsked("x", 3)), (30, Ended(Exit(0), left=(812,))))
    assert (shard.state, shard.reason) == (ShardState.FAILED, "x; pids 812 cannot be killed")


def test_a_ready_shard_whose_health_fails_says_so_and_recovers() -> None:
    sick, _ = play((1, LISTED), (2, DOWN))
    assert (sick.state, sick.reason) == (
        ShardState.READY,
        "was ready, but /health fails now: nothing answers on port 1",
    )
    assert step(sick, LISTED, "m", LIMITS, 3)[0].reason == "/v1/models lists m"


def test_adoption_keeps_what_serves_in_service() -> None:
    assert adopted(ShardState.READY, "m", LIMITS, 100, 5).since == 5
    assert adopted(ShardState.LOADING, "m", LIMITS, 100, 5).state is ShardState.STARTING


observations = st.one_of(
    st.builds(Probed, st.booleans(), st.booleans(), st.just("said")),
    st.builds(Progressed, st.just("phase"), st.none() | st.floats(0, 1)),
    st.builds(Ended, st.builds(Exit, st.none() | st.integers(0, 255)), st.sampled_from(["", "cannot be started"])),
    st.builds(DrainAsked, st.just("drain")),
    st.builds(Worked, st.integers(0, 3), st.floats(0, 9)),
    st.builds(StopAsked, st.just("stop"), st.floats(0, 50)),
    st.just(Tick()),
)


@given(st.lists(st.tuples(st.floats(0, 30), observations), max_size=30))
@settings(max_examples=300)
def test_any_story_stays_in_the_table_and_comes_to_an_end(story: list[tuple[float, Observation]]) -> None:
    shard, now = begin("m", LIMITS, 0.0), 0.0
    for after, observation in story:
        now += after
        before = shard
        shard, actions = step(shard, observation, "m", LIMITS, now)
        assert shard.state is before.state or shard.state in NEXT[before.state]
        assert shard.reason
        assert shard.state.ended or shard.next or shard.state is ShardState.READY
        if before.state.ended:
            assert (shard, actions) == (before, ())
    if shard.state in (ShardState.STARTING, ShardState.LOADING, ShardState.STOPPING):
        seen = []
        for _ in range(4):
            now += 200
            shard, actions = step(shard, Tick(), "m", LIMITS, now)
            seen += actions
        assert Kill() in seen, "time alone ends what never gets ready"
